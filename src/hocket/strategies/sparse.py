"""Embeddings with sparse gradients: rows are pulled when a forward pass asks for them, and pushed after backward."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from hocket.capture.members import Members
from hocket.errors import StrategyError
from hocket.server.copies import RowCopy
from hocket.server.server_client import Client
from hocket.server.shard import Stored
from hocket.server.terms import Push, PushOutcome, Terms

_State = MutableMapping[Any, Any]


class SparseTables:
    """The weights of ``nn.Embedding(sparse=True)`` in a model; true if there are any.

    A worker's copy of such a table has the rows that it used last; ``state_dict()`` of the model gets all rows.

    Attributes:
        parameters: The weights.
        names: The names of the weights.
        sent: Bytes of gradients that were pushed, their rows' numbers included.
    """

    def __init__(self, client: Client, model: nn.Module, members: Members, terms: Terms, rule: dict[str, Any]) -> None:
        modules = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        found = {
            id(m.weight): members.parameters[members.index[id(m.weight)]]
            for m in modules
            if id(m.weight) in members.index and members.groups[members.index[id(m.weight)]] >= 0
        }
        self.parameters = list(found.values())
        self.names = [members.names[members.index[key]] for key in found]
        self.sent = 0
        if not found:
            self._tables: dict[int, RowCopy] = {}
            return
        if terms.clip is not None:
            raise StrategyError("clip= does not see sparse gradients: leave it out, or make embeddings sparse=False")
        self._groups = {key: members.groups[members.index[key]] for key in found}
        self._tables = {}
        for key, weight in found.items():
            rows, width = weight.shape
            own = {**rule, "groups": [rule["groups"][self._groups[key]]]}
            self._tables[key] = RowCopy(client, (rows, width), weight.dtype, terms, own)
        for module in modules:
            if id(module.weight) in found:
                hook = _RowHook(module, self._tables[id(module.weight)])
                module.register_forward_pre_hook(hook.before, with_kwargs=True)
                module.register_state_dict_pre_hook(hook.complete)  # type: ignore[no-untyped-call]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the embeddings' tables."""
        return [table.number for table in self._tables.values()]

    def __bool__(self) -> bool:
        return bool(self._tables)

    def assign(self) -> None:
        """The servers take over this worker's rows."""
        for weight in self.parameters:
            self._tables[id(weight)].assign(weight.detach().cpu())

    def push(self, push: Push, factor: float) -> PushOutcome:
        """Push the gradients of all tables, scaled; what the servers say of all of them."""
        outcome = PushOutcome()
        for weight in self.parameters:
            rows, values = _gradient(weight, factor)
            self.sent += rows.nbytes + values.nbytes
            group = self._groups[id(weight)]
            groups = None if push.groups is None else [push.groups[group]]
            told = dataclasses.replace(push, groups=groups)
            outcome &= self._tables[id(weight)].push(told, rows, values)
        return outcome

    def find_nonfinite(self) -> int | None:
        """The number of a weight whose gradient is not finite."""
        for number, weight in enumerate(self.parameters):
            gradient = weight.grad
            if gradient is not None and gradient.is_sparse and not bool(torch.isfinite(gradient._values()).all()):
                return number
        return None

    def fetch_state(self, state: _State) -> None:
        """Get the optimizer's state of all tables from the servers."""
        for weight in self.parameters:
            for stored in sorted(self._tables[id(weight)].state(), key=lambda each: each.start):
                value, known = stored.value, state[weight]
                if not isinstance(value, torch.Tensor) or not value.dim():
                    known.setdefault(stored.key, value)
                    continue
                whole = known.setdefault(stored.key, torch.zeros(weight.shape[0], *value.shape[1:], dtype=value.dtype))
                whole[stored.start : stored.start + value.shape[0]] = value  # a part without any update is zero

    def send_state(self, state: _State) -> None:
        """Bring the optimizer's state of all tables to the servers."""
        for weight in self.parameters:
            stored = [Stored(0, 0, key, value) for key, value in state.get(weight, {}).items()]
            if stored:
                self._tables[id(weight)].load_state(stored)


class _RowHook:
    """The hooks on one embedding."""

    def __init__(self, module: nn.Module, table: RowCopy) -> None:
        self._module: nn.Module | None = module
        self._table = table

    @torch.no_grad()
    def before(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before a forward pass: pull the rows that it asks for."""
        asked = args[0] if args else named.get("input")
        if module is self._module and isinstance(asked, torch.Tensor):
            rows = torch.unique(asked.detach().cpu().to(torch.int64))
            if rows.numel():
                weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
                weight.index_copy_(0, rows.to(weight.device), self._table.pull(rows).to(weight.device))

    @torch.no_grad()
    def complete(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before ``state_dict()``: pull all rows."""
        if module is self._module:
            weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
            if weight.device.type == "cpu" and weight.is_contiguous():
                self._table.pull_all(weight)
            else:
                whole = torch.empty(weight.shape, dtype=weight.dtype)
                self._table.pull_all(whole)
                weight.copy_(whole)


def _gradient(weight: nn.Parameter, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    gradient = weight.grad
    if gradient is None or not factor:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, weight.shape[1], dtype=weight.dtype)
    if gradient.layout == torch.strided:
        raise StrategyError(
            "an embedding with sparse=True has got a dense gradient: is its weight tied to another layer? make it "
            "with sparse=False"
        )
    gradient = gradient.coalesce().cpu()
    values = gradient.values()
    return gradient.indices()[0].contiguous(), (values if factor == 1 else values * factor).contiguous()
