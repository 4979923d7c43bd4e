"""Which workers may have the same GPU; NCCL itself is tested in tests/gpu."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hocket.config import Config, environment
from hocket.errors import UsageError
from hocket.job import devices


class Connected:
    """Stands for two workers of this host, which say the same of themselves, and for the group that connects them."""

    size, nccl, changes = 2, None, False

    def __init__(self, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
        parameter: Any = SimpleNamespace(device=torch.device("cuda", 0))
        connected: Any = self
        self.host_id: str | None = None
        devices.connect(config, connected, [parameter], self.make)

    def gather_data(self, data: Any) -> list[Any]:
        return [data, data]

    def connect_gpus(self, connect: Any) -> None:
        self.nccl = connect(0, 2, 0, None)

    def make(self, config: Config, device: torch.device) -> Any:
        self.host_id = environment().get("NCCL_HOSTID")
        return lambda *_: SimpleNamespace(abort=None)


@pytest.fixture(autouse=True)
def without_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that it is as before when the test ends
    monkeypatch.delenv("NCCL_HOSTID")


def test_workers_with_one_gpu_are_told_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        Connected(Config(size=2), monkeypatch)
    for said in ("one worker per GPU (-n 1)", "--share-gpus", "--transport shared-memory"):
        assert said in str(caught.value)


def test_with_the_flag_nccl_takes_each_worker_for_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Connected(Config(size=2, share_gpus=True), monkeypatch)
    assert found.nccl is not None and found.host_id
    monkeypatch.delenv("NCCL_HOSTID")
    assert Connected(Config(size=2, share_gpus=True), monkeypatch).host_id not in (None, found.host_id)


def test_a_host_id_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    assert Connected(Config(size=2, share_gpus=True), monkeypatch).host_id == "mine"


def test_through_memory_nothing_is_changed_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Connected(Config(size=2, share_gpus=True, transport="shared-memory"), monkeypatch).nccl is None
    assert "NCCL_HOSTID" not in environment()
