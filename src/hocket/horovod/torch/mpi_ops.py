"""What scripts import from ``horovod.torch.mpi_ops``: the collectives, and who this worker is."""

from hocket.horovod import torch as _interface
from hocket.horovod.torch import *  # noqa: F403

__all__ = _interface.__all__
