"""Horovod's names of modules, and what they are here; no torch is imported before a script asks for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from hocket import config

VERSION = "0.28.1"
"""The version of Horovod whose interface this is."""

_HOME = "hocket.horovod"
_MODULES = {
    "horovod.torch": "torch",
    "horovod.torch.compression": "compression",
    "horovod.torch.elastic": "torch.elastic",
    "horovod.torch.elastic.sampler": "torch.elastic",
    "horovod.torch.elastic.state": "torch.elastic",
    "horovod.torch.functions": "torch",
    "horovod.torch.mpi_ops": "torch.mpi_ops",
    "horovod.torch.optimizer": "torch",
    "horovod.torch.sync_batch_norm": "torch",
    "horovod.common": "common",
    "horovod.common.basics": "torch",
    "horovod.common.elastic": "torch.elastic",
    "horovod.common.exceptions": "exceptions",
    "horovod.common.process_sets": "process_sets",
    "horovod.common.util": "common",
    "horovod.runner": "runner",
}


def run(*args: Any, **kwargs: Any) -> Any:
    """See ``hocket.horovod.runner.run``."""
    return import_module(f"{_HOME}.runner").run(*args, **kwargs)


class Aliases(MetaPathFinder, Loader):
    """Finds Horovod's modules here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith("horovod."):
            raise ModuleNotFoundError(
                f"{fullname}: of Horovod, Hocket has horovod.torch alone; run this script with Horovod itself",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = import_module(f"{_HOME}.{_MODULES[name]}")


def take_place(folders: Sequence[str]) -> None:
    """Have Horovod's names mean Hocket's modules; says so once if there is a Horovod that they would have meant.

    Args:
        folders: Where the package is that stands for Horovod.
    """
    sys.meta_path.insert(0, Aliases())
    own = {folder.removesuffix("/horovod") for folder in folders}
    other = PathFinder.find_spec("horovod", [folder for folder in sys.path if folder not in own])
    if other is not None and other.origin is not None and config.read().rank == 0:
        print(f"hocket: --as-horovod: 'import horovod' is Hocket, not {other.origin}", file=sys.stderr, flush=True)
