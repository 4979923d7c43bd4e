"""What ``make demo`` runs: the digits example on one worker and on two, and what the second one brings."""

import os
import re
import subprocess
import sys

RUNS = {
    "one worker on one core": ("1", {"OMP_NUM_THREADS": "1"}),
    "one worker on all cores": ("1", {}),
    "two workers": ("2", {}),
}


def main() -> None:
    speeds = {}
    for name, (workers, env) in RUNS.items():
        command = ["hocket", "run", "-n", workers, "examples/digits.py", "--epochs", "30"]
        print(f"\n{name}: {' '.join(command)}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "hocket.launch.cli", *command[1:]],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **env}, check=False,
        )  # fmt: skip
        print(done.stdout, end="", flush=True)
        if done.returncode:
            sys.exit(done.returncode)
        found = re.search(r"accuracy ([\d.]+%), ([\d,]+) samples/s", done.stdout)
        assert found is not None
        speeds[name] = found[1], int(found[2].replace(",", ""))

    accuracy, fastest = speeds["two workers"]
    print(f"\nTwo workers reach {accuracy} accuracy, as one does, at {fastest:,} samples/s: ", end="")
    print(" and ".join(f"{fastest / speed:.2f} times {name}" for name, (_, speed) in list(speeds.items())[:2]) + ".")


if __name__ == "__main__":
    main()
