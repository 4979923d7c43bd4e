"""Strategies of other distributions are found by name, and nothing of them is imported before that."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket import specs
from hocket.errors import StrategyError
from hocket.specs import registry

TOY = """
from dataclasses import dataclass

from hocket.specs import Spec


@dataclass(frozen=True)
class Toy(Spec):
    name = "toy"
    implementation = "toy_at_work:ToyTraining"

    strength: float = 0.5


@dataclass(frozen=True)
class Demanding(Spec):
    name = "toy"
    implementation = "toy_at_work:ToyTraining"

    strength: float
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    _forget()
    yield tmp_path
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    sys.modules.pop("toy", None)
    registry._outside.cache_clear()
    registry._load.cache_clear()


def add(folder: Path, distribution: str, *lines: str) -> None:
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(["[hocket.strategies]", *lines]))
    (folder / "toy.py").write_text(TOY)


def test_strategies_from_outside_are_read_written_and_listed(outside: Path) -> None:
    add(outside, "toys", "toy = toy:Toy")
    assert specs.parse("mirrored") == specs.Mirrored()
    assert "toy" not in sys.modules
    spec = specs.parse("toy(strength=2)")
    assert specs.write(spec) == "toy(strength=2.0)" and specs.parse("toy(0.5)") == specs.parse("toy")
    with pytest.raises(StrategyError, match=r"unknown strategy 'tay': the choices are mirrored.*, toy\(strength=0.5\)"):
        specs.parse("tay")


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        ("mirrored = toy:Toy", "mirrored", "the distribution 'toys' adds a strategy 'mirrored', and Hocket has one"),
        ("toy = toy:Missing", "toy", "strategy 'toy' of the distribution 'toys' cannot be imported from 'toy:Missing'"),
        ("other = toy:Toy", "other", "'toy:Toy' must be a subclass of hocket.specs.Spec with name = 'other'"),
        ("toy = toy:dataclass", "toy", "'toy:dataclass' must be a subclass of hocket.specs.Spec"),
        ("toy = toy:Demanding", "toy", "option 'strength' has no default"),
    ],
)
def test_what_is_wrong_with_one_is_told_with_its_distribution(
    outside: Path, line: str, text: str, message: str
) -> None:
    add(outside, "toys", line)
    with pytest.raises(StrategyError) as error:
        specs.parse(text)
    assert message in str(error.value)


def test_two_distributions_cannot_have_the_same_name(outside: Path) -> None:
    add(outside, "toys", "toy = toy:Toy")
    add(outside, "games", "toy = toy:Demanding")
    with pytest.raises(StrategyError, match=r"the distribution '(toys|games)' adds .* the distribution '(toys|games)'"):
        specs.parse("mirrored")


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in registry.BUILT_IN if name != "dmb"), "dmb(extra=1)", "central(fused=True)",
        "local_sgd(time=1.0)", "diloco(fragments=2)", "gossip(push_sum=True)", "gossip(asynchronous=True)",
        "gossip(order='adapt_while_combine')", "mirrored -> local_sgd @ epoch 2",
    ],
)  # fmt: skip
def test_every_spec_leads_to_its_implementation(text: str) -> None:
    for workers, servers in ((2, 0), (2, 1)):
        module, _, name = specs.parse(text).resolve(workers, servers).implementation.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
