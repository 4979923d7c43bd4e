"""How fast a cable is: reads rates, and says what the token bucket of tc(8) needs for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hocket.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST, _MOST = 64 * 10**3, 100 * 10**9
_BURST_SECONDS = 0.001
_SMALLEST_BURST = 16 << 10  # some packets
_SMALLEST_QUEUE = 256 << 10  # some of what TCP hands over at once; with less, a single slow stream loses a third of it
_WHOLE_PACKET = 68 << 10  # what TCP hands over at once; the bucket cuts up what is larger than itself, which costs
_QUEUE_SECONDS = 0.025


@dataclass(frozen=True)
class Rate:
    """Bits per second, in each direction."""

    bits: int

    def __str__(self) -> str:
        for unit in ("g", "m", "k"):
            if self.bits >= _UNITS[unit]:
                return f"{self.bits / _UNITS[unit]:g}{unit}bit"
        return f"{self.bits}bit"

    def bucket(self) -> str:
        """Arguments for ``tc qdisc … tbf``.

        The bucket holds a millisecond of traffic, and at fast rates one packet of TCP's largest; the queue holds
        25 ms, as that of a switch with deep buffers, so that a single stream loses nothing and three to one receiver
        lose little.
        """
        bytes_per_second = self.bits / 8
        burst = max(_SMALLEST_BURST, bytes_per_second * _BURST_SECONDS)
        if bytes_per_second >= 100e6 / 8:
            burst = max(burst, _WHOLE_PACKET)
        queue = max(bytes_per_second * _QUEUE_SECONDS, _SMALLEST_QUEUE)
        return f"tbf rate {self.bits}bit burst {round(burst)} limit {round(burst + queue)}"


def parse(text: str) -> Rate:
    """Read ``1gbit``, ``100mbit`` or ``500kbit``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.strip().lower())
    bits = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not _LEAST <= bits <= _MOST:
        raise UsageError(f"--rate {text}: must be from 64kbit to 100gbit, for example 1gbit, 100mbit or 500kbit")
    return Rate(bits)
