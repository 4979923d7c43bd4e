"""How speed grows with workers: Amdahl's law and Gunther's, fitted to what was measured, and said in words.

Both are ``S(p) = p / (1 + σ (p - 1) + κ p (p - 1))``. Amdahl's (1967) has κ = 0: σ is the part of the work that is done
by one after the other. Gunther's universal scalability law (1993) adds κ, what each has to settle with each other: from
some number of workers on, more of them are slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.lab.compare import amounts

_NEEDED = 2  # worker counts besides one worker, where the speed-up is 1 by definition and says nothing
_ROUNDS, _HALVINGS = 200, 40
_NONE = 0.001  # a serial part below this is not seen in measurements
_FAR = 3  # times the most workers tried: a peak beyond is a guess


@dataclass(frozen=True)
class Law:
    """A law with its numbers.

    Attributes:
        name: ``Amdahl's law`` or ``Gunther's law``.
        serial: σ, from 0 to 1.
        settling: κ, from 0 on; 0 in Amdahl's law.
        tried: The most workers that it was fitted to.
    """

    name: str
    serial: float
    settling: float
    tried: int

    def speed_up(self, workers: float) -> float:
        """How many times as fast as one worker."""
        return workers / (1 + self.serial * (workers - 1) + self.settling * workers * (workers - 1))

    @property
    def limit(self) -> float:
        """The speed-up that no number of workers passes; infinite where there is none."""
        if self.settling > 0:
            return self.speed_up(self.peak)
        return 1 / self.serial if self.serial > 0 else math.inf

    @property
    def peak(self) -> float:
        """The number of workers from which on more are slower; infinite where there is none."""
        return max(1.0, math.sqrt((1 - self.serial) / self.settling)) if self.settling > 0 else math.inf

    def says(self) -> str:
        """What the numbers mean, in one sentence."""
        part = f"{amounts.share(self.serial)} of the work is serial"
        if self.peak < math.inf:
            most, best = f"{self.peak:,.0f}", amounts.plain(self.limit, 2)
            if most == "1":
                return f"{part}, and workers hinder each other so much that one alone is fastest"
            if self.peak <= _FAR * self.tried:
                return f"{part}: fastest with about {most} workers ({best} times as fast), slower with more"
            return f"{part}, and the fastest is far beyond the {self.tried} workers tried (at {most})"
        if self.serial < _NONE:
            return f"no serial part is seen up to {self.tried} workers"
        if self.serial == 1:
            return "no part of the work gets faster with more workers"
        return f"{part}: at most {amounts.plain(self.limit, 2)} times as fast however many workers"


def reason_not_to_fit(points: Iterable[tuple[int, float]]) -> str:
    """Why no law is fitted to ``points``; empty if one can be."""
    counts = sorted({workers for workers, speed_up in points if workers > 1 and speed_up > 0})
    if len(counts) >= _NEEDED:
        return ""
    seen = f"only {counts[0]} was tried" if counts else "none was tried"
    return f"a law needs {_NEEDED} worker counts besides one worker, and {seen}: --workers 1,2,4"


def amdahl(points: Iterable[tuple[int, float]]) -> Law | None:
    """The law nearest to ``points`` (workers, speed-up); None where ``reason_not_to_fit`` has a reason."""
    return _fit("Amdahl's law", list(points), with_settling=False)


def gunther(points: Iterable[tuple[int, float]]) -> Law | None:
    """The same with κ. Through two worker counts it goes exactly, so only a third shows whether it holds."""
    return _fit("Gunther's law", list(points), with_settling=True)


def _fit(name: str, points: Sequence[tuple[int, float]], with_settling: bool) -> Law | None:
    """Least squares of the speed-ups by Gauss and Newton, where each step keeps to the bounds."""
    known = [(workers, speed_up) for workers, speed_up in points if workers > 1 and speed_up > 0]
    if reason_not_to_fit(known):
        return None
    tried = max(workers for workers, _ in known)

    def law(serial: float, settling: float) -> Law:
        return Law(name, serial, settling, tried)

    def error(candidate: Law) -> float:
        return math.fsum((speed_up - candidate.speed_up(workers)) ** 2 for workers, speed_up in known)

    # p / S is linear in σ and κ, so a plain fit of it is a good begin, and the end where data are exact.
    rows = [(p - 1.0, p * (p - 1.0) if with_settling else 0.0, p / s - 1) for p, s in known]
    best = law(*_bounded(rows))
    for _ in range(_ROUNDS):
        rows = []
        for p, s in known:
            at = best.speed_up(p)
            slope = -at * at / p  # of S by the denominator
            a, b = slope * (p - 1), slope * p * (p - 1) if with_settling else 0.0
            rows.append((a, b, s - at + a * best.serial + b * best.settling))
        serial, settling = _bounded(rows)
        step, now = 1.0, error(best)
        for _ in range(_HALVINGS):
            closer = law(best.serial + step * (serial - best.serial), best.settling + step * (settling - best.settling))
            if error(closer) < now:
                break
            step /= 2
        else:
            break
        best = closer
    return best


def _bounded(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """x in 0 … 1 and y ≥ 0 with a·x + b·y nearest to c over ``rows`` of a, b, c: inside, on an edge or in a corner."""
    aa, ab, bb, ac, bc = (
        math.fsum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    found = [(0.0, 0.0), (1.0, 0.0)]
    if aa > 0:
        found.append((ac / aa, 0.0))
    if bb > 0:
        found += [(0.0, bc / bb), (1.0, (bc - ab) / bb)]
        inside = aa * bb - ab * ab
        if inside > 1e-12 * aa * bb:
            found.append(((ac * bb - bc * ab) / inside, (bc * aa - ac * ab) / inside))
    allowed = [(x, y) for x, y in found if 0 <= x <= 1 and y >= 0]
    return min(allowed, key=lambda xy: math.fsum((a * xy[0] + b * xy[1] - c) ** 2 for a, b, c in rows))
