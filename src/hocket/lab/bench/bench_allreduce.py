"""All-reduce by Hocket, by PyTorch's Gloo and by Open MPI, in one run, for ``hocket bench allreduce``."""

from __future__ import annotations

import json
import os
import socket
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket.comm.bucket_layout import Bucket
from hocket.comm.changing_group import RegroupingCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.shared import SharedCommunicator
from hocket.comm.tcp_group import TcpGroup
from hocket.job import collectives
from hocket.job.worker import current
from hocket.lab.bench.bench_worker import alternate, milliseconds, ratio
from hocket.transport.member_links import Links
from hocket.transport.network_group import NetworkGroup

Ways = dict[str, Callable[[], object]]


def allreduce(rounds: str, sizes: str) -> list[dict[str, object]]:
    """A row for each size."""
    dist.init_process_group("gloo")
    communicator = current().communicator
    if isinstance(communicator, RegroupingCommunicator):
        communicator = communicator.group
    between = None if communicator.traffic is None else _Between(communicator)
    rows: list[dict[str, object]] = []
    for nbytes in (int(size) << 10 for size in sizes.split(",")):
        ways = _by_hand(nbytes)
        ways |= _on_host(communicator, nbytes) if between is None else between.ways(nbytes)
        times = alternate(ways, int(rounds), 0.25 if nbytes < 1 << 22 else 0.6, least=3 if nbytes < 1 << 24 else 1)
        row: dict[str, object] = {"size": f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"}
        stream = times.pop(_STREAM, None)
        row |= {f"{way}_us": milliseconds(values) * 1e3 for way, values in times.items()}
        row |= {f"{way}_ratio": ratio(times, "gloo", way) for way in times if way != "gloo"}
        if stream is not None:
            row["of the rate of a stream_%"] = statistics.median(
                a / b * 100 for a, b in zip(stream, times["exchange"], strict=True)
            )
        rows.append(row)
    if between is not None:
        between.close()
    dist.destroy_process_group()
    return rows


def _by_hand(nbytes: int) -> Ways:
    other, ordinary = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    return {
        "gloo": lambda: dist.all_reduce(other),
        "ordinary": lambda: collectives.allreduce(ordinary, "mean", out=ordinary),
    }


def _on_host(communicator: Communicator, nbytes: int) -> Ways:
    if not isinstance(communicator, SharedCommunicator):
        raise SystemExit("hocket bench allreduce compares shared memory, which needs x86-64 Linux, or --hosts")
    buffer = communicator.buffer([Bucket(torch.float32, nbytes // 4)], "benchmark", result=True)
    buffer.mine[0].normal_()
    ways: Ways = {"shared": lambda: buffer.average(1, 0, "benchmark")}
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]

        array = torch.zeros(nbytes // 4).numpy()
        ways["open mpi"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)
    return ways


_STREAM = "stream"


class _Between:
    """What there is to measure between hosts with one worker each: sums as an exchange has them, and what TCP does.

    Args:
        communicator: The workers.
    """

    def __init__(self, communicator: Communicator) -> None:
        lane = communicator.open_lane()
        if lane is None or not lane.groups or len(lane.topology.local) > 1:
            raise SystemExit("hocket bench allreduce --hosts measures one worker on each host: leave out -n")
        self._communicator, self._group = communicator, lane.groups[0]
        self._tls: NetworkGroup | None = None
        self._stream: socket.socket | None = None
        self._bytes = bytearray(1 << 20)
        if isinstance(self._group, TcpGroup):
            self._tls = self._encrypted(self._group)
            self._stream = self._connect(self._group._links.said["address"])

    def ways(self, nbytes: int) -> Ways:
        """How a sum of so many bytes is made; and the time that the bytes of a ring take in one stream of TCP."""
        data, size = torch.zeros(nbytes // 4), self._communicator.size
        made: Ways = {"exchange": lambda: _add_up(self._group, data)}
        if (tls := self._tls) is not None:
            made["with tls"] = lambda: _add_up(tls, data)
        if isinstance(self._group, TcpGroup):
            made[_STREAM] = lambda: self._move(2 * (size - 1) * nbytes // size)
        return made

    def close(self) -> None:
        if self._tls is not None:
            self._tls.close()
        if self._stream is not None:
            self._stream.close()

    def _gather(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self._communicator.gather_bytes(json.dumps(said).encode())]

    def _encrypted(self, group: TcpGroup) -> NetworkGroup:
        """The same members, over encrypted connections."""
        secret, address = group._links._secret, group._links.said["address"]
        links = Links("a benchmark with TLS", group.rank, group.size, secret, address, lambda _: True)
        return TcpGroup.connect(links, group._watch, lambda said, _: self._gather(said), group.choice.asked)

    def _connect(self, address: str) -> socket.socket | None:
        """A plain connection between the first two members."""
        rank = self._communicator.rank
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as door:
            heard = self._gather({"address": address, "port": door.getsockname()[1]})
            if rank == 0:
                return socket.create_connection((heard[1]["address"], heard[1]["port"]))
            return door.accept()[0] if rank == 1 else None

    def _move(self, nbytes: int) -> None:
        if (stream := self._stream) is None:
            return
        move, view = (stream.send, stream.recv_into)[self._communicator.rank], memoryview(self._bytes)
        while nbytes:
            nbytes -= move(view[: min(nbytes, len(view))])
        stream.sendall(b"!")
        stream.recv(1)


def _add_up(group: NetworkGroup, data: torch.Tensor) -> None:
    group.wait(group.start_sum(data), "a benchmark")
