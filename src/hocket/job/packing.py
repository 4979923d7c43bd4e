"""Plain data with tensors in it becomes JSON beside tensors, and comes back as it was; nothing is pickled.

What JSON does not have (tuples, keys that are no text, NaN, tensors …) is a dictionary with one key, a ``$`` first.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hocket.errors import UsageError

Json = Any


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """``value`` as JSON; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises:
        UsageError: something in it is neither plain data nor a tensor.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _keep(value.detach(), name, tensors)}
    if isinstance(value, Mapping):
        return _pack_mapping(value, name, tensors)
    if type(value) is deque:
        return {"$deque": [[pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)], value.maxlen]}
    if type(value) is list or type(value) in _SEQUENCES:
        items = [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {_SEQUENCES[type(value)]: items}
    for kind, (tag, write, _) in _LEAVES.items():
        if type(value) is kind:
            return {tag: write(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        if getattr(value, "ndim", 0) == 0:
            return pack(value.item(), name, tensors)
        if value.dtype.kind in "biufc":
            native = value.astype(value.dtype.newbyteorder("="), order="C")
            return {"$array": _keep(torch.from_numpy(native), name, tensors)}
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: numbers, texts, "
        "lists, tuples, dictionaries, tensors and arrays can"
    )


def unpack(value: Json, tensors: Callable[[str], torch.Tensor]) -> Any:
    """What ``pack`` was given; ``tensors`` finds a tensor by its name."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: unpack(item, tensors) for key, item in value.items()}
    ((tag, inner),) = value.items()
    if tag == "$tensor":
        return tensors(inner)
    if tag == "$array":
        return tensors(inner).numpy()
    if tag == "$dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in inner}
    if tag == "$counter":
        return Counter({unpack(key, tensors): number for key, number in inner})
    if tag == "$deque":
        return deque((unpack(item, tensors) for item in inner[0]), inner[1])
    if tag in _BY_TAG:
        return _BY_TAG[tag]([unpack(item, tensors) for item in inner])
    return _READERS[tag](inner)


def references(value: Json) -> Iterator[str]:
    """The names of the tensors that ``unpack`` will ask for."""
    if isinstance(value, dict):
        if len(value) == 1 and not value.keys().isdisjoint(("$tensor", "$array")):
            yield from value.values()
            return
        value = value.values()
    elif not isinstance(value, list):
        return
    for item in value:
        yield from references(item)


def _keep(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    while name in tensors:  # {"a.b": …, "a": {"b": …}} leads to one name twice
        name += "'"
    tensors[name] = tensor
    return name


def _pack_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if type(value) is Counter:
        return {"$counter": [[pack(key, name, tensors), number] for key, number in value.items()]}
    if type(value) not in (dict, OrderedDict, defaultdict):
        raise UsageError(f"{name} is a {type(value).__qualname__}, which cannot be stored: make it a plain dictionary")
    plain = all(isinstance(key, str) for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
    if plain:
        return {key: pack(item, f"{name}.{key}", tensors) for key, item in value.items()}
    pairs = [[pack(key, name, tensors), pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]
    return {"$dict": pairs}


_SEQUENCES: dict[type, str] = {
    torch.Size: "$size", tuple: "$tuple", set: "$set", frozenset: "$frozenset",
}  # fmt: skip
_BY_TAG: dict[str, Callable[[list[Any]], Any]] = {
    "$size": torch.Size, "$tuple": tuple, "$set": set, "$frozenset": frozenset,
}  # fmt: skip
_LEAVES: dict[type, tuple[str, Callable[[Any], Json], Callable[[Json], Any]]] = {
    float: ("$float", repr, float),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    complex: ("$complex", repr, complex),
    torch.dtype: ("$dtype", lambda d: str(d).removeprefix("torch."), lambda text: getattr(torch, text)),
    torch.device: ("$device", str, torch.device),
}
_READERS = {tag: read for tag, _, read in _LEAVES.values()}


Text = str
"""A JSON document."""


@dataclass(frozen=True)
class _Known:
    looks: list[Any]
    text: Text
    names: list[str]


class Packer:
    """Packs the same things again and again: what looks as it did last time is not built anew.

    A checkpoint of a model of many small tensors costs more in names and JSON than in bytes, and from one checkpoint
    to the next nothing of that changes but a few numbers.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.is_news = True  # whether a tensor that was packed since this was cleared differs from last time

    def pack(self, value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Text:
        """Like ``packing.pack``, with the JSON as text."""
        looks: list[Any] = []
        found: list[torch.Tensor] = []
        plain = _look(value, looks, found)
        known = self._known.get(name)
        if plain and known is not None and known.looks == looks and not tensors.keys() & known.names:
            tensors.update(zip(known.names, found, strict=True))
            return known.text
        self.is_news |= bool(found) or not plain
        before = len(tensors)
        text = write(pack(value, name, tensors))
        if plain:
            self._known[name] = _Known(looks, text, list(tensors)[before:])
        return text

    def pack_each(self, value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Text:
        """Like ``pack``, for a dictionary some of whose entries change every time."""
        if type(value) is not dict or len(value) < 2 or not all(type(key) is str for key in value):
            return self.pack(value, name, tensors)
        return join({key: self.pack(item, f"{name}.{key}", tensors) for key, item in value.items()})


def join(entries: Mapping[str, Text]) -> Text:
    """The JSON of a dictionary from that of its values."""
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in entries.items()) + "}"


def write(value: Any) -> Text:
    """``value`` as compact JSON."""
    return json.dumps(value, separators=(",", ":"))


_DICTIONARIES = (dict, OrderedDict, defaultdict)
_SCALARS = (int, float, str, bool, type(None))


def _look(value: Any, looks: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Note all that can be compared in ``value``; False if something in it cannot be compared so simply."""
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        tensors.append(value)
        looks.append((value.dtype, value.shape))
        return True
    if kind in _SCALARS:
        looks.append((kind, value))  # 1, 1.0 and True are equal, and are written differently
        return True
    inner: Iterable[Any]
    if kind in _DICTIONARIES:
        looks.append((dict, *value))
        inner = value.values()
    elif kind is list or kind is tuple:
        looks.append((kind, len(value)))
        inner = value
    else:
        return False
    return all(_look(item, looks, tensors) for item in inner)
