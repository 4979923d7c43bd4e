"""How busy this machine is, for the few tests in which a time is part of the promise."""

import os


def share() -> float:
    """How many times as long all may take here as on an idle machine; 1 there."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
