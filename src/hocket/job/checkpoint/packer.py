"""Packs the same things again and again: what looks as it did last time is not built anew.

A checkpoint of a model of many small tensors costs more in names and JSON than in bytes, and from one to the next
nothing of that changes but a few numbers.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hocket.job.packing import pack

Text = str
"""A JSON document."""


@dataclass(frozen=True)
class _Known:
    looks: list[Any]
    text: Text
    names: list[str]


class Packer:
    """Remembers, by name, what things looked like and what became of them."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.is_news = True  # some tensor that was packed since this was cleared is not as last time

    def pack(self, value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Text:
        """As ``packing.pack``, written out."""
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
        """The same for a dictionary some of whose entries change every time."""
        if type(value) is not dict or len(value) < 2 or not all(type(key) is str for key in value):
            return self.pack(value, name, tensors)
        return join({key: self.pack(item, f"{name}.{key}", tensors) for key, item in value.items()})


def join(entries: Mapping[str, Text]) -> Text:
    """The JSON of a dictionary from that of its values."""
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in entries.items()) + "}"


def write(value: Any) -> Text:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":"))


_DICTIONARIES = (dict, OrderedDict, defaultdict)
_SCALARS = (int, float, str, bool, type(None))


def _look(value: Any, looks: list[Any], tensors: list[torch.Tensor]) -> bool:
    """Note all there is to see in ``value``; False if it has something in it that cannot be compared so simply."""
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
