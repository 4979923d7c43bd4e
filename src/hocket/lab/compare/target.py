"""What ``--until`` says: ``accuracy=0.95``, ``loss<=0.3``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.errors import UsageError
from hocket.lab.compare.results import Goal, Point
from hocket.observe import show

_CLOSE = 0.86  # acuracy is as close to accuracy; val_accuracy is not
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Wish:
    """A target whose direction may still be unknown.

    Attributes:
        metric: The name of the metric.
        value: The value to be reached.
        rises: Whether from below; None if neither the user nor the metric's name says so.
    """

    metric: str
    value: float
    rises: bool | None

    def target(self, curve: Sequence[Point]) -> Goal | None:
        """With a direction, that from the first value to the wanted one if need be; None while nothing is known."""
        if self.rises is not None:
            return Goal(self.metric, self.value, self.rises)
        first = next((point.value for point in curve if not math.isnan(point.value)), None)
        return None if first is None else Goal(self.metric, self.value, self.value >= first)


def parse(text: str) -> Wish:
    """Read the value of ``--until``.

    Raises:
        UsageError: It is none.
    """
    found = re.fullmatch(r"\s*(.+?)\s*(<=|>=|<|>|=)\s*(\S+)\s*", text)
    try:
        value = float(found[3]) if found else math.nan
    except ValueError:
        value = math.nan
    if found is None or not math.isfinite(value):
        raise UsageError(
            f"--until {text}: write a metric that the script reports and a number: accuracy=0.95, loss<=0.3"
        )
    rises = show.rises(found[1]) if found[2] == "=" else found[2].startswith(">")
    return Wish(found[1], value, rises)


def unknown(wish: Wish, reported: Sequence[str]) -> UsageError:
    """What is said if the script does not report this metric."""
    if not reported:
        return UsageError(
            f"--until {wish.metric}: the script reports no metrics: call hocket.report({_keyword(wish.metric)}=…) "
            "in it, or leave out --until"
        )
    listed = ", ".join(" ".join(name.split()) for name in reported)
    return UsageError(f"--until {wish.metric}: the script does not report it; what it reports is {listed}")


def will_not_come(wish: Wish, reported: Sequence[str]) -> bool:
    """Whether the metric is a slip of the pen, or nothing is reported at all, so that waiting for it is in vain.

    Others may come late: ``val_loss`` in every fifth epoch, beside ``loss`` in each.
    """
    if not reported:
        return True
    name = wish.metric.lower()
    return any(_alike(name, other.lower()) for other in reported)


def _alike(a: str, b: str) -> bool:
    if a != b and _NUMBERS.sub("", a) == _NUMBERS.sub("", b):
        return False  # top1 and top5
    return difflib.SequenceMatcher(None, a, b).ratio() >= _CLOSE


def _keyword(name: str) -> str:
    return name if name.isidentifier() else "accuracy"
