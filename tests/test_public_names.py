"""The public surface, by name."""

import hocket


def test_public_names() -> None:
    assert hocket.__all__ == [
        "Asynchronous", "BSP", "Central", "DMB", "Delayed", "DiLoCo", "Downpour", "EASGD", "FullBatch", "Gossip",
        "HocketError", "Hogwild", "KeyValue", "LocalSGD", "Mirrored", "PS", "SSP", "Softsync", "Switch",
        "SyncBatchNorm", "accumulate", "allgather", "allgather_rows", "allreduce", "alltoall", "barrier", "broadcast",
        "distribute", "gather", "group", "hooks", "init", "launch", "load", "local_rank", "maximum", "mean", "minimum",
        "on_change", "rank", "ray", "receive", "reduce", "reduce_scatter", "report", "resume", "save", "scale_lr",
        "scatter", "send", "settle", "share", "size", "sync_batchnorm", "total", "weight",
    ]  # fmt: skip
    for name in hocket.__all__:
        assert getattr(hocket, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(hocket, "allreduce_")
