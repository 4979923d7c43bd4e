"""How hosts are called in messages, and what workers compare when they introduce themselves."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from hocket.config import Config
from hocket.errors import HocketError, UsageError
from hocket.job import introductions
from hocket.job.introductions import _name
from hocket.transport.store import Store


def host(name: str, machine: str) -> dict[str, str]:
    return {"name": name, "machine": machine}


def test_hosts_keep_their_names() -> None:
    assert _name([host("a", "1"), host("b", "2")]) == ("a", "b")


def test_machines_of_one_name_get_numbers() -> None:
    hosts = [host("localhost", "1"), host("localhost", "2"), host("a", "3"), host("localhost", "4")]
    assert _name(hosts) == ("localhost", "localhost (2)", "a", "localhost (3)")


def test_workers_of_one_machine_that_count_as_hosts_share_its_name() -> None:
    assert _name([host("a", "1"), host("a", "1"), host("b", "2")]) == ("a", "a", "b")


def introduced(*settings: dict[str, str], meets: Callable[[Config, Store], object]) -> list[object]:
    """What comes of it when workers with these settings introduce themselves, each in a thread."""
    store: Store = dist.HashStore()

    def begin(rank: int) -> object:
        config = Config(rank=rank, size=len(settings), local_size=0, timeout=20.0, **settings[rank])  # type: ignore[arg-type]
        try:
            return meets(config, store)
        except HocketError as error:
            return error

    with ThreadPoolExecutor(len(settings)) as threads:
        return list(threads.map(begin, range(len(settings))))


def meet(config: Config, store: Store) -> object:
    return introductions.meet(config, store, shares=config.transport != "gloo")


def join(config: Config, store: Store) -> object:
    """Gloo is for workers that count as hosts of their own; the others of one host only compare their settings."""
    return meet(config, store) if config.transport == "gloo" else introductions.compare(config, store, {})


@pytest.mark.parametrize("meets", [meet, join])
@pytest.mark.parametrize(("name", "value"), [("algorithm", "ring"), ("transport", "gloo")])
@pytest.mark.parametrize("other", [0, 2])
def test_settings_that_differ_are_told_on_all(meets: Any, name: str, value: str, other: int) -> None:
    found = introduced(*({name: value} if rank == other else {} for rank in range(3)), meets=meets)
    assert all(isinstance(each, UsageError) for each in found), found
    (said,) = {str(each) for each in found}
    rest = ", ".join(str(rank) for rank in range(3) if rank != other)
    assert f"HOCKET_{name.upper()} differs between workers:" in said
    assert f"{value} on rank {other}" in said and f"auto on ranks {rest}" in said


def test_equal_settings_are_none() -> None:
    found = introduced({"algorithm": "tree"}, {"algorithm": "tree"}, meets=meet)
    assert all(isinstance(each, introductions.Introductions) for each in found), found
