"""What ``optimizer.step()`` does about gradients that are NaN or infinite (``--on-nan``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from hocket.errors import NonFiniteError


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
