"""The summary of gossip, without a job."""

from hocket.events import Facts, Metrics
from hocket.observe.gossip import GossipSummary


def test_graphs_and_distances() -> None:
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
