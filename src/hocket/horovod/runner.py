"""``horovod.run``: calls a function on several workers, and returns what it returns on each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    num_proc: int | None = None,
    **ignored: Any,
) -> list[Any]:
    """The results of ``func(*args, **kwargs)`` on fresh workers of this machine, in the order of their ranks.

    Args:
        func: A function of a module, or of the script or notebook itself.
        args: Its arguments.
        kwargs: Its keyword arguments.
        np: How many workers.
        hosts: Not possible here: ``hocket run -H`` starts scripts on other machines.
        hostfile: Not possible here.
        num_proc: The same as ``np``.
        **ignored: Other options of Horovod, which have no meaning here.
    """
    import hocket

    if hosts or hostfile:
        raise ValueError("horovod.run() starts workers on this machine: use hocket run -H for other hosts")
    if ignored:
        print(f"hocket: horovod.run(): ignored: {', '.join(sorted(ignored))}", file=sys.stderr, flush=True)
    count = num_proc if np is None else np
    found = hocket.launch(_call, func, tuple(args), dict(kwargs or {}), n=count or 1, as_horovod=True)
    assert isinstance(found, list)
    return found


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """On every worker: the results of all."""
    from hocket.horovod import context
    from hocket.horovod.objects import allgather_object

    result = func(*args, **kwargs)
    context.start()  # the function may have called hvd.shutdown(), or not hvd.init()
    found = allgather_object(result)
    context.stop()
    return found
