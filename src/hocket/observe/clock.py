"""How the monotonic clock of another host compares with this one's, from questions and answers."""

from __future__ import annotations

import math
from bisect import bisect_right

_DRIFT = 5e-5  # seconds that two clocks may drift apart in one second
_SLEW = 1.0  # seconds in which a new difference is taken over


class Clock:
    """The other clock's lead over this one, as a function of its own time that has no jumps.

    What it said of the past it says for ever, so that what one process does in order stays in order.
    """

    def __init__(self) -> None:
        self._trip, self._when = math.inf, 0.0  # of the quickest question so far
        self._times: list[float] = []  # of the other clock
        self._leads: list[float] = []  # at these times

    def compare(self, asked: float, there: float, answered: float) -> None:
        """An answer has come: that clock said ``there`` between ``asked`` and ``answered`` of this one.

        The quickest answers tell the most, but clocks drift, so that older ones count less and less.
        """
        trip = answered - asked
        if trip > self._trip + (answered - self._when) * _DRIFT:
            return
        self._trip, self._when = trip, answered
        lead = there - (asked + answered) / 2
        if not self._times:
            self._times, self._leads = [there], [lead]
        elif abs(lead - self.lead(there)) > trip / 2:  # else it may be the same as before
            now = max(there, self._times[-1])
            self._leads += [self.lead(now), lead]
            self._times += [now, now + _SLEW]

    def lead(self, there: float) -> float:
        """By how many seconds it is ahead when it shows ``there``."""
        times, leads = self._times, self._leads
        if not times or there >= times[-1]:
            return leads[-1] if leads else 0.0
        after = bisect_right(times, there)
        if not after:
            return leads[0]
        begin, end = times[after - 1], times[after]
        share = (there - begin) / (end - begin)
        return leads[after - 1] + share * (leads[after] - leads[after - 1])

    def here(self, there: float) -> float:
        """What this clock shows when the other one shows ``there``."""
        return there - self.lead(there)
