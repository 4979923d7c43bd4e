"""Finds the source of functions and classes in their file or notebook cell, and makes them again from it.

A definition is compiled as it stands in its file, so that tracebacks show the user's own lines and numbers.
"""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

MAKE = "_hocket_make"  # the function around a definition that uses variables of an enclosing function
VALUE = "_hocket_value"
_FUTURE = annotations.compiler_flag
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF")
_AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", MAKE)

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class SourcePlace:
    """Where a definition stands."""

    file: str
    line: int
    column: int


def read(file: str, namespace: dict[str, object] | None = None) -> str:
    """The text of a file or notebook cell, or nothing."""
    return "".join(linecache.getlines(file, namespace))


def find(text: str, place: SourcePlace) -> Node:
    """The definition that stands at ``place``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Node) and (node.lineno, node.col_offset) == (place.line, place.column):
            return node
    raise AssertionError(f"no definition at {place}")


def locate(value: FunctionType | type) -> SourcePlace | None:
    """Where ``value`` was defined, or None where no source can be found."""
    return _locate_class(value) if isinstance(value, type) else _locate_function(value)


def compiled(
    text: str, place: SourcePlace, free: list[str], *, decorated: bool = True, given: frozenset[str] = frozenset()
) -> CodeType:
    """The code that makes the definition again, under its own name (a lambda: under ``VALUE``).

    Args:
        text: The whole file or cell.
        place: Where in the text the definition stands.
        free: Variables of an enclosing function. With any, the code makes a function ``MAKE`` that takes them and
            returns the definition, and another function that sets them.
        decorated: Whether decorators are applied again.
        given: Parameters of which the caller sets the defaults.
    """
    node = find(text, place)
    if not decorated and not isinstance(node, ast.Lambda):
        node.decorator_list = []
    if not isinstance(node, ast.ClassDef):
        _forget_defaults(node.args, given)
    if isinstance(node, ast.Lambda):
        name, statement = VALUE, ast.parse(f"{VALUE} = 0").body[0]
        assert isinstance(statement, ast.Assign)
        statement.value = node
        body: list[ast.stmt] = [statement]
    else:
        name, body = node.name, [node]
    if free:
        names = ", ".join(free)
        fill = f"def _hocket_fill(*_hocket_values):\n  nonlocal {names}\n  {names}, = _hocket_values"
        make = ast.parse(f"def {MAKE}({names}):\n {fill.replace(chr(10), chr(10) + ' ')}\n return {name}, _hocket_fill")
        outer = make.body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body[1:1] = body
        body = [outer]
    module = ast.fix_missing_locations(ast.Module(body, []))
    # Annotations stay texts: many name types that a worker does not need.
    code: CodeType = compile(module, place.file, "exec", flags=_FUTURE, dont_inherit=True)
    return code


def names(code: CodeType, *, now: bool = True) -> Iterator[tuple[str, bool]]:
    """The global names that ``code`` uses, each with whether it is used at definition or only in a call."""
    instructions = list(dis.get_instructions(code))
    own = {i.argval for i in instructions if i.opname == "STORE_NAME"}
    for instruction in instructions:
        if instruction.opname in _LOADS and instruction.argval not in own:
            yield instruction.argval, now
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            at_once = not inner.co_flags & inspect.CO_OPTIMIZED or inner.co_name in _AT_ONCE
            yield from names(inner, now=now and at_once)


def annotation_names(node: Node) -> set[str]:
    """The names that the annotations in ``node`` mention."""
    found: set[str] = set()
    for inner in ast.walk(node):
        annotation = getattr(inner, "returns", None) or getattr(inner, "annotation", None)
        if isinstance(annotation, ast.AST):
            found |= {name.id for name in ast.walk(annotation) if isinstance(name, ast.Name)}
    return found


def attributes(code: CodeType) -> set[str]:
    """All names in ``code``, those after a dot included."""
    return set(code.co_names).union(*(attributes(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _forget_defaults(arguments: ast.arguments, given: frozenset[str]) -> None:
    positional = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    for index, argument in enumerate(positional if arguments.defaults else ()):
        if argument.arg in given:
            arguments.defaults[index] = ast.Constant(None)
    for index, argument in enumerate(arguments.kwonlyargs):
        if argument.arg in given:
            arguments.kw_defaults[index] = ast.Constant(None)


def _nodes(text: str) -> list[Node]:
    try:
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, Node)]
    except (SyntaxError, ValueError):
        return []


def _first_line(node: Node) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _locate_function(value: FunctionType) -> SourcePlace | None:
    code = value.__code__
    text = read(code.co_filename, value.__globals__)
    found = [
        node
        for node in _nodes(text)
        if _first_line(node) == code.co_firstlineno
        and not isinstance(node, ast.ClassDef)
        and (code.co_name == "<lambda>" if isinstance(node, ast.Lambda) else code.co_name == node.name)
    ]
    places = [SourcePlace(code.co_filename, node.lineno, node.col_offset) for node in found]
    if len(places) > 1:  # several lambdas in a line: the one with the same code, or any of those that are equal
        free = list(code.co_freevars)
        places = [p for p in places if any(_same(code, c) for c in _within(compiled(text, p, free)))]
    return places[0] if places else None


def _same(one: CodeType, other: CodeType) -> bool:
    return (one.co_code, one.co_names, one.co_varnames) == (other.co_code, other.co_names, other.co_varnames) and [
        c for c in one.co_consts if not isinstance(c, CodeType)
    ] == [c for c in other.co_consts if not isinstance(c, CodeType)]


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _within(inner)


def _locate_class(value: type) -> SourcePlace | None:
    lines = {(f.__code__.co_filename, f.__code__.co_firstlineno) for f in methods(value)}
    file, line = min(lines, key=lambda pair: pair[1], default=("", getattr(value, "__firstlineno__", 0)))
    own = set(inspect.get_annotations(value))
    for name in [file] if file else _cells(value):
        found = [n for n in _nodes(read(name)) if isinstance(n, ast.ClassDef) and n.name == value.__name__]
        if file:
            found = [n for n in found if n.lineno <= line <= (n.end_lineno or 0)]
        else:  # a class without methods of its own: take the last class of this name with these fields
            found = [n for n in found if own == {getattr(s.target, "id", "") for s in _fields(n)}]
            found = [n for n in found if _first_line(n) == line] or found
        if found:
            return SourcePlace(name, found[-1].lineno, found[-1].col_offset)
    return None


def methods(value: type) -> list[FunctionType]:
    """The functions that stand in the class itself."""
    found = []
    for member in vars(value).values():
        inner = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
        qualified = f"{value.__qualname__}.{getattr(inner, '__name__', '')}"
        if isinstance(inner, FunctionType) and inner.__code__.co_qualname == qualified:
            found.append(inner)
    return found


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]


def _cells(value: type) -> list[str]:
    """Where the source of a class may be: its module's file, or else the cells of the notebook, the last first."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return [file] if file else [name for name in reversed(list(linecache.cache)) if not Path(name).exists()]
