"""What is said of a run at its end, without a job."""

from typing import Any

import pytest

from hocket.events import (
    BATCHES_AGAIN,
    SAMPLES_AGAIN,
    Facts,
    Metrics,
    PassDone,
    RecordDecoder,
    ServerReport,
    Traffic,
    encode,
)
from hocket.observe.summaries import GossipSummary, SampleCount, ServedSummary, TrafficSummary, histogram, size


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


def test_what_counted_in_each_epoch_and_what_was_done_twice() -> None:
    count, facts = SampleCount(), dict[str, Any]()
    assert SampleCount.lines(facts) == []
    for epoch, samples in enumerate((240, 240, 236, 240), 1):
        for _ in range(2):  # workers
            facts |= count.take(PassDone(1, epoch, samples, 240))
        assert epoch > 1 or SampleCount.lines(facts) == ["every sample counted once in 1 epoch: 240 in it"]
    for batches in (1, 2):
        facts |= count.take_change({"workers": 2, BATCHES_AGAIN: batches, SAMPLES_AGAIN: 4 * batches})
    facts |= count.take_change({"workers": 3})
    assert SampleCount.lines(facts) == [
        "every sample counted once in 3 epochs: 240 in each of them",
        "epoch 3: 236 of 240 samples counted",
        "3 batches of lost workers were done twice, with 12 samples",
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


def test_a_host_is_not_said_to_wait_for_itself() -> None:
    summary = TrafficSummary()
    summary.take(0, Traffic("a", 0.0, 0.0, {"a": 7.0, "b": 2.0}))
    summary.take(1, Traffic("a", 0.0, 0.0, {"a": 9.0, "b": 1.0, "c": 0.6}))
    summary.take(2, Traffic("b", 0.0, 0.0, {"b": 3.0}))
    assert summary.lines() == ["hocket: a waited 1.5 s for b, 0.3 s for c."]


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


def test_what_was_measured_and_picked_between_hosts() -> None:
    """Which sizes each algorithm had is on the screen; the rate of each link is in the record alone."""
    summary = TrafficSummary()
    uses = {
        "ring": [4, 20e6, 0.4, 0.3, 3, 4e6, 6e6, 0],
        "direct": [10, 40e3, 0.01, 0.0, 0, 4e3, 4e3, 0],
        "topk": [10, 40e6, 0.02, 0.0, 0, 4e6, 4e6, 8e5],
    }
    summary.take(0, Traffic("a", 2.0, 1.0, {}, uses, "0.10 ms, 100 MB/s", [[0.0, 100.0], [99.5, 0.0]]))
    facts = summary.facts()
    assert facts["MB/s between hosts"] == "-, 100; 99.5, -"
    assert facts["sums between hosts by ring"] == "4 of 4.00 to 6.00 MB, 100.00 ms each (predicted 100.00 ms)"
    assert facts["sums between hosts by direct"] == "10 of 0.00 MB, 1.00 ms each"
    assert facts["sums between hosts by topk"] == "10 of 4.00 MB as 0.080 MB to the wire, 2.00 ms each"
    assert not any("99.5" in line for line in summary.lines())
    assert "hocket: Measured between hosts: 0.10 ms, 100 MB/s." in summary.lines()


def test_who_was_refused_between_workers_is_one_line() -> None:
    summary, message = TrafficSummary(), "not the message that was to come"
    summary.take(0, Traffic("a", 0.0, 0.0, {}, refused={"without the job's secret": 2}))
    summary.take(1, Traffic("b", 0.0, 0.0, {}, refused={"without the job's secret": 1, message: 1}))
    said = "refused between workers"
    assert summary.facts() == {said: f"without the job's secret 3×, {message} 1×"}
    assert summary.lines() == [f"hocket: {said}: without the job's secret 3×, {message} 1×."]
