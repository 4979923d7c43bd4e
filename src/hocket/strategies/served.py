"""``ps`` and similar strategies: every step pushes gradients to parameter servers, and pulls parameters from them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hocket import spans
from hocket.capture.collector import Collector
from hocket.capture.members import Members
from hocket.capture.model_hooks import ModelHooks
from hocket.errors import SharedCopyError, StrategyError
from hocket.server import rule
from hocket.server.copies import DenseCopy
from hocket.server.placement import Placement, place
from hocket.server.terms import Push, PushOutcome, Terms
from hocket.specs import Served
from hocket.strategies.averaged_gradients import check_exchanged
from hocket.strategies.base import Context, Strategy, Why
from hocket.strategies.nan_policy import NanPolicy, find_fault, read_faults
from hocket.strategies.optimizer_step import SUPPORTS_SCALING, call_hooks, tell_scaler
from hocket.strategies.server_state import ServerState
from hocket.strategies.sparse import SparseTables
from hocket.updates.kinds import divides_by_elements
from hocket.updates.update import Step


class ServedTraining(Strategy):
    """A worker of a job with servers. Its parameters are copies; its optimizer's step happens on the servers.

    After ``backward()``, ``p.grad`` is this worker's own gradient. What the script does to it (clipping) counts where
    each gradient is applied by itself. Where all are averaged it would not be what ``mirrored`` does, and raises.

    A gradient that cannot be used leaves out this worker's step; where all are averaged, the step of all workers, who
    learn of it from the servers.
    """

    def __init__(self, context: Context, spec: Served) -> None:
        super().__init__(context, spec)
        client, optimizer, members = context.client, context.optimizer, context.members
        assert client is not None
        assert optimizer is not None
        model, on_nan, terms = context.model, context.on_nan, terms_of(spec, adds=context.adds)
        if members.foreign:
            raise StrategyError("servers cannot share parameters that two optimizers train: give each to one optimizer")
        self._client, self._optimizer, self._terms = client, optimizer, terms
        self._scale = spec.scale_for(client.workers, adds=context.adds)
        self._clips = terms.clip if not terms.is_collected else None  # the clip of each gradient by itself
        self.steps = 0
        self.late = 0
        self._is_sealed = spec.in_step and client.workers > 1
        self._shown: list[tuple[torch.Tensor, int]] = []  # gradients as the script has got them, and their versions
        rates = self._rule(optimizer)
        self._sparse = SparseTables(client, model, members, terms, rates)
        self._members = dense = members.without(self._sparse.parameters)
        self._nbytes = sum(parameter.nbytes for parameter in dense.parameters)  # buffers have padding between them
        self.placement = self._place(dense, optimizer, spec.placement, len(client.links))
        self._copy = DenseCopy(client, self.placement, terms, rates)
        client.paced += [self._copy.number, *self._sparse.numbers]
        layout = self.placement.layout
        on_cpu = layout.device.type == "cpu"
        self._gradients = self._copy.gradients if on_cpu else layout.allocate()
        self._parameters = self._copy.parameters if on_cpu else layout.allocate()
        self._views = layout.views(self._gradients)
        self._start(layout.views(self._parameters))
        self._state = ServerState(optimizer, dense, self._copy, self._sparse, client.is_first)
        self._nan_policy = NanPolicy([*dense.names, *self._sparse.names], on_nan)
        self.collector = Collector(
            dense.names, dense.parameters, layout, self._gradients, self.captured, check_finite=on_nan != "ignore"
        )
        self.collector.beside = self._sparse.parameters
        hooks = ModelHooks(model, self.collector)
        hooks.watch_loading(model, lambda: None, self._loaded, self._send_loaded)
        self._skips_itself = getattr(optimizer, SUPPORTS_SCALING, False)  # a fused one takes steps that change nothing
        if spec.in_step:  # GradScaler then leaves gradients as they are, and has all workers take every step
            vars(optimizer)[SUPPORTS_SCALING] = True
        self._told: list[dict[str, Any]] | None = None
        self._is_loaded, self._is_settled = False, True
        self._nonfinite: int | None = None
        self._passes = 0  # backward passes since the last push

    @property
    def skipped(self) -> int:
        return self._nan_policy.skipped

    def describe_placement(self) -> list[str]:
        """Which parameters are on which server, and the factor of gradients, in lines for a reader."""
        lines = self.placement.describe(self._members.names)
        if not self._terms.is_collected:
            lines.append(f"hocket:   every gradient is applied by itself, times {self._scale:g} (scale=)")
        return lines

    def settle(self, why: Why) -> None:
        if why.makes_equal:
            self._settle()
        elif why in (Why.LAST_BATCH, Why.IDLE):
            self._flush()
        elif why is Why.REFRESH:
            self._refresh()
        super().settle(why)

    def _flush(self) -> None:
        """Push gradients that were kept for a later push."""

    def _refresh(self) -> None:
        """Get the parameters of the servers as they are now, with any values that the script has loaded."""
        self._send_loaded()
        self._copy.pull()
        self._take_over()

    def _settle(self) -> None:
        """Take the parameters of the servers when nobody pushes any more, and let nobody push before all have them."""
        self._flush()
        self._client.gather("the end of training, with all gradients", b"")
        self._refresh()
        self._client.gather("the end of training, with the parameters", b"")
        self._is_settled = True

    @property
    def owes(self) -> str:
        return "" if self._is_settled or not self.spec.is_uneven else "others may still train it"

    @contextmanager
    def apart(self) -> Iterator[None]:
        """The optimizer's state stays on the servers, and what is loaded does not go there."""
        self._state.rests = True
        try:
            yield
        finally:
            self._state.rests = False
            if not self._client.is_in:
                self._is_loaded = False
                self._note_versions()

    def take(self, given: dict[str, Any]) -> None:
        self._copy.pull()
        self._take_over()

    def _rule(self, optimizer: Optimizer) -> dict[str, Any]:
        return rule.describe(optimizer)

    def _place(self, dense: Members, optimizer: Optimizer, way: str, servers: int) -> Placement:
        whole = bool(dense.parameters) and not self._divides(optimizer)
        made = {id(p): number for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        turns = [made.get(id(parameter), len(made)) for parameter in dense.parameters]
        return place(dense.parameters, dense.groups, servers, way, whole=whole, turns=turns)

    def _divides(self, optimizer: Optimizer) -> bool:
        return divides_by_elements(optimizer, "ps")

    def _start(self, homes: list[torch.Tensor]) -> None:
        """Move the parameters to where servers can reach them, and let the servers have rank 0's values."""
        self._homes = homes
        for home, parameter in zip(homes, self._members.parameters, strict=True):
            home.copy_(parameter.detach())
            parameter.data = home
        self._pointers = [parameter.data_ptr() for parameter in self._members.parameters]
        if self._client.is_starter:
            self._assign()
            self._sparse.assign()
        self._client.gather("hocket.distribute()", b"")
        self._copy.pull()
        self._take_over()

    def _assign(self) -> None:
        if self._parameters is not self._copy.parameters:
            for target, source in zip(self._copy.parameters, self._parameters, strict=True):
                target.copy_(source)
        self._copy.assign()

    def captured(self) -> None:
        """A backward pass is over: gradients are in their slots."""
        self._members.check_homes()
        self._nonfinite = self.collector.nonfinite
        self._passes += 1
        self._members.set_gradients(self._views, self.collector.missing)
        self._note_gradients()

    def _note_gradients(self) -> None:
        """Remember the gradients as they are now, to notice changes by the script."""
        if self._is_sealed:
            sparse = (parameter.grad for parameter in self._sparse.parameters)
            found = [*self._gradients, *(gradient for gradient in sparse if gradient is not None)]
            self._shown = [(gradient, gradient._version) for gradient in found]

    def _check_gradients(self) -> None:
        """Raise if the script has changed what servers are to average."""
        if not self._is_sealed:
            return
        own = {*map(id, self._views), *(id(gradient) for gradient, _ in self._shown)}
        parameters = (*self._members.parameters, *self._sparse.parameters)
        replaced = any(p.grad is not None and id(p.grad) not in own for p in parameters)
        if replaced or any(gradient._version != version for gradient, version in self._shown):
            raise StrategyError(
                f"gradients were changed between backward() and optimizer.step(), and {self.spec.name!r} averages them "
                "only then, on the servers: to clip the average, leave out clip_grad_norm_ and GradScaler.unscale_ "
                f"and use --strategy '{self.spec.name}(clip=1.0)'; for anything else use --strategy mirrored"
            )

    def step(self, original: Step, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._members.check_groups(self._optimizer)
        self._check()
        self._is_settled = False
        check_exchanged(self.collector)
        self._send_loaded()
        fault = self._find_fault()
        if fault and not self.spec.in_step:  # the step is this worker's alone
            self._leave_out({self._client.rank: fault})
        call_hooks(self._optimizer._optimizer_step_pre_hooks, self._optimizer, options)
        begin = time.perf_counter()
        weight = float(self._batch.weight > 0) if self._terms.adds else self._batch.weight
        outcome = self._exchange(0.0 if fault else weight, fault if self.spec.in_step else 0)
        end = time.perf_counter()
        self.exchanging += end - begin
        spans.add(spans.EXCHANGE, "exchange with servers", begin, end, number=self.steps)
        self.steps += 1
        if self._heed(outcome):
            call_hooks(self._optimizer._optimizer_step_post_hooks, self._optimizer, options)
        return loss

    def _find_fault(self) -> int:
        """Why this worker's gradient cannot be used; 0 if it can."""
        nonfinite, self._nonfinite = self._nonfinite, None
        if self.spec.in_step and not self._batch.weight:
            return 0  # the gradient counts nothing, whatever it is
        if nonfinite is None and self.context.checks_finite and (number := self._sparse.find_nonfinite()) is not None:
            nonfinite = len(self._members.names) + number
        return find_fault(self._optimizer, nonfinite)

    def _heed(self, outcome: PushOutcome) -> bool:
        """Do what ``mirrored`` does if a step is left out; returns whether hooks are to see the step as taken."""
        is_scaled = getattr(self._optimizer, "found_inf", None) is not None
        if is_scaled and outcome and self.spec.in_step:
            tell_scaler(self._optimizer, skipped=bool(outcome.faults))
        if outcome.faults:
            self._leave_out(outcome.faults)
        return not outcome.faults or (is_scaled and self._skips_itself)

    def _leave_out(self, faults: Mapping[int, int]) -> None:
        """A step is left out: raise or count it, as the user asked for, unless GradScaler counts it."""
        self._nan_policy.record(read_faults(faults)[0])
        self._nan_policy.allows_step(self._optimizer)

    def _exchange(self, weight: float, fault: int) -> PushOutcome:
        """Push gradients, and pull parameters."""
        outcome = self._push(weight, self._collect() if weight else None, fault, pull=True)
        self._take_over()
        return outcome

    def _push(self, weight: float, present: bytes | None, fault: int = 0, *, pull: bool) -> PushOutcome:
        """Push the gradients in the slots; ``present`` has one byte per parameter, if not all have a gradient."""
        names = tuple(batch.name for batch in self._unlearned if batch.name is not None)
        done = (self._passes, len(names)) if self.spec.in_step and self._batch.in_step else None
        push = Push(self._batch.epoch, weight, present, self._groups(), names, fault, done)
        self._passes = 0
        if weight:
            self._multiply()
            self._note_gradients()
            self._bring(self._copy.gradients, self._gradients)
            self.sent += self._nbytes
        factor = self._factor if weight else 0.0
        before = self._sparse.sent
        outcome = self._sparse.push(dataclasses.replace(push, present=None), factor)
        self.sent += self._sparse.sent - before
        if self._members.parameters or not self._sparse:
            outcome &= self._copy.push(push, pull=pull)
        if not outcome:
            self.late += 1
            self._told = None  # a push that does not count tells nothing
        self._note_learned()
        return outcome

    def _collect(self) -> bytes | None:
        """Take over gradients that the script replaced; returns which parameters have one, or None if all have."""
        self._check_gradients()
        missing = bytearray(len(self._views))
        for i, (parameter, view) in enumerate(zip(self._members.parameters, self._views, strict=True)):
            if parameter.grad is None:
                missing[i] = 1
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        return bytes(not byte for byte in missing) if 1 in missing else None

    @property
    def _factor(self) -> float:
        """The factor of gradients; it undoes GradScaler's scale, if that is left to a fused optimizer."""
        scaled = getattr(self._optimizer, "grad_scale", None)
        return self._scale if scaled is None else self._scale / float(scaled)

    def _multiply(self) -> None:
        """Scale and clip this worker's gradient, if it is applied by itself."""
        factor = self._factor
        if self._clips is not None:
            norm = sum(float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2 for flat in self._gradients)
            factor *= min(1.0, self._clips / (factor * norm**0.5 + 1e-6))
        if factor != 1 and self._gradients:
            torch._foreach_mul_(self._gradients, factor)

    def _groups(self) -> list[dict[str, Any]] | None:
        """The values of the optimizer's groups, such as learning rates, if the servers do not know them yet."""
        groups = rule.describe_groups(self._optimizer)
        if groups == self._told:
            return None
        self._told = groups
        return groups

    def _take_over(self) -> None:
        """The new parameters have arrived."""
        self._bring(self._parameters, self._copy.parameters)
        torch.autograd.graph.increment_version(self._members.parameters)
        self._note_versions()

    @staticmethod
    def _bring(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Copy between a GPU and the memory of its host; nothing to do if both are the same memory."""
        if targets is not sources:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

    def _loaded(self) -> None:
        """The script has called ``load_state_dict``, on all ranks."""
        self._is_loaded = True
        self._note_versions()

    def _send_loaded(self) -> None:
        if self._is_loaded:
            self._is_loaded = False
            if self._client.is_first():
                self._assign()
                self._sparse.assign()

    def _note_versions(self) -> None:
        self._versions = [parameter._version for parameter in self._members.parameters]

    def _check(self) -> None:
        """Raise if a parameter is no longer the copy that the servers update, or was written to by the script."""
        for i, parameter in enumerate(self._members.parameters):
            name = self._members.names[i]
            if parameter.data_ptr() != self._pointers[i]:
                raise SharedCopyError(
                    f"parameter {name!r} has left the copy that servers update: do not call model.to(…) or "
                    "load_state_dict(assign=True), nor set p.data, after hocket.distribute()"
                )
            if parameter._version != self._versions[i]:
                raise SharedCopyError(
                    f"parameter {name!r} was written to in place by the script, which its servers do not know of: "
                    "write before hocket.distribute(), or in load_state_dict()"
                )


def terms_of(spec: Served, *, adds: bool = False) -> Terms:
    """The terms on which the servers work for a strategy; ``adds`` says that losses are sums."""
    return Terms(spec.bound, spec.groups, spec.staleness_aware, spec.clip, spec.patience, adds)
