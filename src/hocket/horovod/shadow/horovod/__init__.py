"""What ``import horovod`` finds under ``hocket run --as-horovod``: Hocket's own modules by Horovod's names."""

from hocket.horovod.aliases import VERSION as __version__
from hocket.horovod.aliases import run, take_place

__all__ = ["__version__", "run"]

take_place(__path__)
