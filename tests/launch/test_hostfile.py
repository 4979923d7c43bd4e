"""Reading ``-H`` and host files, and dealing out workers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.errors import UsageError
from hocket.launch import host_list
from hocket.launch.host_list import Host


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4,node2:8", [Host("node1", 4), Host("node2", 8)]),
        ("node1", [Host("node1")]),
        ("me@node1.example.org:2, 10.0.0.7", [Host("me@node1.example.org", 2), Host("10.0.0.7")]),
        ("[fd00::2]:4,fd00::3,me@[::1]:2", [Host("fd00::2", 4), Host("fd00::3"), Host("me@::1", 2)]),
        ("gpu_box-1:1", [Host("gpu_box-1", 1)]),
    ],
)
def test_hosts_are_read(text: str, expected: list[Host]) -> None:
    assert host_list.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no host"),
        ("node1,", "is no host"),
        ("node1:0", "'0' is no number of workers from 1: write for example node1:4"),
        ("node1:four", "'four' is no number of workers"),
        ("node1:", "'' is no number of workers"),
        ("-oProxyCommand=evil", "is no host"),
        ("me@-oProxyCommand=evil", "is no host"),
        ("node1;rm -rf", "is no host"),
        ("node 1", "is no host"),
        ("$(reboot)", "is no host"),
        ("node1:4,node2,node1:2", "node1 is there 2 times: name it once, with the number of its workers"),
    ],
)
def test_what_is_no_host_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="-H") as caught:
        host_list.parse(text)
    assert message in str(caught.value)


def test_a_host_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1\nnode2:4   # the big one\n\n  node3 slots=2\nfd00::7 slots=1\n")
    assert host_list.read_file(path) == [Host("node1"), Host("node2", 4), Host("node3", 2), Host("fd00::7", 1)]


def test_a_name_for_each_slot_as_schedulers_write_it(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("n1\nn1\nn2\nn2\nn1\n")
    assert host_list.read_file(path) == [Host("n1", 3), Host("n2", 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no host in it"),
        ("# nothing\n\n", "there is no host in it"),
        ("node1 slots=4 max_slots=8\n", "line 1: 'node1 slots=4 max_slots=8' is not understood"),
        ("node1\nnode2 4\n", "line 2: 'node2 4' is not understood: write for example node1 slots=4"),
        ("node1 slots=x\n", "'x' is no number of workers"),
        ("node1:2\nnode1\n", "node1 is there 2 times"),
        ("node1:2\nnode1 slots=2\n", "node1 is there 2 times"),
    ],
)
def test_what_is_wrong_in_a_host_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match="--hostfile") as caught:
        host_list.read_file(path)
    assert message in str(caught.value)


def test_no_host_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; name a file with a host in every line"):
        host_list.read_file(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="it is no text"):
        host_list.read_file(tmp_path / "binary")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_the_first_slots_are_dealt(slots: list[int], data: st.DataObject) -> None:
    workers = data.draw(st.integers(1, sum(slots)))
    counts = host_list.deal(slots, workers)
    assert sum(counts) == workers
    used = [i for i, count in enumerate(counts) if count]
    assert used == list(range(len(used))), "no gaps"
    assert all(counts[i] == slots[i] for i in used[:-1])
    known = [Host(f"h{i}", count) for i, count in enumerate(slots)]
    assert len(host_list.needed(known, workers)) == len(used), "nobody is called who is not needed"


def test_more_workers_than_slots() -> None:
    with pytest.raises(UsageError, match="-n 7, but the hosts have 6 slots: use at most -n 6"):
        host_list.deal([4, 2], 7)
    assert host_list.deal([4, 2], None) == [4, 2]
    assert host_list.needed([Host("a"), Host("b")], 2) == [Host("a"), Host("b")], "how many a has is not known yet"
