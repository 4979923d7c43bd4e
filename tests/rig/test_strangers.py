"""A job keeps its secret to itself, and strangers who connect to its ports do it no harm."""

import base64
import time
from pathlib import Path

from conftest import Rigs
from rig import jobs
from rig.jobs import PATIENCE, Jobs


def check_secret(started: Jobs, names: list[str]) -> None:
    """It is in no argument list and no environment, of whatever process."""
    secrets = [(started.folder / name).read_bytes() for name in names]
    assert len(set(secrets)) == 2 and all(len(secret) == 32 for secret in secrets)
    texts, seen = [str(worker).encode() for worker in started.running], 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            texts.append((entry / "cmdline").read_bytes() + b"\n" + (entry / "environ").read_bytes())
            seen += b"script.py" in texts[-1]
        except OSError:
            continue
    assert seen >= 4
    for secret in secrets:
        for form in (secret, secret.hex().encode(), base64.b64encode(secret)[:40], repr(secret).encode()[2:-1]):
            assert not any(form in text for text in texts)


def test_strangers_and_the_secret(rig: Rigs, tmp_path: Path) -> None:
    made = rig(2)
    with jobs.on(made, tmp_path) as started:
        job, plain = started.launch("h1:1,h2:1", "keep", "a"), started.plain(["h1", "h2"], "keep", "b")
        for worker, count in ((job, 2), (plain[0], 1), (plain[1], 1)):
            worker.time_of("ready", count=count)
        strangers = [started.intrude(host, ports) for host in made.hosts if (ports := started.ports(host))]
        assert strangers  # a host to which others have connected, and that has no coordinator, has no door any more
        check_secret(started, ["a-0", "a-1", "b-0", "b-1"])
        (tmp_path / "stop").touch()
        for worker in (job, *plain):
            assert worker.finish() == 0, str(worker)
            assert "Traceback" not in str(worker)
        for stranger in strangers:
            stranger.close()
        started.wait_until_empty()


def test_strangers_at_the_start(rig: Rigs, tmp_path: Path) -> None:
    """They are at the ports of rank 0 before the other rank is."""
    (tmp_path / "stop").touch()
    with jobs.on(rig(2), tmp_path) as started:
        [first] = started.plain(["h1", "h2"], "keep", "a", port=29400, only=[0])
        deadline = time.monotonic() + PATIENCE
        while not (ports := started.ports("h1")):
            assert time.monotonic() < deadline, str(first)
            time.sleep(0.02)
        stranger = started.intrude("h1", ports)
        [second] = started.plain(["h1", "h2"], "keep", "a", port=29400, only=[1])
        for worker in (first, second):
            assert worker.finish() == 0, str(worker)
        stranger.close()
