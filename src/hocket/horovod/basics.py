"""Who this worker is, in Horovod's words; and what is built in, as scripts ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hocket.horovod import context
from hocket.horovod.process_sets import ProcessSet, add_process_set


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Become a worker; every rank must call this. It may be called again, also after ``shutdown``.

    Args:
        comm: Nothing, or the ranks of all workers.
        process_sets: Process sets to add; the same on all ranks. ``"dynamic"`` is always so here.
    """
    if context.is_started():
        return
    found = context.start()
    size = found.worker.config.size
    if comm is not None and (not isinstance(comm, (list, tuple, range)) or sorted(comm) not in ([], [*range(size)])):
        context.stop()
        raise ValueError(f"hvd.init(comm={comm!r}): there is no MPI here, and all {size} ranks take part: leave it out")
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(each)


def shutdown() -> None:
    """End; others that wait for this rank are told. ``init`` may be called again."""
    context.stop()


def is_initialized() -> bool:
    """Whether this worker is between ``init`` and ``shutdown``."""
    return context.is_started()


def size() -> int:
    """How many workers there are."""
    return context.current().worker.config.size


def rank() -> int:
    """The number of this worker, from 0."""
    return context.current().worker.config.rank


def local_size() -> int:
    """How many workers are on this host."""
    return context.current().worker.config.local_size


def local_rank() -> int:
    """The number of this worker on its host, from 0."""
    return context.current().worker.config.local_rank


def cross_size() -> int:
    """How many hosts have a worker of this local rank."""
    return len(_column())


def cross_rank() -> int:
    """The place of this host among those that have a worker of this local rank."""
    return _column().index(rank())


def _column() -> list[int]:
    here = context.current().communicator.topology
    return [ranks[here.local_rank] for ranks in here.hosts if len(ranks) > here.local_rank]


def is_homogeneous() -> bool:
    """Whether all hosts have as many workers."""
    return len({len(ranks) for ranks in context.current().communicator.topology.hosts}) == 1


def _says(answer: bool, name: str, what: str) -> Callable[..., Any]:
    def query(verbose: bool = False) -> bool:
        return answer

    query.__name__ = name
    query.__doc__ = f"Whether {what}: {'yes' if answer else 'no'}."
    return query


mpi_threads_supported = _says(False, "mpi_threads_supported", "MPI supports threads; there is no MPI")
mpi_enabled = _says(False, "mpi_enabled", "operations go over MPI")
mpi_built = _says(False, "mpi_built", "MPI is built in")
gloo_enabled = _says(True, "gloo_enabled", "operations run without MPI")
gloo_built = _says(True, "gloo_built", "operations can run without MPI")
ddl_built = _says(False, "ddl_built", "DDL is built in")
ccl_built = _says(False, "ccl_built", "oneCCL is built in")
cuda_built = _says(False, "cuda_built", "Horovod was compiled with CUDA; nothing is compiled here")
rocm_built = _says(False, "rocm_built", "Horovod was compiled with ROCm")


def nccl_built() -> int:
    """The version of NCCL, if operations on GPUs go over it: 0, no."""
    return 0
