"""A long run against a server in this process: genuine messages of a worker, mutated, while another worker trains.

    python tests/fuzz/wire.py --minutes 30 [--seed 1]

Ends with an error if the server stops answering, an update is lost or made twice, or threads or memory pile up.
"""

import argparse
import contextlib
import io
import random
import resource
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from server.serving import alone, client, copy, gradient, knock, links, serve, until

from hocket.coordinator.dealer_client import Deal
from hocket.messages import HEADER
from hocket.server.server_client import Client
from hocket.server.terms import Kind, Push, Terms
from hocket.transport.replies import GRACE
from hocket.transport.requests import Talk
from hocket.transport.wire import Wire

TERMS = Terms(staleness=None, groups=0)
_AT_A_TIME = 200  # steps of the worker that trains, after which a new server is taken


def record() -> list[bytes]:
    """The messages of a worker: what each kind looks like."""
    frames: list[bytes] = []
    genuine = Wire._send_all

    def keep(self: Wire, parts: list[memoryview]) -> None:
        frames.append(b"".join(bytes(part.cast("B")) for part in parts if part.nbytes))
        genuine(self, parts)

    with serve(1) as served, client(links(served, 0), 0, 1) as made:
        Wire._send_all = keep  # type: ignore[method-assign]
        try:
            talk(made)
        finally:
            Wire._send_all = genuine  # type: ignore[method-assign]
    return [frame for frame in frames if frame[5] not in set(Talk)]


def talk(made: Client) -> None:
    found = copy(made, TERMS)
    found.pull()
    found.push(Push())
    found.load_state([found.state()])
    found.await_version(1)
    deal = Deal(made)
    deal.take(0, 3)
    deal.give_back([0])
    deal.restore(deal.state())
    made.tell(Kind.LEAVE, {"epoch": 0, "tables": [0]})
    made.tell(Kind.ENTER, {"epoch": 0, "tables": [0]})
    made.gather("a meeting", b"data")


def mutate(frame: bytes, chance: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(len(data), 200))
        what = chance.random()
        if what < 0.6:
            data[at] = chance.choice((chance.randrange(256), data[at] ^ 1 << chance.randrange(8), 0, 255))
        elif what < 0.75:
            del data[at : at + chance.randint(1, 20)]
        elif what < 0.9:
            data[at:at] = chance.randbytes(chance.randint(1, 20))
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def one_server(frames: list[bytes], chance: random.Random, until_then: float) -> tuple[int, int]:
    """Messages sent, and how many were refused."""
    sent = 0
    with serve(2, timeout=0.05) as served, client(links(served, 0), 0, 2) as made:
        found = copy(made, TERMS)
        steps = 0
        while steps < _AT_A_TIME and time.monotonic() < until_then:
            wire = knock(served.ports[0], 1, "the same")
            sequence = served.fronts[0]._reception._peers[1].sequence + 1
            for _ in range(chance.randint(1, 5)):
                data = bytearray(chance.choice(frames))
                if data[5] in (Kind.LOAD, Kind.ASSIGN):
                    continue  # these may change what the other worker trains, and be right
                if chance.random() < 0.9 and len(data) >= HEADER.size:
                    data[12:20] = sequence.to_bytes(8, "big")
                with contextlib.suppress(OSError):
                    wire.connection.sendall(mutate(bytes(data), chance))
                sent, sequence = sent + 1, sequence + 1
            wire.close()
            if served.fronts[0]._reception._peers[1].is_gone:
                break  # it has said goodbye by chance
            flat = found.gradients[0]
            flat.copy_(gradient(0, steps, flat.numel()))
            assert found.push(Push()), "a push of the worker that trains was refused"
            steps += 1
        if found.definitions[0] == served.services[0].tables[0].shard.definition:
            expected = alone(1, steps)
            assert torch.allclose(found.parameters[0], expected, rtol=1e-12, atol=1e-12) or steps == 0, "it has changed"
        refused = sum(served.refused.values())
    until(lambda: not any(t.name == "hocket-peer" for t in threading.enumerate()), 10 * GRACE)
    return sent, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    told = parser.parse_args()
    frames = record()
    end, seed, sent, refused = time.monotonic() + 60 * told.minutes, told.seed, 0, 0
    first = 0
    while time.monotonic() < end:
        noise = io.StringIO()
        try:
            with contextlib.redirect_stderr(noise):
                more = one_server(frames, random.Random(seed), end)
        except BaseException:
            print(noise.getvalue()[-4000:], f"\nseed {seed}", file=sys.stderr)
            raise
        assert "Exception in thread" not in noise.getvalue(), f"seed {seed}: {noise.getvalue()[-4000:]}"
        seed, sent, refused = seed + 1, sent + more[0], refused + more[1]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        first = first or memory
        assert memory < first + 1024, f"{memory} MB, and {first} at first"
        print(f"seed {seed}: {sent:,} messages, {refused:,} refused, {memory:,} MB", flush=True)


if __name__ == "__main__":
    main()
