"""A TCP proxy that cuts connections after so many bytes in one direction."""

import contextlib
import socket
import threading
from collections.abc import Iterator

ADDRESS = "127.0.0.1"


class Cutter:
    """Passes bytes between who connects and ``port``.

    Args:
        port: Of the server.
        cuts: For each connection, one after the other: the direction (``up`` to the server, ``down`` from it) and how
            many bytes pass before it is cut. Those that come after all cuts are left alone.
    """

    def __init__(self, port: int, cuts: Iterator[tuple[str, int]]) -> None:
        self._target, self._cuts = port, cuts
        self._listener = socket.create_server((ADDRESS, 0))
        self.port = self._listener.getsockname()[1]
        self.made = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._listen, name="cutter")]
        self._threads[0].start()

    def close(self) -> None:
        _end(self._listener)
        self._threads[0].join()
        for each in self._open:
            _end(each)
        for thread in self._threads[1:]:
            thread.join()
        for each in (self._listener, *self._open):
            each.close()

    def _listen(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
                server = socket.create_connection((ADDRESS, self._target))
            except OSError:
                return
            self.made += 1
            self._open += [worker, server]
            direction, count = next(self._cuts, ("", 0))
            for name, source, target in (("up", worker, server), ("down", server, worker)):
                limit = count if name == direction else None
                self._threads.append(threading.Thread(target=_pass_on, args=(source, target, limit), name="cutter"))
                self._threads[-1].start()


def _pass_on(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    done = 0
    with contextlib.suppress(OSError):
        while limit is None or done < limit:
            data = source.recv(1 << 16 if limit is None else min(1 << 16, limit - done))
            if not data:
                break
            target.sendall(data)
            done += len(data)
    _end(source)
    _end(target)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def cutting(port: int, cuts: list[tuple[str, int]]) -> Iterator[Cutter]:
    made = Cutter(port, iter(cuts))
    try:
        yield made
    finally:
        made.close()
