"""Bad input to strategies: one clear line with the remedy, and nothing is lost."""

from typing import Any

import pytest
import torch
from pool import Pool, RemoteError
from strategies.training import Case, make
from torch import nn

import hocket
from hocket import specs
from hocket.errors import StrategyError

STRATEGIES = ["mirrored", "central", "central(fused=True)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mirorred", "unknown strategy 'mirorred': the choices are mirrored, central(fused=False)"),
        ("central(fast=True)", "strategy 'central' has no option 'fast': it takes fused"),
        ("mirrored(fused=True)", "it takes no options"),
        ("central(fused=1)", "fused=1 must be a bool"),
        ("central(fused=open('x'))", "is no literal"),
        ("central(True)", "write name or name(key=value, …)"),
        ("central(", "write name or name(key=value, …)"),
        ("central(**{})", "** is not possible"),
        ("", "cannot read strategy ''"),
    ],
)
def test_wrong_strategies_are_explained(text: str, message: str) -> None:
    with pytest.raises(StrategyError) as error:
        specs.parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["mirrored", "central", "central(fused=True)"])
def test_strategies_are_read_as_they_are_written(text: str) -> None:
    assert specs.write(specs.parse(text)) == text
    assert specs.parse(text + "()" if "(" not in text else text) == specs.parse(text)


def differ(what: str) -> None:
    odd = hocket.rank() == 2
    if what == "shape":
        model = nn.Sequential(nn.Linear(3, 5 if odd else 4), nn.Linear(4, 2))
    elif what == "number":
        model = nn.Sequential(nn.Linear(3, 4), *([] if odd else [nn.Linear(4, 2)]))
    else:
        model = nn.Sequential(nn.Linear(3, 4))
        model[0].weight.requires_grad_(not odd)
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", "rank 0 has 0.weight float32[4, 3], rank 2 has 0.weight float32[5, 3]"),
        ("number", "rank 0 has 4 parameters, rank 2 has 2"),
        ("frozen", "rank 0 has 0.weight float32[4, 3], rank 2 has 0.weight float32[4, 3] (frozen)"),
    ],
)
def test_models_that_differ_are_named_on_all_ranks(pool: Pool, what: str, message: str) -> None:
    for outcome in pool.outcomes(3, differ, what):
        assert isinstance(outcome, RemoteError) and outcome.kind == "MismatchError"
        assert message in outcome.message


def spoil(strategy: str, what: str) -> None:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer, strategy=strategy)
    x = torch.ones(2, 6, dtype=torch.float64)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if what == "write":
        with torch.no_grad():
            model[2].weight.mul_(0.9)  # type: ignore[index, union-attr, operator]
    elif what == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif what == "type":
        model.float()
        x = x.float()
    elif what == "data":
        model[2].weight.data = model[2].weight.data.clone()  # type: ignore[index, union-attr, operator]
    elif what == "group":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    elif what == "replace":
        model[2].weight.grad = torch.zeros_like(model[2].weight)  # type: ignore[index, union-attr]
    model(x).sum().backward()
    if what == "replace":
        model[2].weight.grad = torch.zeros_like(model[2].weight)  # type: ignore[index, union-attr]
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("write", "SharedCopyError", "'2.weight' was written to in place by the script"),
        ("assign", "SharedCopyError", "was replaced"),
        ("type", "SharedCopyError", "parameter '"),
        ("data", "SharedCopyError", "'2.weight' has left the copy"),
        ("group", "UsageError", "parameter groups have changed"),
    ],
)
def test_what_central_cannot_bear_is_told(pool: Pool, what: str, kind: str, message: str, fused: bool) -> None:
    for outcome in pool.outcomes(2, spoil, f"central(fused={fused})", what):
        assert outcome.kind == kind and message in outcome.message


@pytest.mark.parametrize(
    ("what", "kind"), [("assign", "SharedCopyError"), ("type", "SharedCopyError"), ("group", "UsageError")]
)
def test_what_mirrored_cannot_bear_is_told(pool: Pool, what: str, kind: str) -> None:
    assert [outcome.kind for outcome in pool.outcomes(2, spoil, "mirrored", what)] == [kind, kind]


@pytest.mark.parametrize("what", ["write", "data"])
def test_mirrored_bears_writes(pool: Pool, what: str) -> None:
    pool.run(2, spoil, "mirrored", what)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_replaced_gradients_are_honoured(pool: Pool, strategy: str) -> None:
    pool.run(2, spoil, strategy, "replace")


def test_replaced_gradients_are_refused_when_fused(pool: Pool) -> None:
    outcome = pool.outcomes(2, spoil, "central(fused=True)", "replace")[0]
    assert outcome.kind == "StrategyError" and "'2.weight' was replaced" in outcome.message


def read_fused(what: str) -> None:
    model, optimizer, _ = make(Case(dtype="float32"), 1)
    hocket.distribute(model, optimizer, strategy="central(fused=True)")
    scaler = torch.amp.GradScaler("cpu")
    loss = model(torch.ones(2, 6)).sum()
    (scaler.scale(loss) if what == "scaler" else loss).backward()
    gradient = next(model.parameters()).grad
    assert gradient is not None and "LocalGradient" in repr(gradient) and gradient.shape == (150, 6)
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    elif what == "clip value":
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    elif what == "scaler":
        scaler.step(optimizer)
    elif what == "norm":
        gradient.norm()
    elif what == "item":
        float(gradient[0, 0])
    elif what == "numpy":
        gradient.numpy()
    elif what == "operator":
        gradient * 2
    else:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()


@pytest.mark.parametrize("what", ["clip", "clip value", "scaler", "norm", "item", "numpy", "operator"])
def test_fused_gradients_cannot_be_read(pool: Pool, what: str) -> None:
    for outcome in pool.outcomes(2, read_fused, what):
        assert outcome.kind == "StrategyError" and "use --strategy central or mirrored" in outcome.message


def test_fused_gradients_can_be_zeroed(pool: Pool) -> None:
    pool.run(2, read_fused, "zero")


def nan_gradient(strategy: str, on_nan: str) -> tuple[list[bool], bool]:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer, strategy=strategy, on_nan=on_nan)
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.ones(2, 6, dtype=torch.float64)
    loss = model(x).sum()
    if hocket.rank() == 1:
        loss = loss + model[2].bias.sum() * float("nan")  # type: ignore[index, union-attr, operator]
    loss.backward()
    optimizer.step()
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    hocket.barrier()  # with central, nobody may go on before all have looked
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return same, any(bool(p.isnan().any()) for p in model.parameters())


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_names_rank_and_parameter(pool: Pool, strategy: str, workers: int) -> None:
    for outcome in pool.outcomes(workers, nan_gradient, strategy, "raise"):
        assert outcome.kind == "NonFiniteError" and "rank 1: '2.bias'" in outcome.message
        assert "--on-nan skip" in outcome.message


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_step_is_skipped_by_all(pool: Pool, strategy: str) -> None:
    for same, spoiled in pool.run(3, nan_gradient, strategy, "skip"):
        assert all(same) and not spoiled


def test_nobody_looks_if_told_so(pool: Pool) -> None:
    assert all(spoiled for _, spoiled in pool.run(2, nan_gradient, "mirrored", "ignore"))


def test_alone_a_nan_is_found_when_asked_for(pool: Pool) -> None:
    assert pool.run(1, nan_alone, on_nan="skip") == [True]


def nan_alone() -> bool:
    model, optimizer, _ = make(Case(), 1)
    hocket.distribute(model, optimizer)
    (model(torch.ones(1, 6, dtype=torch.float64)).sum() * float("nan")).backward()
    optimizer.step()
    return all(bool(p.isfinite().all()) for p in model.parameters())


def wrong_use(what: str) -> Any:
    model, optimizer, loader = make(Case(), 1)
    if what == "nothing":
        hocket.distribute()
    elif what == "no model":
        hocket.distribute(optimizer=optimizer)
    elif what == "twice":
        hocket.distribute(model, optimizer)
        hocket.distribute(model, optimizer)
    elif what == "central without optimizer":
        hocket.distribute(model, strategy="central")
    elif what == "L-BFGS":
        hocket.distribute(model, torch.optim.LBFGS(model.parameters()), strategy="central")
    elif what == "sparse":
        table = nn.Embedding(10, 3, sparse=True)
        hocket.distribute(table, torch.optim.SGD(table.parameters(), lr=0.1))
        table(torch.tensor([1, 2])).sum().backward()
    elif what == "meta":
        hocket.distribute(nn.Linear(3, 3, device="meta"))
    elif what == "complex":
        hocket.distribute(nn.Linear(3, 3, dtype=torch.complex64))
    elif what == "lazy":
        hocket.distribute(nn.LazyLinear(3))
    elif what == "on_nan":
        hocket.distribute(model, optimizer, on_nan="explode")
    elif what == "strategy":
        hocket.distribute(model, optimizer, strategy=7)  # type: ignore[arg-type]
    elif what == "rule":
        hocket.scale_lr(optimizer, "cubic")
    elif what == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        hocket.scale_lr(optimizer)
    elif what == "warmup":
        hocket.distribute(model, optimizer, warmup=5)
    elif what == "sampler":
        from torch.utils.data import DataLoader, DistributedSampler

        hocket.distribute(loader=DataLoader(loader.dataset, sampler=DistributedSampler(loader.dataset, 2, 0)))
    elif what == "not a loader":
        hocket.distribute(loader=[1, 2, 3])  # type: ignore[arg-type]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("what", "remedy"),
    [
        ("nothing", "pass a model"),
        ("no model", "pass the model"),
        ("twice", "once for each model"),
        ("central without optimizer", "hocket.distribute(model, optimizer, …)"),
        ("L-BFGS", "use --strategy mirrored"),
        ("sparse", "sparse=False"),
        ("meta", "model.cpu()"),
        ("complex", "float64, float32, bfloat16, float16"),
        ("lazy", "run the model once"),
        ("on_nan", "the choices are raise, skip, ignore"),
        ("strategy", "hocket.Mirrored()"),
        ("rule", "the choices are linear, sqrt"),
        ("scheduler", "scale first"),
        ("warmup", "add scale_lr"),
        ("sampler", "shuffle=True"),
        ("not a loader", "takes a torch DataLoader"),
    ],
)
def test_wrong_use_is_one_clear_line(pool: Pool, what: str, remedy: str) -> None:
    for outcome in pool.outcomes(2, wrong_use, what):
        assert isinstance(outcome, RemoteError) and outcome.kind in ("UsageError", "StrategyError")
        assert remedy in outcome.message and "\n" not in outcome.message
