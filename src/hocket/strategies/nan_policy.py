"""What ``optimizer.step()`` does about gradients that are NaN or infinite (``--on-nan``).

Where workers learn only in the step that another one cannot use its gradient, a number travels, the fault: 0 if all is
well, 1 if GradScaler wants to skip the gradient, and from 2 on a parameter whose gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim import Optimizer

from hocket.errors import NonFiniteError

_DROPPED, _FIRST = 1, 2


def find_fault(optimizer: Optimizer, nonfinite: int | None) -> int:
    """The fault of this worker's gradient; ``nonfinite`` is a parameter whose gradient is not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None:  # GradScaler has looked itself
        return _DROPPED if float(found_inf) else 0
    return 0 if nonfinite is None else _FIRST + nonfinite


def read_faults(faults: Mapping[int, int]) -> tuple[dict[int, int], bool]:
    """From faults by rank: the parameter that is not finite by rank, and whether GradScaler wants to skip."""
    nonfinite = {rank: fault - _FIRST for rank, fault in faults.items() if fault >= _FIRST}
    return nonfinite, _DROPPED in faults.values()


class NanPolicy:
    """Whether a step may be taken with the last gradients, some of which may not be finite.

    Args:
        names: The names of the parameters.
        on_nan: What the user asked for: ``raise``, ``skip`` or ``ignore``.

    Attributes:
        skipped: How many steps were left out.
    """

    def __init__(self, names: Sequence[str], on_nan: str) -> None:
        self._names, self._on_nan = names, on_nan
        self._nonfinite: dict[int, int] = {}
        self.skipped = 0

    def record(self, nonfinite: dict[int, int]) -> None:
        """Remember, by rank, the parameter whose gradient was not finite; empty if all were finite."""
        self._nonfinite = nonfinite

    def allows_step(self, optimizer: Optimizer | None) -> bool:
        """Whether the step may be taken; raises if the user asked for that."""
        if getattr(optimizer, "found_inf", None) is not None:
            self._nonfinite = {}  # GradScaler has looked itself, and this optimizer skips by itself
        if not self._nonfinite:
            return True
        where = "; ".join(f"rank {rank}: {self._names[number]!r}" for rank, number in self._nonfinite.items())
        self._nonfinite = {}
        if self._on_nan == "raise":
            raise NonFiniteError(
                f"a gradient is NaN or infinite ({where}), and no parameter has been changed by it: lower the "
                "learning rate, clip gradients, or continue without such steps by --on-nan skip"
            )
        self.skipped += 1
        return False
