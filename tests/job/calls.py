"""Random collectives in random groups, which every worker checks against torch, computed in one place."""

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import hocket
from hocket.comm.kernels import PAIRWISE

ADDS = [
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128",
]  # fmt: skip
MOVES = [*ADDS, "float8_e4m3fn", "uint16"]
REDUCES = ["allreduce", "reduce", "reduce_scatter"]
KINDS = [*REDUCES, "broadcast", "allgather", "allgather_rows", "gather", "scatter", "alltoall", "barrier", "send"]
TRAILS = [(), (1,), (3, 2), (0,), (2, 1, 2), (257,)]
BIG = 3_000  # rows with which a float32[…, 257] goes round the ring in several pieces


@dataclass(frozen=True)
class Case:
    """One collective: what each member gives follows from it."""

    kind: str
    members: tuple[int, ...]
    is_all: bool
    dtype: str
    trail: tuple[int, ...]
    rows: tuple[int, ...]  # of each member; -1 for a tensor without dimensions
    splits: tuple[tuple[int, ...], ...] | None
    operation: str
    root: int
    wait: bool
    form: str
    seed: int

    def value(self, member: int) -> torch.Tensor:
        """What a member gives."""
        generator = torch.Generator().manual_seed(self.seed * 31 + member)
        rows = self.rows[member]
        shape = () if rows < 0 else (rows, *self.trail)
        dtype = getattr(torch, self.dtype)
        found = torch.randint(0, 4, shape, generator=generator)
        if dtype == torch.float64:
            return found + torch.rand(shape, generator=generator, dtype=torch.float64)
        if dtype.is_complex:
            return torch.complex(found.float(), (found - 2).float()).to(dtype)
        return found.to(dtype)


def cases(seed: int, size: int, count: int = 25) -> list[Case]:
    """So many random collectives among ``size`` workers."""
    dice = random.Random(seed)
    found = []
    for number in range(count):
        kind = dice.choice(KINDS if size > 1 else KINDS[:-1])
        is_all = dice.random() < 0.5 and kind != "send"
        among = 2 if kind == "send" else dice.randint(1, size)
        members = tuple(range(size)) if is_all else tuple(dice.sample(range(size), among))
        if not is_all and kind != "send":
            members = tuple(sorted(members))
        dtype = dice.choice(ADDS if kind in REDUCES else MOVES)
        operations = ["sum", "product"]
        operations += [] if "complex" in dtype else ["max", "min"]
        operations += ["mean"] if dtype[0] in "fbc" and dtype != "bool" else []
        trail = dice.choice(TRAILS)
        counts = [0, 1, 2, 5, 64] + ([BIG] if trail == (257,) and dtype == "float32" and number % 5 == 0 else [700])
        same = kind in ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "barrier")
        row = dice.choice(counts)
        rows = tuple(row if same else dice.choice(counts[:-1]) for _ in members)
        if dice.random() < 0.2 and kind in ("allreduce", "reduce", "broadcast", "allgather", "gather", "send"):
            rows = (-1,) * len(members)
        splits: tuple[tuple[int, ...], ...] | None = None
        if kind in ("alltoall", "reduce_scatter") and dice.random() < 0.7:
            splits = tuple(
                _split(dice if kind == "alltoall" else random.Random(number), each, len(rows)) for each in rows
            )
        form = dice.choice(["plain", "plain", "strided", "numpy", "conjugated"])
        operation, root, wait = dice.choice(operations), dice.randrange(len(members)), dice.random() < 0.6
        found.append(
            Case(kind, members, is_all, dtype, trail, rows, splits, operation, root, wait, form, seed * 1000 + number)
        )
    return found


def _split(dice: random.Random, rows: int, parts: int) -> tuple[int, ...]:
    cuts = sorted(dice.randint(0, rows) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True))


def expected(case: Case, member: int) -> Any:
    """What a member gets."""
    values, size = [case.value(each) for each in range(len(case.members))], len(case.members)
    whole = values[0]
    if case.kind in REDUCES:
        wide = [each.double() if each.is_floating_point() else each for each in values]
        wide = [each.to(torch.complex128) if each.is_complex() else each for each in wide]
        whole = functools.reduce(PAIRWISE["sum" if case.operation == "mean" else case.operation], wide)
        whole = (whole / size if case.operation == "mean" else whole).to(values[0].dtype)
    mine = values[member]
    even = [rows // size + (each < rows % size) for rows in case.rows for each in range(size)]
    parts = case.splits or tuple(tuple(even[at * size :][:size]) for at in range(size))
    if case.kind == "allreduce":
        return whole
    if case.kind == "reduce":
        return whole if member == case.root else None
    if case.kind == "reduce_scatter":
        return _rows(whole, parts[0])[member]
    if case.kind == "broadcast":
        return values[case.root]
    if case.kind == "allgather":
        return _join(values, (size, *mine.shape))
    if case.kind == "allgather_rows":
        return _join(values, (sum(case.rows), *case.trail))
    if case.kind == "gather":
        return values if member == case.root else None
    if case.kind == "scatter":
        return mine
    if case.kind == "alltoall":
        came = [_rows(each, split)[member] for each, split in zip(values, parts, strict=True)]
        received = [split[member] for split in parts]
        return _join(came, (sum(received), *case.trail)), received
    return values[0] if case.kind == "send" and member == 1 else None


def _rows(tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(splits))
    return [tensor[end - count : end] for end, count in zip(ends, splits, strict=True)]


def _join(parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    raw = torch.cat([raw_bytes(part) for part in parts])
    return raw.view(parts[0].dtype).view(*shape) if len(raw) else torch.empty(*shape, dtype=parts[0].dtype)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().contiguous().view(-1)
    return flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)


def give(case: Case, member: int) -> Any:
    """What a member gives, as scripts have it."""
    value = case.value(member)
    if case.form == "strided" and value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if case.form == "conjugated" and value.is_complex():
        return torch.view_as_complex(
            torch.view_as_real(value) * torch.tensor([1.0, -1.0], dtype=value.real.dtype)
        ).conj()
    if case.form == "numpy" and case.dtype not in ("bfloat16", "float8_e4m3fn"):
        array = value.numpy()
        return array.astype(array.dtype.newbyteorder(">")) if case.seed % 2 else array
    return value


def call(case: Case, member: int) -> Any:
    """Make the call of one member."""
    mine, root, at = give(case, member), case.members[case.root], case.members
    options: dict[str, Any] = {"wait": case.wait}
    if case.kind == "send":
        return hocket.send(mine, at[1], **options) if member == 0 else hocket.receive(at[0], **options)
    if not case.is_all:
        options["group"] = hocket.group(at)
    if case.kind == "barrier":
        return hocket.barrier(**options)
    if case.kind == "scatter":
        parts = [give(case, each) for each in range(len(at))]
        return hocket.scatter(parts if member == case.root else None, root, **options)
    if case.kind in REDUCES:
        options["operation"] = case.operation
    if case.kind in ("reduce", "broadcast", "gather"):
        options["root"] = root
    if case.kind == "reduce_scatter" and case.splits is not None:
        options["rows"] = case.splits[member]
    if case.kind == "alltoall" and case.splits is not None:
        options["splits"] = case.splits[member]
    return getattr(hocket, case.kind)(mine, **options)


def check(case: Case, found: Any, wanted: Any) -> None:
    """Raise if a result is not what is wanted."""
    if isinstance(wanted, (list, tuple)) and not all(isinstance(each, int) for each in wanted):
        assert len(found) == len(wanted), case
        for one, other in zip(found, wanted, strict=True):
            check(case, one, other)
    elif isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            found = torch.from_numpy(found.astype(found.dtype.newbyteorder("=")))
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), (case, found.shape, wanted.shape)
        if case.kind in REDUCES and (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
            error, wide = 4 * len(case.members) * torch.finfo(wanted.dtype).eps, torch.complex128
            assert torch.allclose(found.to(wide), wanted.to(wide), rtol=error, atol=0), (case, found, wanted)
        else:
            assert torch.equal(raw_bytes(found), raw_bytes(wanted)), (case, found, wanted)
    else:
        assert found == wanted, (case, found, wanted)


def make_all(seed: int, size: int, count: int = 25) -> int:
    """Make the calls of this worker, wait for what goes on meanwhile in any order, and check all; their number."""
    waiting: list[tuple[Case, Any, Any]] = []
    dice = random.Random(seed + hocket.rank())
    made = 0
    for case in cases(seed, size, count):
        if hocket.rank() not in case.members:
            continue
        made += 1
        member = case.members.index(hocket.rank())
        found = call(case, member)
        if case.wait:
            check(case, found, expected(case, member))
        else:
            waiting.append((case, found, expected(case, member)))
        while waiting and dice.random() < 0.3:
            case_, handle, wanted = waiting.pop(dice.randrange(len(waiting)))
            check(case_, handle.wait(), wanted)
            assert handle.done()
    for case, handle, wanted in waiting:
        check(case, handle.wait(), wanted)
    return made
