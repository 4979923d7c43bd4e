"""How a strategy or a codec is written: ``name(key=value, …)``; strategies one after the other ``a -> b @ epoch 3``."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from hocket.errors import StrategyError
from hocket.specs import registry
from hocket.specs.codecs import CODECS, CodecSpec
from hocket.specs.spec import Spec
from hocket.specs.switch import Switch

S = TypeVar("S", Spec, CodecSpec)


class _Kinds(NamedTuple, Generic[S]):
    """What can be written: what it is called, how one is found by its name, and all of them."""

    word: str
    find: Callable[[str], type[S] | None]
    everything: Callable[[], Mapping[str, type[S]]]


_STRATEGIES = _Kinds[Spec]("strategy", registry.find, registry.everything)
_CODECS = _Kinds[CodecSpec]("codec", CODECS.get, lambda: CODECS)


def parse_codec(text: str) -> CodecSpec:
    """Read ``name`` or ``name(key=value, …)``; values are literals and nothing is evaluated."""
    return _parse_one(text, _CODECS)


def parse(text: str) -> Spec:
    """Read ``name``, ``name(key=value, …)`` or several with ``->``; values are literals and nothing is evaluated."""
    first, *others = text.split("->")
    return _parse_switch(first, others) if others else _parse_one(text, _STRATEGIES)


def _parse_switch(first: str, others: list[str]) -> Switch:
    strategies, at = [_parse_one(first, _STRATEGIES)], []
    for other in others:
        name, said, when = other.partition("@")
        if not said:
            raise StrategyError(f"strategy '-> {name.strip()}': say when, for example '-> {name.strip()} @ epoch 3'")
        strategies.append(_parse_one(name, _STRATEGIES))
        at.append(" ".join(when.split()))
    for spec in strategies:
        if not spec.keeps_replicas:
            known = ", ".join(name for name, kind in registry.everything().items() if kind().keeps_replicas)
            raise StrategyError(
                f"strategy {write(spec)!r} cannot be switched to or from: those that can, because all workers have "
                f"replicas and the same batches, are {known}"
            )
        if isinstance(spec.resolve(2, 0), Switch):
            raise StrategyError(f"strategy {write(spec)!r}: leave out after=, and say 'mirrored -> local_sgd @ …'")
    switch = Switch(tuple(strategies), tuple(at))
    try:
        switch.check()
    except ValueError as error:
        raise StrategyError(f"strategy {write(switch)!r}: {error}") from None
    return switch


def _parse_one(text: str, kinds: _Kinds[S]) -> S:
    word = kinds.word
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _cannot_read(text, kinds) from None
    call = node if isinstance(node, ast.Call) else None
    name = call.func if call else node
    if not isinstance(name, ast.Name):
        raise _cannot_read(text, kinds)
    kind = kinds.find(name.id)
    if kind is None:
        raise StrategyError(f"unknown {word} {name.id!r}: {_known(kinds)}")
    options: dict[str, object] = {}
    for key, node in _arguments(text, call, kind, kinds):
        try:
            options[key] = ast.literal_eval(node)
        except ValueError:
            raise StrategyError(
                f"{word} {name.id!r}: the value of {key!r} is no literal: write for example {_examples(kind, key)}"
            ) from None
    return _build(word, name.id, kind, options)


def _cannot_read(text: str, kinds: _Kinds[S]) -> StrategyError:
    return StrategyError(f"cannot read {kinds.word} {text!r}: write name or name(key=value, …), {_known(kinds)}")


def _arguments(text: str, call: ast.Call | None, kind: type[S], kinds: _Kinds[S]) -> list[tuple[str, ast.expr]]:
    """Options by name; the kind's own first number may be given without: ``softsync(4)``."""
    if call is None:
        return []
    found: list[tuple[str, ast.expr]] = []
    own = [name for name in vars(kind).get("__annotations__", {}) if bool not in _types(kind, name)]
    if len(call.args) > min(1, len(own)):
        raise _cannot_read(text, kinds)
    found += zip(own, call.args, strict=False)
    for keyword in call.keywords:
        if keyword.arg is None:
            raise StrategyError(f"cannot read {kinds.word} {text!r}: ** is not possible, write key=value")
        found.append((keyword.arg, keyword.value))
    return found


def write(spec: Spec | CodecSpec) -> str:
    """The text from which ``parse`` makes ``spec``; options at their defaults are left out."""
    if isinstance(spec, Switch):
        texts = [write(each) for each in spec.strategies]
        later = itertools.zip_longest(texts[1:], spec.at, fillvalue="")
        return " -> ".join([*texts[:1], *(f"{text} @ {at}" for text, at in later)])
    if not isinstance(spec, Spec | CodecSpec):
        raise StrategyError(f"{spec!r} is no choice of a strategy: give one, for example LocalSGD(period=4)")
    options = [
        f"{field.name}={getattr(spec, field.name)!r}"
        for field in dataclasses.fields(spec)
        if getattr(spec, field.name) != field.default
    ]
    return f"{spec.name}({', '.join(options)})" if options else spec.name


def _build(word: str, name: str, kind: type[S], options: dict[str, Any]) -> S:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in options.items():
        if key not in fields:
            takes = f"it takes {', '.join(fields)}" if fields else "it takes no options"
            raise StrategyError(f"{word} {name!r} has no option {key!r}: {takes}")
        allowed = _types(kind, key)
        if float in allowed and type(value) is int:
            options[key] = float(value)
        elif type(value) not in allowed:
            words = " or ".join("None" if each is types.NoneType else f"a {each.__name__}" for each in allowed)
            example = fields[key].default if fields[key].default is not None else _EXAMPLES[allowed[0]]
            raise StrategyError(f"{word} {name!r}: {key}={value!r} must be {words}, for example {key}={example!r}")
    spec = kind(**options)
    try:
        spec.check()
    except ValueError as error:
        raise StrategyError(f"{word} {name!r}: {error}") from None
    return spec


def _examples(kind: type[Spec] | type[CodecSpec], key: str) -> str:
    default = next((field.default for field in dataclasses.fields(kind) if field.name == key), None)
    return f"{key}={default!r}" if isinstance(default, str) else f"{key}=True or {key}=0.5"


_EXAMPLES: dict[type, object] = {float: 1.0, int: 3, str: "text"}


def _types(kind: type[Spec] | type[CodecSpec], key: str) -> tuple[type, ...]:
    hint = typing.get_type_hints(kind)[key]
    return typing.get_args(hint) or (hint,)


def _known(kinds: _Kinds[S]) -> str:
    def signature(name: str, kind: type[S]) -> str:
        own = vars(kind).get("__annotations__", {})
        fields = [field for field in dataclasses.fields(kind) if field.name in own]
        options = ", ".join(f"{field.name}={field.metadata.get('example', field.default)!r}" for field in fields)
        return f"{name}({options})" if options else name

    return "the choices are " + ", ".join(signature(*item) for item in kinds.everything().items())
