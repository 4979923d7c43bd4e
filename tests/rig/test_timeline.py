"""A timeline of several hosts: buckets between hosts, what they hid, and who was late."""

from pathlib import Path

from conftest import Rigs
from rig import jobs

from hocket.lab.trace import trace_file as trace
from hocket.lab.trace import waits


def test_buckets_of_all_hosts_are_on_one_time_axis(rig: Rigs, tmp_path: Path) -> None:
    with jobs.on(rig(2), tmp_path) as started:
        job = started.launch("h1:2,h2:1", "law", "result", "mirrored", flags=["--timeline", "out.json"])
        assert job.finish() == 0, job
        started.wait_until_empty()
    found = trace.read(tmp_path / "out.json")
    assert [(rank.name, rank.host) for rank in found.ranks] == [("rank 0", "h1"), ("rank 1", "h1"), ("rank 2", "h2")]
    for rank in found.ranks:
        tracks = {name for name in rank.tracks if name.startswith("bucket ")}
        carries = rank.number != 1  # the host with one worker has no like for the second of the other one
        assert bool(tracks) == carries, rank.tracks.keys()
        names = {span.name for span in rank.spans()}
        assert {"forward", "backward", "update", "exchange gradients"} <= names
        if carries:
            travelling, covered = waits.hidden(found, rank)
            assert 0 <= covered <= travelling
    exchanges = [[s for s in rank.spans() if s.name == "exchange gradients"] for rank in found.ranks]
    assert len({len(each) for each in exchanges}) == 1
    for first, *others in zip(*exchanges, strict=True):  # nobody leaves an exchange before everybody has come
        assert all(other.begin <= first.end and first.begin <= other.end for other in others)
