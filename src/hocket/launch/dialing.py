"""The agent's other way to the launcher: it dials the launcher, and then talks the frames that it always talks.

Whoever starts such an agent says in a ``Call`` where the launcher is: on the standard input of ``python -m
hocket.launch.dialing``, so that the secret is in no argument list and no environment. A process may also be the agent
itself (``serve``).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from typing import IO

from hocket.errors import JobError, UsageError
from hocket.launch import agent
from hocket.launch.message_pipe import MessagePipe
from hocket.launch.reception import COMES
from hocket.launch.signals import Signals
from hocket.transport.door import knock, knock_here
from hocket.transport.proof import NotProved
from hocket.transport.wire import Wire

_TRY = 2.0  # seconds for one address
_PAUSE = 0.1


@dataclass(frozen=True)
class Call:
    """What an agent needs to know to dial.

    Attributes:
        addresses: Where the launcher may be reached; they are tried one after the other. An address that begins with
            @ is the name of a socket of this host.
        port: Its port there.
        secret: What both ends prove.
        number: The number of this agent.
        host: The name of this host in the job.
        encrypted: Whether the launcher's reception talks over TLS.
        seconds: How long to try.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes
    number: int
    host: str
    encrypted: bool
    seconds: float = 30.0

    def write(self) -> bytes:
        """The line that ``read`` reads."""
        return json.dumps({**asdict(self), "secret": self.secret.hex()}).encode() + b"\n"

    @classmethod
    def read(cls, stream: IO[bytes]) -> Call:
        """The call in the first line of ``stream``."""
        try:
            told = json.loads(stream.readline())
            return cls(**{**told, "addresses": tuple(told["addresses"]), "secret": bytes.fromhex(told["secret"])})
        except (ValueError, TypeError, KeyError):
            raise UsageError("the agent was not told whom to dial: it is started by the launcher") from None


def dial(call: Call, **more: str) -> Wire:
    """Connect to the launcher, prove the secret, and say who this is, and more; tries until the seconds are over.

    Raises:
        JobError: nobody was there in time, or what answered is not of this job.
    """
    end = time.monotonic() + call.seconds
    while True:
        trouble: list[str] = []
        for address in call.addresses:
            try:
                wire = _knock(call, address, min(end, time.monotonic() + _TRY))
                wire.send(COMES, 0, {"host": call.host, **more})
                return wire
            except JobError as error:
                trouble.append(str(error))
                is_final = isinstance(error, NotProved) and address == call.addresses[-1]
        if is_final or time.monotonic() > end:
            raise JobError("; ".join(dict.fromkeys(trouble)))
        time.sleep(_PAUSE)


def serve(call: Call) -> int:
    """Be the agent of this host for one job; returns the status for the shell."""
    with Signals() as signals:
        try:
            wire = dial(call)
        except JobError as error:
            print(f"hocket: {call.host} does not reach the launcher: {error}", file=sys.stderr, flush=True)
            return 1
        return talk(wire.connection, call.secret, signals)


def talk(connection: socket.socket, secret: bytes, signals: Signals) -> int:
    """Be the agent at the other end of a connection over which the secret was proved; see ``serve``."""
    own = connection.getsockname()[0] if connection.family != socket.AF_UNIX else None
    channel = MessagePipe()
    channel.connect(connection)
    return agent.serve(channel, signals, own, secret)


def _knock(call: Call, address: str, deadline: float) -> Wire:
    if address.startswith("@"):
        return knock_here(address[1:], call.secret, call.number, deadline, waits=False)
    return knock(address, call.port, call.secret, call.number, deadline, encrypted=call.encrypted, waits=False)


def main() -> None:
    """Be the agent that the first line of the standard input describes."""
    try:
        sys.exit(serve(Call.read(sys.stdin.buffer)))
    except UsageError as error:
        print(f"hocket: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
