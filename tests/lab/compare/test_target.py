"""``--until`` is read, and its direction found."""

import pytest

from hocket.errors import UsageError
from hocket.lab.compare import target
from hocket.lab.compare.results import Goal, Point
from hocket.lab.compare.target import Wish


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("accuracy=0.95", Wish("accuracy", 0.95, True)),
        ("val_loss = 0.3", Wish("val_loss", 0.3, False)),
        ("loss<=0.3", Wish("loss", 0.3, False)),
        ("loss >= 3", Wish("loss", 3.0, True)),
        ("score<1e-3", Wish("score", 1e-3, False)),
        ("distance=2", Wish("distance", 2.0, None)),
    ],
)
def test_what_is_to_be_reached(text: str, wish: Wish) -> None:
    assert target.parse(text) == wish


@pytest.mark.parametrize("text", ["accuracy", "=0.9", "accuracy=high", "accuracy=nan", "loss<=", ""])
def test_what_makes_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match=r"accuracy=0\.95"):
        target.parse(text)


def test_a_name_that_says_nothing_goes_by_its_first_value() -> None:
    wish = target.parse("distance=2")
    assert wish.target([]) is None
    assert wish.target([Point(0, 0, float("nan")), Point(1, 8, 5.0)]) == Goal("distance", 2.0, False)
    assert wish.target([Point(1, 8, 1.0)]) == Goal("distance", 2.0, True)


def test_infinity_has_a_direction() -> None:
    wish = target.parse("distance=2")
    assert wish.target([Point(0, 0, float("inf"))]) == Goal("distance", 2.0, False)
    assert wish.target([Point(0, 0, float("nan"))]) is None


def test_a_slip_of_the_pen_is_told_from_a_metric_that_comes_late() -> None:
    for wrong in ("acuracy", "Accuracy", "accurracy", "accuracy "):
        assert target.will_not_come(target.parse(f"{wrong}=0.9"), ["loss", "accuracy"]), wrong
    for late in ("val_loss", "acc", "val_accuracy", "test_loss"):
        assert not target.will_not_come(target.parse(f"{late}=0.9"), ["loss", "accuracy", "train_loss"]), late
    assert not target.will_not_come(target.parse("top5=0.9"), ["top1"])
    assert target.will_not_come(target.parse("accuracy=0.9"), [])


def test_an_unknown_metric_lists_those_there_are() -> None:
    wish = target.parse("acuracy=0.9")
    assert str(target.unknown(wish, ["loss", "accuracy"])).endswith("what it reports is loss, accuracy")
    assert "hocket.report(acuracy=…)" in str(target.unknown(wish, []))
