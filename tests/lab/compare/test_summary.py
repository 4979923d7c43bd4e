"""What stands in the table of the page."""

import re

from hypothesis import given
from hypothesis import strategies as st
from lab.compare.example import entry, made
from lab.compare.test_report import changed

from hocket.lab.compare import amounts, html_report, pictures, summary
from hocket.lab.compare.results import Comparison


def column(comparison: Comparison, title: str) -> list[str]:
    columns, rows = summary.of(comparison)
    return [row[[c.title for c in columns].index(title)] for row in rows]


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda parts: sum(parts) > 0.01))
def test_shares_add_to_a_hundred(parts: list[float]) -> None:
    parts = [part / sum(parts) for part in parts]
    found = amounts.percents(parts)
    assert sum(found) == 100 and all(abs(own - 100 * part) < 1.001 for own, part in zip(found, parts, strict=True))


def test_shares_in_table_and_picture() -> None:
    third = {"compute": 1 / 3, "communication": 1 / 3, "waiting": 1 / 3}
    found = made(repeats=1, workers=(2,), entries=(changed(entry("mirrored", 1, 1), shares=third),))
    title = "compute · communication · waiting"
    assert column(found, title) == ["34 · 33 · 33 %"] and "34 · 33 · 33 %" in html_report.html(found)


def test_nothing_sent_is_told_from_nothing_known() -> None:
    one, other, *_ = made(repeats=1, workers=(2,)).entries
    shared = changed(entry("central", 2, 1), sent=0, told={"communication": "shared memory"})
    unknown = changed(entry("gossip(topology='ring')", 2, 1), sent=0)
    found = made(entries=(one, other, shared, unknown))
    sent = column(found, "sent")
    assert sent[0] == "0 B" and sent[1].endswith("GB") and sent[2:] == ["0 B\nshared memory", "–"]
    (picture,) = [picture for picture in pictures.pictures(found) if picture.name == "sent"]
    assert "0 B: the workers of that strategy hand nothing over" in picture.caption
    assert "not known" in html_report.html(found)
    (plain,) = [picture for picture in pictures.pictures(made(repeats=1)) if picture.name == "sent"]
    assert "0 B" not in plain.caption


def test_samples_in_a_step_are_there_where_they_differ() -> None:
    def with_steps(*sizes: float) -> Comparison:
        entries = made(repeats=1, workers=(2,)).entries
        return made(
            entries=tuple(
                changed(e, gradients={"samples in a step": size, "unit": "samples"})
                for e, size in zip(entries, sizes, strict=False)
            )
        )

    assert column(with_steps(64.0, 128.0, 127.2), "samples a step") == ["64", "128", "127"]
    assert "samples a step" not in [c.title for c in summary.of(with_steps(115.4, 118.4, 128))[0]]


def test_a_name_of_two_lines_is_one() -> None:
    odd = made(entries=tuple(changed(e, curves={"a\n\tb": e.results[0].curves["loss"]}) for e in made().entries))
    assert summary.of(odd)[0][-1].title == "final a b"
    assert not re.search(r"<title[^>]*>[^<]*\n", html_report.html(odd))
