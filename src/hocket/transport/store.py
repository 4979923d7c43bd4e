"""Stores for torch.distributed, through which the members of its groups find each other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hocket.errors import HocketError, JobError

__all__ = ["AskedStore", "Store", "StoreLost", "open_store", "prefixed"]

StoreLost = dist.DistNetworkError
"""Raised by a store whose process has ended."""

Ask = Callable[[str, dict[str, Any], bytes], tuple[dict[str, Any], bytes]]
"""Asks the process that keeps the values: takes an operation, its arguments and a value; gives answer and value."""


def open_store(address: str, port: int, *, host: bool, timeout: float) -> Store:
    """Connect to torch's own store, or be its host.

    A script that calls ``init_process_group`` by itself finds the same store: it may be opened twice in a process.
    """
    try:
        return TCPStore(
            address, port, None, host, timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise JobError(
            f"the store at MASTER_ADDR={address}, MASTER_PORT={port} cannot be {'opened' if host else 'reached'}: "
            f"start rank 0 on that host, and open the port in its firewall ({str(error).splitlines()[0]})"
        ) from error


def prefixed(store: Store, prefix: str) -> Store:
    """The part of ``store`` whose keys begin with ``prefix``."""
    return store.within(prefix) if isinstance(store, AskedStore) else PrefixStore(prefix, store)


class AskedStore(Store):
    """A store whose values another process keeps: torch's groups call it, from any thread.

    The maker of a group must keep this object as long as the group: else torch's part of it cannot call Python.

    Args:
        ask: Asks the process that keeps the values; takes one question at a time.
        timeout: Seconds to wait for a key, where a caller names none.
        prefix: The text with which all keys begin.
    """

    def __init__(self, ask: Ask, timeout: float, prefix: str = "") -> None:
        super().__init__()
        self._ask, self._seconds, self._prefix = ask, timeout, prefix

    def within(self, prefix: str) -> AskedStore:
        """The part of this store whose keys begin with ``prefix``."""
        return AskedStore(self._ask, self._seconds, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        self._do("set", {"key": key}, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        head, value = self._do("get", {"key": key, "seconds": self._seconds})
        if not head["found"]:
            raise dist.DistStoreError(f"nobody has set {key!r} within {self._seconds:g} s")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if not self._do("wait", {"keys": list(keys), "seconds": seconds})[0]["found"]:
            raise dist.DistStoreError(f"nobody has set all of {', '.join(keys)} within {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        return bool(self._do("wait", {"keys": list(keys), "seconds": 0.0})[0]["found"])

    def add(self, key: str, value: int) -> int:
        return int(self._do("add", {"key": key, "amount": value})[0]["total"])

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        head = {"key": key, "expected": expected_value}
        return self._do("compare_set", head, desired_value.encode())[1]

    def delete_key(self, key: str) -> bool:
        return bool(self._do("delete", {"key": key})[0]["found"])

    def num_keys(self) -> int:
        return int(self._do("count", {})[0]["count"])

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)

    def _do(self, operation: str, head: dict[str, Any], value: bytes = b"") -> tuple[dict[str, Any], bytes]:
        if "key" in head:
            head["key"] = self._prefix + head["key"]
        if "keys" in head:
            head["keys"] = [self._prefix + key for key in head["keys"]]
        try:
            return self._ask(operation, head, value)
        except HocketError as error:
            raise StoreLost(str(error)) from error
