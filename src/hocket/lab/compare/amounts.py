"""Numbers as people read them: three digits, a unit, and no more zeros than needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SI = ["", "k", "M", "G", "T", "P"]


def plain(value: float, digits: int = 3, zeros: bool = False) -> str:
    """``12.3``, ``1,230``, ``0.00123``: so many digits that count, never an exponent for what people can read.

    Args:
        value: Any number.
        digits: How many.
        zeros: Keep those at the end: 12.0 beside 12.3.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    size = math.floor(math.log10(abs(rounded)))
    if size < -4 or size > 11:
        digit, _, power = f"{value:.{digits - 1}e}".partition("e")
        if "." in digit and not zeros:
            digit = digit.rstrip("0").rstrip(".")
        return f"{digit}e{power}".replace("-", "−")
    text = f"{rounded:,.{max(0, digits - 1 - size)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text and not zeros else text).replace("-", "−")


def given(value: float) -> str:
    """A number that a user has written, such as a target: all of its digits, as they are typed."""
    return f"{value:.10g}"


def metric(value: float) -> str:
    """A value of a metric: four digits, as 0.9512 and 0.9549 are not the same."""
    return plain(value, 4)


def line(text: str) -> str:
    """A name in one line, whatever is in it."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def seconds(value: float) -> str:
    """``85 ms``, ``12.3 s``, ``6 min 5 s``, ``2 h 5 min``."""
    if value < 0.9995:
        return f"{plain(1000 * value, zeros=True)} ms"
    if value < 179.5:
        return f"{plain(value, zeros=True)} s"
    if value < 2 * 3600 - 30:
        return f"{round(value) // 60} min {round(value) % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


def share(value: float) -> str:
    """``7 %``, ``0.3 %``."""
    return f"{plain(100 * value, 2) if abs(value) < 0.0995 else f'{100 * value:.0f}'} %"


def percents(parts: Sequence[float]) -> list[int]:
    """Parts of 1 in whole per cent that add up as the parts do; those that lose most by it are rounded up."""
    found = [math.floor(100 * part) for part in parts]
    left = round(100 * sum(parts)) - sum(found)
    for number in sorted(range(len(parts)), key=lambda i: found[i] - 100 * parts[i])[:left]:
        found[number] += 1
    return found


def times(value: float) -> str:
    """``2.1×``."""
    return f"{plain(value, 2, zeros=True)}×"


def unit_of_bytes(most: float) -> tuple[float, str]:
    """The unit in which ``most`` bytes are a number of one to three digits: how many bytes it is, and its name."""
    power = 0 if most < 1 else min(len(_SI) - 1, math.floor(math.log10(most) / 3 + 1e-9))
    return 1000.0**power, f"{_SI[power]}B"


def size(count: float) -> str:
    """``0 B``, ``4.2 MB``."""
    unit, name = unit_of_bytes(count)
    return f"{plain(count / unit)} {name}"


def unit_of_seconds(most: float) -> tuple[float, str]:
    """The unit for an axis up to ``most`` seconds: how many seconds it is, and its name."""
    if most >= 2 * 3600:
        return 3600.0, "h"
    if most >= 180:
        return 60.0, "min"
    return (1.0, "s") if most >= 0.5 else (0.001, "ms")
