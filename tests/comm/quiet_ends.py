"""Quiet connections of workers that are in this process, without a coordinator."""

from hocket.errors import MismatchError
from hocket.transport.waiting import Standing, say_all


class Square:
    """Where all say where they wait, and hear it of each other at once."""

    def __init__(self) -> None:
        self.standings: dict[int, Standing] = {}
        self.asked = 0  # how often somebody has asked for all stacks


class QuietEnd:
    """A worker's end of it; see ``Quiet``."""

    def __init__(self, square: Square, own: int) -> None:
        self._square, self._own = square, own

    def follow(self, places: object) -> None:
        pass

    def tell(self, standing: Standing | None) -> None:
        self._square.standings.pop(self._own, None)
        if standing is not None:
            self._square.standings[self._own] = standing

    def waits(self) -> dict[int, str]:
        return {number: standing.text for number, standing in self._square.standings.items()}

    def compare(self) -> None:
        mine = self._square.standings.get(self._own)
        if mine is not None and any(mine.waits_in_vain(other) for other in self._square.standings.values()):
            raise MismatchError(say_all(self._square.standings))

    def print_stacks(self) -> None:
        self._square.asked += 1

    def leave(self, failed: bool) -> None:
        pass
