"""What a function needs to run in another process, as plain JSON: references to modules, source and data.

A reference is a dictionary with one key: ``data``, ``module``, ``import``, ``define``, ``attribute`` or ``dataclass``.
The worker reads them. Nothing is pickled: what has neither a name in a module, nor source, nor is plain data is
refused with a line that says what to do instead.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import io
import sys
from collections.abc import Iterator
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

from hocket.errors import UsageError
from hocket.job import packing
from hocket.job.function import source

Reference = dict[str, Any]
_OWN = ("__name__", "__builtins__", "__spec__", "__loader__", "__package__", "__doc__")  # every module has these


class Sender:
    """Collects everything that references lead to."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.files: dict[str, str] = {}
        self.names: dict[str, Reference] = {}  # the global names of __main__ that are used
        self.modules: set[str] = set()  # modules to import because something reaches them through their package
        self.definitions: list[dict[str, Any]] = []
        self._known: dict[int, tuple[int, object]] = {}  # by id; the object is kept so that its id is not used again
        self._needs: list[tuple[set[str], set[str]]] = []  # names that a definition uses at once, and later

    def refer(self, value: Any, what: str, name: str = "") -> Reference:
        """A reference to ``value``.

        Args:
            value: Any object.
            what: What the value is called in an error.
            name: The variable that holds the value, which may also be its name in a module.

        Raises:
            UsageError: the value cannot be sent.
        """
        if isinstance(value, ModuleType):
            if value.__spec__ is None or value.__name__ == "__main__":
                raise UsageError(f"{what} is a module that workers cannot import: put it into a file")
            return {"module": value.__spec__.name}
        if isinstance(value, enum.Enum):
            return {"attribute": [self.refer(type(value), f"the class of {what}"), value.name]}
        if isinstance(value, type) or callable(value):
            return self._refer_callable(value, what, name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            held |= getattr(value, "__dict__", {})
            fields = {key: self.refer(item, f"{what}.{key}") for key, item in held.items()}
            return {"dataclass": [self.refer(type(value), f"the class of {what}"), fields]}
        try:
            return {"data": packing.pack(value, what, self.tensors)}
        except (UsageError, TypeError, RecursionError) as error:
            if (home := _home(value, name)) is not None:
                return {"import": home}
            raise explain(value, what, error) from None

    def order(self) -> list[int]:
        """The definitions in an order in which each has what it needs at once."""
        done: list[int] = []
        begun: set[int] = set()

        def emit(index: int) -> None:
            if index in begun:
                return
            begun.add(index)
            now, later = self._needs[index]
            free = self.definitions[index]["free"].values()
            for inner in [i for ref in (*free, *map(self.names.get, sorted(now))) for i in indices(ref)]:
                emit(inner)
            done.append(index)
            for inner in [i for name in sorted(later) for i in indices(self.names.get(name))]:
                emit(inner)

        for index in range(len(self.definitions)):
            emit(index)
        return done

    def _refer_callable(self, value: Any, what: str, name: str) -> Reference:
        if isinstance(value, MethodType) and not isinstance(value.__self__, (type, ModuleType)):
            raise explain(value, what)
        if (home := _home(value, name)) is not None:
            return {"import": home}
        if id(value) in self._known:
            return {"define": self._known[id(value)][0]}
        parent, _, attribute = getattr(value, "__qualname__", "").rpartition(".")
        if parent and "<" not in parent and value.__module__ == "__main__":
            owner = _get(sys.modules["__main__"], parent)
            if isinstance(owner, type) and getattr(owner, attribute, None) == value:
                return {"attribute": [self.refer(owner, f"the class of {what}"), attribute]}
        if isinstance(value, (type, FunctionType)) or isinstance(inspect.unwrap(value), FunctionType):
            return self._define(value, what)
        raise explain(value, what)

    def _define(self, value: Any, what: str) -> Reference:
        inner, decorated = value, isinstance(value, type)
        if not decorated:
            inner, decorated = _undecorated(value)
        place = source.locate(inner) if isinstance(inner, (type, FunctionType)) else None
        if place is None:
            raise explain(value, what)
        index = len(self.definitions)
        self._known[id(value)] = (index, value)
        text = self.files[place.file] = source.read(place.file, getattr(inner, "__globals__", None))
        entry: dict[str, Any] = {
            "module": inner.__module__, "place": dataclasses.astuple(place), "qualname": inner.__qualname__,
            "decorated": decorated, "free": {}, "defaults": {},
        }  # fmt: skip
        self.definitions.append(entry)
        self._needs.append((set(), set()))
        label = f"{inner.__name__}()" if not isinstance(inner, type) else f"class {inner.__name__}"
        for name, cell in _closure(inner):
            entry["free"][name] = self.refer(cell, f"the variable {name!r} around {label}", name)
        if isinstance(inner, FunctionType):
            entry["defaults"] = self._defaults(inner, label)
        code = source.compiled(
            text, place, list(entry["free"]), decorated=decorated, given=frozenset(entry["defaults"])
        )
        if inner.__module__ == "__main__":
            self._take_names(index, code, label)
            for name in source.annotation_names(source.find(text, place)):
                self._take_if_possible(name)
        return {"define": index}

    def _defaults(self, function: FunctionType, label: str) -> dict[str, Reference]:
        """The values of defaults as they are now; where one cannot be sent, its expression is evaluated again."""
        found = {}
        for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
            if parameter.default is parameter.empty:
                continue
            default = self._try(parameter.default, f"the default of {name!r} of {label}", name)
            if default is not None:
                found[name] = default
        return found

    def _try(self, value: Any, what: str, name: str) -> Reference | None:
        """A reference, or None where there can be none; then nothing of the attempt remains."""
        count, names = len(self.definitions), dict(self.names)
        try:
            return self.refer(value, what, name)
        except UsageError:
            del self.definitions[count:], self._needs[count:]
            self.names = names
            self._known = {key: known for key, known in self._known.items() if known[0] < count}
            return None

    def _take_names(self, index: int, code: CodeType, label: str) -> None:
        scope = vars(sys.modules["__main__"])
        after_dots = source.attributes(code)
        for name, now in source.names(code):
            if name not in scope or name in _OWN:
                continue
            self._needs[index][0 if now else 1].add(name)
            if name not in self.names:
                self.names[name] = {}  # the value is being looked at, and may use itself
                self.names[name] = self.refer(scope[name], f"the global {name!r} that {label} uses", name)
            if isinstance(scope[name], ModuleType):
                prefix = f"{scope[name].__name__}."
                below = [full for full in list(sys.modules) if full.startswith(prefix)]
                self.modules |= {full for full in below if set(full[len(prefix) :].split(".")) <= after_dots}

    def _take_if_possible(self, name: str) -> None:
        scope = vars(sys.modules["__main__"])
        if name not in scope or name in self.names:
            return
        reference = self._try(scope[name], name, name)
        if reference is not None:
            self.names[name] = reference


def indices(reference: Reference | None) -> Iterator[int]:
    """The definitions that must be there before ``reference`` has a value."""
    for kind, content in (reference or {}).items():
        if kind == "define":
            yield content
        elif kind == "attribute":
            yield from indices(content[0])
        elif kind == "dataclass":
            yield from indices(content[0])
            for inner in content[1].values():
                yield from indices(inner)


def _home(value: Any, name: str) -> list[str] | None:
    """The module and the name in it under which every process finds ``value``, if there are such."""
    module = getattr(value, "__module__", None)
    for candidate in (getattr(value, "__qualname__", ""), getattr(value, "__name__", ""), name):
        if isinstance(candidate, str) and candidate and isinstance(module, str) and _holds(module, candidate, value):
            return [module, candidate]
    if name:  # the module that an object says, or does not, is not always where it was imported from
        for other in sorted(sys.modules, key=len):
            if _holds(other, name, value):
                return [other, name]
    return None


def _holds(module: str, name: str, value: Any) -> bool:
    home = sys.modules.get(module)
    if not isinstance(home, ModuleType) or module in ("__main__", "__mp_main__") or home.__spec__ is None:
        return False
    if "." not in name:  # asking a lazy module for an attribute would have it load things
        return vars(home).get(name) is value
    return bool(_get(home, name) == value)


def _get(owner: Any, name: str) -> Any:
    try:
        return attrgetter(name)(owner)
    except AttributeError:
        return None


def _undecorated(value: Any) -> tuple[Any, bool]:
    """The function to make again, and whether its decorators turn that into ``value``."""
    inner = inspect.unwrap(value)
    if inner is value or not isinstance(inner, FunctionType):
        return value, False
    is_nested = "<locals>" in inner.__qualname__
    named = is_nested or _get(sys.modules.get(inner.__module__), inner.__qualname__) is value
    place = source.locate(inner) if named else None
    node = source.find(source.read(place.file, inner.__globals__), place) if place else None
    if getattr(node, "decorator_list", None):
        return inner, True
    return value, False


def _closure(value: Any) -> list[tuple[str, Any]]:
    """The variables of enclosing functions, with their values."""
    found: dict[str, Any] = {}
    for function in source.methods(value) if isinstance(value, type) else [value]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not set yet
                continue
    return [(name, content) for name, content in found.items() if name != "__class__"]


def explain(value: Any, what: str, error: Exception | None = None) -> UsageError:
    """The error for ``value``; ``error`` is what packing it as plain data has raised."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, (FunctionType, type)):
        of = "class" if isinstance(value, type) else "lambda" if value.__name__ == "<lambda>" else "function"
        return UsageError(
            f"{what} is a {of} without source that can be found (made with exec, at a plain prompt, or changed "
            f"since): put the {of} into a module and import it"
        )
    if isinstance(value, MethodType):
        kind = f"bound method of a live {type(value.__self__).__qualname__}"
        remedy = "write a function that makes the object and calls the method"
    elif isinstance(value, nn.Module):
        kind, remedy = f"model ({kind})", "build the model inside the function, or pass its state_dict() as an argument"
    elif isinstance(value, optim.Optimizer):
        kind, remedy = f"optimizer ({kind})", "build it inside the function"
    elif isinstance(value, (DataLoader, Dataset)):
        remedy = "build it inside the function, or pass its tensors as arguments"
    elif isinstance(value, io.IOBase):
        kind, remedy = f"open file ({kind})", "open it inside the function, and pass its path as an argument"
    elif isinstance(value, Iterator):
        remedy = "make it a list, or build it inside the function"
    elif isinstance(value, (list, tuple, dict, set, frozenset)) and error is not None:
        text = f"{what} holds itself" if isinstance(error, RecursionError) else str(error)
        return UsageError(f"{text}; build the rest inside the function")
    else:
        remedy = "build it inside the function, or pass the plain data that it is made of as an argument"
    article = "an" if kind[0] in "aeiou" else "a"
    return UsageError(f"{what} is {article} {kind}, which cannot be sent to workers: {remedy}")
