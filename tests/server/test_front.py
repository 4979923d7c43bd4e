"""A server, or the coordinator, to whom a worker says nonsense: that is refused, and another worker trains on."""

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.serving import Served, alone, client, copy, gradient, knock, links, serve

from hocket.coordinator.coordinator_service import Ask
from hocket.errors import JobError, MismatchError
from hocket.messages import HEADER, MAGIC, VERSION
from hocket.server.copies import DenseCopy
from hocket.server.terms import Kind, Push, Terms
from hocket.transport.requests import Talk
from hocket.transport.wire import Wire

NO_SENSE = "messages that make no sense"
ASYNCHRONOUS = Terms(staleness=None, groups=0)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
WORDS = ["number", "what", "refused", "more", "in_step", "spare", "left", "nbytes",
         "shared", "definition", "epoch", "weight", "present", "groups", "batches", "pull", "first",
         "rows", "queue", "done", "end", "total", "wait", "numbers", "state", "version", "described"]  # fmt: skip
HEADS = st.dictionaries(st.sampled_from(WORDS), VALUES).flatmap(
    lambda head: st.sampled_from([1, "x", None, [], 2**80, float("inf")]).map(lambda table: {**head, "table": table})
)


class Trainer:
    """Rank 0, which makes a step now and then."""

    def __init__(self, found: DenseCopy) -> None:
        self._copy, self._steps = found, 0

    def step(self) -> None:
        flat = self._copy.gradients[0]
        flat.copy_(gradient(0, self._steps, flat.numel()))
        assert self._copy.push(Push())
        self._steps += 1

    def check(self) -> None:
        """No update was lost, made twice, or made of nonsense."""
        assert torch.allclose(self._copy.parameters[0], alone(1, self._steps), rtol=1e-12, atol=1e-12)


def join(served: Served, to_coordinator: bool) -> tuple[Wire, int]:
    """Rank 1, and the number of the next message that it may send."""
    wire = knock(served.coordinator_port if to_coordinator else served.ports[0], 1, "the same")
    return wire, served.peer(1, None if to_coordinator else 0).sequence + 1


@pytest.fixture(params=["to a server", "to the coordinator"])
def to_coordinator(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "to the coordinator")


def refused(served: Served, to_coordinator: bool) -> dict[str, int]:
    return served.refused_by_coordinator if to_coordinator else served.refused


def test_any_head_of_any_kind(to_coordinator: bool) -> None:
    with serve(2, timeout=0.02) as served, client(links(served, 0), 0, 2) as made:
        trainer = Trainer(copy(made, ASYNCHRONOUS))

        @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
        @given(kind=st.sampled_from([*Kind, *Ask]) | st.integers(0, 255), head=HEADS, body=st.binary(max_size=40))
        def nonsense(kind: int, head: dict[str, Any], body: bytes) -> None:
            if kind == Talk.BYE:
                return
            head["shared"] = False  # shared memory cannot come over TCP
            wire, sequence = join(served, to_coordinator)
            wire.connection.settimeout(5.0)
            wire.send(kind, sequence, head, [memoryview(body)] if body else [])
            answer = wire.receive()
            assert answer.kind in (Talk.REPLY, Talk.ERROR)
            assert answer.sequence == sequence
            if answer.kind == Talk.ERROR:
                assert answer.head["text"]
            wire.close()
            trainer.step()

        nonsense()
        trainer.check()
        assert refused(served, to_coordinator)[NO_SENSE] > 10


def test_any_bytes(to_coordinator: bool) -> None:
    with serve(2, timeout=0.02) as served, client(links(served, 0), 0, 2) as made:
        trainer = Trainer(copy(made, ASYNCHRONOUS))
        begin = st.just(b"") | st.just(MAGIC + bytes([VERSION]))

        @settings(max_examples=150)
        @given(data=st.tuples(begin, st.binary(max_size=100)).map(b"".join))
        def nonsense(data: bytes) -> None:
            wire, _ = join(served, to_coordinator)
            wire.connection.sendall(data)
            wire.close()
            trainer.step()

        nonsense()
        trainer.check()


def test_a_body_of_the_wrong_length_is_refused_and_the_connection_goes_on() -> None:
    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        found = copy(made, ASYNCHRONOUS)
        link = made.first
        head = {"table": 0, "epoch": 0, "weight": 1.0, "groups": None, "pull": False, "present": None, "batches": []}
        for length in (0, 8, 8 * 500):
            with pytest.raises(JobError, match="makes no sense"):
                link.request(Kind.PUSH, head, [memoryview(bytes(length))])
        assert served.refused == {NO_SENSE: 3}
        trainer = Trainer(found)
        trainer.step()
        trainer.check()


def test_a_message_that_breaks_off_does_not_count(to_coordinator: bool) -> None:
    with serve(2) as served, client(links(served, 0), 0, 2) as made:
        trainer = Trainer(copy(made, ASYNCHRONOUS))
        head = json.dumps({"number": 1, "what": "x", "table": 0}).encode()
        kind, body = Ask.GATHER, 100
        if not to_coordinator:
            service = served.services[0]
            service.define(1, service.tables[0].shard.definition, None)
            kind, body = Kind.ASSIGN, sum(each.nbytes for each in service.desk(0, 1).parameters)
        whole = HEADER.pack(MAGIC, VERSION, kind, 0, 0, 1, len(head), body) + head + bytes(body)
        for length in range(0, len(whole), len(whole) // 30):
            wire, sequence = join(served, to_coordinator)
            assert sequence == 1
            wire.connection.sendall(whole[:length])
            wire.close()
            trainer.step()
        trainer.check()
        assert not served.coordinator.service.meetings._meetings
        assert not refused(served, to_coordinator)


def test_the_descriptions_of_two_workers_must_agree() -> None:
    with (
        serve(2) as served,
        client(links(served, 0), 0, 2) as made,
        client(links(served, 1), 1, 2) as other,
    ):
        trainer = Trainer(copy(made, ASYNCHRONOUS))
        with pytest.raises(MismatchError, match="rank 1 describes other parameters"):
            copy(other, Terms(staleness=3, groups=0))
        trainer.step()
        trainer.check()
