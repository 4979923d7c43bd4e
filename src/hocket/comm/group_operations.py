"""What each collective of a group does, over messages between any two of its members.

A collective begins with one short message from every member to every other, in which they compare what they came for;
so all of them are told if they differ, and how many rows each has. No collective changes what it is given: it can be
carried out again, among fewer members.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket.comm.algorithm_choice import Choice, Pick
from hocket.comm.algorithms.collective_algorithm import Bounds, pieces
from hocket.comm.algorithms.collective_algorithm import gather as gather_parts
from hocket.comm.algorithms.collective_algorithm import scatter as scatter_parts
from hocket.comm.communicator import describe
from hocket.comm.kernels import NARROW
from hocket.errors import MismatchError, WorkerLost
from hocket.transport.gate import disagreement
from hocket.transport.point_to_point import PointToPoint

_MESSAGE = 512  # bytes of the first message
_HEAD = struct.Struct("<8sqHH?")  # signature, number, the lengths of two texts that follow, whether links are known
_MOST = _MESSAGE - _HEAD.size
_DIGITS = 3  # binary digits of a number of bytes for which an algorithm is picked: scripts have tensors of many sizes
_NO_ROWS = -1  # the number of rows of a tensor without dimensions


class Said(NamedTuple):
    """What a member has said at the beginning of a collective."""

    number: int
    detail: str


class Gone(WorkerLost):
    """A collective is not possible any more, since a worker is gone."""


class Party:
    """The members that carry out a collective together, as one of them sees them.

    Args:
        links: Messages between them.
        ranks: The rank in the job of each member.
        call: The script's call, for messages; empty if the members make different ones.
        numbers: The number of each member: the rank that it had when the job began.
        choice: Picks algorithms; what it knows of the links counts if all members know them.
    """

    def __init__(
        self,
        links: PointToPoint,
        ranks: Sequence[int],
        call: str,
        numbers: Sequence[int],
        choice: Choice | None = None,
    ) -> None:
        self.links, self.ranks, self._call, self._numbers = links, ranks, call, numbers
        self.me, self.size = links.rank, links.size
        self._choice, self._all_know = choice or Choice("auto", links.size), False

    @property
    def others(self) -> list[int]:
        """The other members, the next one first."""
        return [(self.me + distance) % self.size for distance in range(1, self.size)]

    def find(self, number: int) -> int:
        """Which of the members has this number.

        Raises:
            Gone: none, any more.
        """
        if number not in self._numbers:
            raise Gone(
                f"{self._call or 'a message'}: worker {number} is gone, without whom rank {self.ranks[self.me]} cannot "
                "make this call; catch WorkerLost, and use hocket.on_change to hear who is left"
            )
        return self._numbers.index(number)

    def agree(self, what: str, numbers: Sequence[int] = (), detail: str = "") -> list[Said]:
        """Compare what the members came for; returns what each has said.

        Args:
            what: What this member came for: the same words on all.
            numbers: A number for each member.
            detail: What all are told beside.

        Raises:
            MismatchError: the members did not come for the same; on all of them.
        """
        what = f"{self._call}: {what}" if self._call else what
        signature, more = hashlib.blake2b(what.encode(), digest_size=8).digest(), detail.encode()
        assert len(more) <= _MOST, detail
        text = what.encode()[: _MOST - len(more)]
        own, knows = list(numbers) or [0] * self.size, self._choice.model is not None
        all_know = knows
        for other in self.others:
            message = _HEAD.pack(signature, own[other], len(more), len(text), knows) + more + text
            self.links.send(other, torch.frombuffer(bytearray(message.ljust(_MESSAGE, b"\0")), dtype=torch.uint8))
        heard: dict[int, bytes] = {}
        for other in self.others:
            row = torch.empty(_MESSAGE, dtype=torch.uint8)
            self.links.receive(other, row)
            heard[other] = bytes(row.tolist())
        said, texts, signatures = [Said(own[self.me], detail)] * self.size, {what: [self.ranks[self.me]]}, {signature}
        for other, row_ in sorted(heard.items()):
            theirs, number, length, rest, knows = _HEAD.unpack_from(row_)
            all_know = all_know and knows
            end = _HEAD.size + length
            said[other] = Said(number, row_[_HEAD.size : end].decode())
            words = what if theirs == signature else row_[end : end + rest].decode(errors="replace")
            texts.setdefault(words, []).append(self.ranks[other])
            signatures.add(theirs)
        if len(signatures) > 1:
            in_order = sorted(texts.items(), key=lambda item: min(item[1]))
            raise disagreement({text: sorted(who) for text, who in in_order})
        self._all_know = all_know
        return said

    def choose(self, data: torch.Tensor, *, in_slices: bool = False) -> Pick:
        """How a collective on so much data is carried out, once the members have agreed; see ``Choice``."""
        shift = max(data.nbytes.bit_length() - _DIGITS, 0)
        return self._choice.pick(data.nbytes >> shift << shift, in_slices=in_slices, knows=self._all_know)


def allreduce(party: Party, tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """The result over all members."""
    party.agree(f"allreduce of {describe(tensor)}, {operation}")
    wide = _widen(tensor)
    party.choose(wide).allreduce(party.links, wide, _plain(operation))
    return _finish(wide, tensor.dtype, operation, party.size).view(tensor.shape)


def reduce(party: Party, tensor: torch.Tensor, operation: str, root: int) -> torch.Tensor | None:
    """The result over all members, on ``root``; None on others."""
    party.agree(f"reduce of {describe(tensor)}, {operation}, to rank {party.ranks[root]}")
    wide = _widen(tensor)
    party.choose(wide).reduce(party.links, wide, _plain(operation), root)
    return _finish(wide, tensor.dtype, operation, party.size).view(tensor.shape) if party.me == root else None


def broadcast(party: Party, tensor: torch.Tensor, root: int) -> torch.Tensor:
    """The tensor of ``root``."""
    party.agree(f"broadcast of {describe(tensor)} from rank {party.ranks[root]}")
    result = tensor.clone() if party.me == root else torch.empty_like(tensor)
    raw = _bytes(result)
    party.choose(raw).broadcast(party.links, raw, root)
    return result


def allgather(party: Party, tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all members, of one shape, stacked."""
    party.agree(f"allgather of {describe(tensor)}")
    return _collect(party, tensor, [tensor.numel()] * party.size).view(party.size, *tensor.shape)


def allgather_rows(party: Party, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all members, one after the other."""
    rows = _agree_on_rows(party, "allgather_rows", tensor)
    each = _count(tensor.shape[1:])
    return _collect(party, tensor, [count * each for count in rows]).view(sum(rows), *tensor.shape[1:])


def gather(party: Party, tensor: torch.Tensor, root: int) -> list[torch.Tensor] | None:
    """The tensors of all members, on ``root``, whose numbers of rows may differ; None on others."""
    rows = _agree_on_rows(party, f"gather to rank {party.ranks[root]}", tensor)
    if party.me != root:
        gather_parts(party.links, [_bytes(tensor)] * party.size, root)
        return None
    parts = [torch.empty(_shape(count, tensor.shape), dtype=tensor.dtype) for count in rows]
    parts[root] = tensor.clone()
    gather_parts(party.links, [_bytes(part) for part in parts], root)
    return parts


def scatter(party: Party, tensors: Sequence[torch.Tensor] | None, root: int) -> torch.Tensor:
    """This member's one of the ``tensors`` of ``root``, which need not be given on others."""
    numbers, detail = [0] * party.size, ""
    if tensors is not None:
        numbers, detail = [_rows(tensor) for tensor in tensors], _detail(tensors[0])
    number, detail = party.agree(f"scatter from rank {party.ranks[root]}", numbers, detail)[root]
    dtype, shape = _read(detail)
    mine = torch.empty(_shape(number, shape), dtype=dtype) if tensors is None else tensors[root].clone()
    scatter_parts(party.links, [_bytes(part) for part in tensors or [mine] * party.size], root)
    return mine


def reduce_scatter(party: Party, tensor: torch.Tensor, operation: str, rows: Sequence[int]) -> torch.Tensor:
    """This member's rows of the result; ``rows`` has the number of rows of each member."""
    party.agree(f"reduce_scatter of {describe(tensor)}, {operation}, into rows {list(rows)}")
    wide, each = _widen(tensor), _count(tensor.shape[1:])
    bounds = _bounds([count * each for count in rows])
    party.choose(wide, in_slices=True).reduce_scatter(party.links, wide, _plain(operation), bounds)
    start, end = bounds[party.me]
    mine = wide[start:end].clone()
    return _finish(mine, tensor.dtype, operation, party.size).view(rows[party.me], *tensor.shape[1:])


def alltoall(party: Party, tensor: torch.Tensor, splits: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The rows that all members have for this one, and how many each had; ``splits`` says how many go to each."""
    said = party.agree(f"alltoall of {_describe_rows(tensor)}", splits)
    received = [each.number for each in said]
    result = torch.empty(sum(received), *tensor.shape[1:], dtype=tensor.dtype)
    mine, theirs = list(tensor.split(list(splits))), list(result.split(received))
    theirs[party.me].copy_(mine[party.me])
    for other in party.others:
        for piece in pieces(_bytes(mine[other])):
            party.links.send(other, piece)
    for other in reversed(party.others):
        for piece in pieces(_bytes(theirs[other])):
            party.links.receive(other, piece)
    return result, received


def barrier(party: Party) -> None:
    """Wait until all members are here."""
    party.agree("a barrier")


def send(party: Party, tensor: torch.Tensor) -> None:
    """Send a tensor to the other of two members, which receives it now."""
    other = 1 - party.me
    said = party.agree(_message(party, party.me), detail=_detail(tensor))[other]
    _compare(party, _detail(tensor), said.detail, party.me)
    for piece in pieces(_bytes(tensor)):
        party.links.send(other, piece)


def receive(party: Party, like: torch.Tensor | None) -> torch.Tensor:
    """What the other of two members sends now; it must be ``like`` a tensor, if one is given."""
    other = 1 - party.me
    expected = "" if like is None else _detail(like)
    said = party.agree(_message(party, other), detail=expected)[other]
    _compare(party, said.detail, expected, other)
    dtype, shape = _read(said.detail)
    result = torch.empty(shape, dtype=dtype)
    for piece in pieces(_bytes(result)):
        party.links.receive(other, piece)
    return result


def _message(party: Party, source: int) -> str:
    return f"a message from rank {party.ranks[source]} to rank {party.ranks[1 - source]}"


def _compare(party: Party, sent: str, expected: str, source: int) -> None:
    """Raise, on both members, if what is sent does not fit what is expected."""
    if expected and sent != expected:
        raise MismatchError(
            f"rank {party.ranks[source]} sends {sent}, and rank {party.ranks[1 - source]} receives it into {expected}: "
            "they must be equal"
        )


def _collect(party: Party, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The elements of all members, one after the other."""
    whole, size = tensor.new_empty(sum(counts)), tensor.dtype.itemsize
    start, end = _bounds(counts)[party.me]
    whole[start:end] = tensor.view(-1)
    raw = _bytes(whole)
    pick = party.choose(raw[: max(counts) * size], in_slices=True)
    pick.allgather(party.links, raw, _bounds([count * size for count in counts]))
    return whole


def _agree_on_rows(party: Party, what: str, tensor: torch.Tensor) -> list[int]:
    """How many rows each member has."""
    said = party.agree(f"{what} of {_describe_rows(tensor)}", [_rows(tensor)] * party.size)
    return [each.number for each in said]


def _describe_rows(tensor: torch.Tensor) -> str:
    """Type and shape, but for the number of rows."""
    sizes = ["*", *map(str, tensor.shape[1:])] if tensor.dim() else []
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _detail(tensor: torch.Tensor) -> str:
    return describe(tensor)


def _read(detail: str) -> tuple[torch.dtype, list[int]]:
    """Type and shape from their description by another member."""
    name, _, sizes = detail.removesuffix("]").partition("[")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MismatchError(f"another member sends {detail!r}, which this one does not know")
    return dtype, [int(size) for size in sizes.split(",") if size.strip()]


def _rows(tensor: torch.Tensor) -> int:
    return len(tensor) if tensor.dim() else _NO_ROWS


def _shape(rows: int, like: Sequence[int]) -> list[int]:
    return [] if rows == _NO_ROWS else [rows, *like[1:]]


def _count(shape: Sequence[int]) -> int:
    """How many elements a tensor of this shape has."""
    count = 1
    for size in shape:
        count *= size
    return count


def _bounds(counts: Sequence[int]) -> Bounds:
    found, start = [], 0
    for count in counts:
        found.append((start, start + count))
        start += count
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy; of a type of less than 32 bits in float32."""
    flat = tensor.view(-1)
    return flat.float() if flat.dtype in NARROW else flat.clone()


def _plain(operation: str) -> str:
    return "sum" if operation == "mean" else operation


def _finish(wide: torch.Tensor, dtype: torch.dtype, operation: str, size: int) -> torch.Tensor:
    return (wide.div_(size) if operation == "mean" else wide).to(dtype)
