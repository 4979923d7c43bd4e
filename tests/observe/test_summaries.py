"""What is said of a run at its end, without a job."""

from typing import Any

import pytest

from hocket.events import Facts, Metrics, RecordDecoder, ServerReport, encode
from hocket.observe.summaries import GossipSummary, ServedSummary, histogram, size


def served(server: int, workers: dict[str, dict[str, Any]], **more: Any) -> ServerReport:
    known = {"seconds": 10.0, "busy": 3.4, "updates": 1204, "received": 3_100_000_000, "sent": 42, "refused": {}}
    record = RecordDecoder().feed(encode(ServerReport(server, "node1", **{**known, **more}, workers=workers)))[0]
    assert isinstance(record, ServerReport)
    return record


def test_the_last_record_of_each_server_counts() -> None:
    summary = ServedSummary()
    summary.take(served(1, {"0": {"pushes": 1, "staleness": {"9": 1}}}, refused={"wrong secret": 9}))
    summary.take(served(1, {"0": {"pushes": 5, "staleness": {"0": 1, "1": 1, "2": 2}, "seconds": 2.0}}))
    summary.take(served(0, {"0": {"pushes": 5, "staleness": {"0": 4}, "seconds": 2.0, "late": 2}}, refused={"x": 1}))
    assert summary.lines() == [
        "hocket: staleness (updates between a worker's pull and its push): mean 0.6, most 2",
        "hocket: rank 0: 2.0 pushes/s, staleness 0.6 (0:62% 1:12% 2:25%)",
        "hocket: server 0 on node1: busy 34%, 1,204 updates, 3.1 GB in, 42 B out",
        "hocket: server 1 on node1: busy 34%, 1,204 updates, 3.1 GB in, 42 B out",
        "hocket: pushes refused as too late: 2 of rank 0",
        "hocket: refused: x 1×",
    ]


def test_nothing_is_said_where_there_are_no_servers() -> None:
    assert ServedSummary().lines() == [] and ServedSummary().facts() == {}


def test_a_server_that_nobody_used() -> None:
    summary = ServedSummary()
    summary.take(served(0, {}, seconds=0.0, busy=0.0, updates=1))
    assert summary.lines() == ["hocket: server 0 on node1: busy 0%, 1 update, 3.1 GB in, 42 B out"]


def test_without_staleness_only_the_speed_is_told() -> None:
    summary = ServedSummary()
    summary.take(served(0, {"0": {"pushes": 3, "staleness": {"0": 3}}, "1": {"pushes": 1, "lost": True}}))
    facts = summary.facts()
    assert (facts["staleness"], facts["rank 0"], facts["rank 1"]) == ("mean 0.0, most 0", "3 pushes", "1 push, lost")


def test_many_workers_are_cut_on_the_screen_and_kept_in_the_record() -> None:
    summary = ServedSummary()
    summary.take(served(0, {str(rank): {"pushes": 1, "staleness": {"1": 1}} for rank in range(20)}))
    lines = summary.lines()
    assert [line for line in lines if "rank" in line][7:] == [
        "hocket: rank 7: 1 push, staleness 1.0 (1:100%)", "hocket: 12 more ranks: hocket runs show"
    ]  # fmt: skip
    assert "rank 19" in summary.facts() and lines[-1].startswith("hocket: server 0")


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({1: 1}, "1:100%"),
        ({2: 1, 0: 3}, "0:75% 2:25%"),
        (dict.fromkeys(range(10), 10), "0:10% 1:10% 2:10% 3:10% 4:10% 5+:50%"),
    ],
)
def test_histograms_fit_a_line(counts: dict[int, int], text: str) -> None:
    assert histogram(counts) == text


def test_sizes() -> None:
    assert [size(n) for n in (0, 999, 1000, 2.5e6, 3e9, 4e15)] == [
        "0 B", "999 B", "1.0 kB", "2.5 MB", "3.0 GB", "4000.0 TB"
    ]  # fmt: skip


def test_graphs_and_distances_of_gossip() -> None:
    summary = GossipSummary()
    summary.take(Facts({"gossip": "a ring of 4", "spectral gap": 0.6667}))
    for rank in range(2):
        summary.take(Metrics(10, 400, 100.0 + rank, {"distance from consensus": 0.04}))
        summary.take(Metrics(10, 400, 100.5, {"distance from neighbours": 0.9, "loss": 1.0}))
    summary.take(Facts({"gossip": "a ring of 3", "spectral gap": 1.0}))
    summary.take(Metrics(20, 800, 200.0, {"distance from consensus": 0.0012}))
    assert summary.lines() == [
        "hocket: gossip on a ring of 4 (spectral gap 0.667), then a ring of 3 (spectral gap 1); distance from "
        "consensus 1.2e-03 at the end of the last loop, 4.0e-02 of the first"
    ]


def test_nothing_is_said_without_gossip() -> None:
    summary = GossipSummary()
    summary.take(Facts({"strategy": "mirrored"}))
    assert summary.lines() == []
