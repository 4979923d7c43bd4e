"""What the user has chosen for a model: the strategy and the codec, and whether they fit the job."""

from __future__ import annotations

import dataclasses
import sys

from torch import nn

from hocket import config as configuration
from hocket import specs
from hocket.comm.communicator import Communicator
from hocket.errors import StrategyError
from hocket.job.worker import Worker
from hocket.specs import CodecSpec, Spec
from hocket.specs.registry import everything


def choose_strategy(strategy: str | Spec | None, reduction: str) -> Spec:
    """The strategy as it was chosen, with checked values."""
    chosen = strategy or configuration.SETTINGS["strategy"].default
    spec = specs.parse(chosen) if isinstance(chosen, str) else chosen
    if not isinstance(spec, Spec):
        raise StrategyError(f"strategy={chosen!r}: pass a text such as 'mirrored', or hocket.Mirrored()")
    spec = specs.parse(specs.write(spec))  # checks every value
    if spec.has_reduction and reduction == "sum":
        spec = dataclasses.replace(spec, reduction="sum")  # type: ignore[call-arg]  # it adds up by itself
    return spec


def check_fit(worker: Worker, spec: Spec) -> None:
    """Raise if the job is not one in which the strategy can train."""
    config = worker.config
    spec.check_fit(config.size, config.servers)
    if spec.meets_at_coordinator and config.size > 1 and worker.client is None:
        raise StrategyError(
            f"strategy {spec.name!r} must be known when the job starts: say --strategy {spec.name} to hocket run"
        )


def choose_codec(
    codec: str | CodecSpec | None, spec: Spec, model: nn.Module, communicator: Communicator
) -> CodecSpec | None:
    """The codec as it was chosen, with checked values; None if gradients travel as they are."""
    if not codec:
        return None
    chosen = specs.parse_codec(codec if isinstance(codec, str) else specs.write(codec))
    text = specs.write(chosen)
    if not spec.takes_codec:
        known = ", ".join(name for name, kind in everything().items() if kind.takes_codec)
        raise StrategyError(
            f"codec {text!r} cannot carry what strategy {spec.name!r} exchanges; it can with {known}: use one of them, "
            "or leave out the codec"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_cuda or not parameter.is_floating_point():
            what = "on a GPU" if parameter.is_cuda else str(parameter.dtype).removeprefix("torch.")
            raise StrategyError(
                f"codec {text!r} is for floating-point numbers on CPUs, and {name!r} is {what}: leave out the codec"
            )
    if communicator.size > 1 and not communicator.spreads and communicator.rank == 0:
        print(
            f"hocket: codec {text} has nothing to do: all workers are on one host, and share its memory",
            file=sys.stderr,
            flush=True,
        )
    return chosen
