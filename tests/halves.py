"""Runs all tests, in two halves at once: each of them waits much for processes of its own.

What the first half says is shown as it comes, what the second one says when both are over. Arguments go to both.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent
JOBS = ["launch", "observe", "rig", "test_docs.py", "test_experiments.py"]  # start jobs; most others share the pool


def main() -> int:
    pytest = [sys.executable, "-m", "pytest", "--durations=15", *sys.argv[1:]]
    jobs = [str(TESTS / name) for name in JOBS]
    with tempfile.TemporaryFile() as said:
        others = subprocess.Popen(
            [*pytest, str(TESTS), *(f"--ignore={path}" for path in jobs)], stdout=said, stderr=subprocess.STDOUT
        )
        failed = True
        try:
            failed = subprocess.call([*pytest, *jobs]) != 0
        finally:
            failed |= others.wait() != 0
            said.seek(0)
            sys.stdout.buffer.write(b"\n" + said.read())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
