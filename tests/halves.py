"""Runs all tests, in two processes at once: each of them waits much for processes of its own.

One begins with tests that start jobs, the other at the end of the list, with those that share the pool, and they go on
until they meet, so that neither is idle while the other is at work. What the first one says is shown as it comes, what
the second one says when both are over. Arguments go to both.
"""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Tests that start jobs; most others share the pool.
JOBS = ["launch", "observe", "rig", "lab/doctor", "lab/rig", "lab/test_bench.py", "test_docs.py", "test_experiments.py"]


class Half:
    """A plugin of one of the two.

    Args:
        taken: A folder that both know: who makes a folder in it for a test function runs that, with all its parameters.
        backwards: Whether this is the one that begins at the end.
    """

    def __init__(self, taken: str, *, backwards: bool) -> None:
        self._taken, self._backwards = taken, backwards

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.getoption("collectonly"):
            return None  # pytest says what is wrong
        items = self._take(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # what both need stays
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _take(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Those that the other one does not run, as it becomes clear."""
        ordered = sorted(items, key=lambda item: not self._starts_jobs(item))
        functions = [list(found) for _, found in itertools.groupby(ordered, _function)]
        for number, function in reversed([*enumerate(functions)]) if self._backwards else enumerate(functions):
            try:
                os.mkdir(os.path.join(self._taken, str(number)))  # noqa: PTH102, PTH118
            except FileExistsError:
                continue
            yield from function

    def _starts_jobs(self, item: pytest.Item) -> bool:
        return any(item.path.is_relative_to(TESTS / name) for name in JOBS)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def main() -> int:
    with tempfile.TemporaryDirectory() as taken, tempfile.TemporaryFile() as said:
        half = [sys.executable, __file__, "--half", taken]
        last = subprocess.Popen([*half, "last", *sys.argv[1:]], stdout=said, stderr=subprocess.STDOUT)
        failed = True
        try:
            failed = subprocess.call([*half, "first", *sys.argv[1:]]) != 0
        finally:
            failed |= last.wait() != 0
            said.seek(0)
            sys.stdout.buffer.write(b"\n" + said.read())
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--half"]:
        taken, which, *given = sys.argv[2:]
        half = Half(taken, backwards=which == "last")
        sys.exit(pytest.main([str(TESTS), "--durations=15", *given], [half]))
    sys.exit(main())
