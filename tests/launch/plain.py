"""A script for the launcher's tests that needs no torch, which takes seconds to import."""

import os
import sys

what, *args = sys.argv[1:]
if what == "environment":
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    print(" ".join(f"{name}={os.environ[name]}" for name in names), "args:", *args, flush=True)
elif what == "bars":
    for step in range(5):
        sys.stderr.write(f"\r{step * 25}%")
    sys.stderr.write("\n")
    print("done", flush=True)
elif what == "long line":
    print("a" + "b" * 3_000_000 + "c", flush=True)
elif what == "umlaut":
    sys.stdout.buffer.write("grün ✓\n".encode())
