"""Shows findings: a line for each, remedies beneath, and a last line that counts; or all of it as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hocket.launch.doctor import pairs
from hocket.launch.doctor.finding import Finding, State, count
from hocket.launch.doctor.pairs import Way

_MARKS: dict[State, str] = {"ok": "✓", "note": "•", "wrong": "✗"}
_WORDS: dict[State, str] = {"ok": "ok", "note": "note", "wrong": "WRONG"}
_PLAIN = str.maketrans({"→": "->", "µ": "u", "–": "-", "±": "+-", "×": "x", "…": "..."})


def text(findings: Sequence[Finding], ways: Sequence[Way], encoding: str | None) -> str:
    """The report for people, in characters that ``encoding`` has."""
    try:
        "✓•✗→µ–±×…".encode(encoding or "ascii")
        marks, table = _MARKS, {}
    except (UnicodeError, LookupError):
        marks, table = _WORDS, _PLAIN
    wide = max(map(len, marks.values()))
    hosts = max((len(found.host) for found in findings), default=0)
    names = max((len(found.name) for found in findings), default=0)
    lines = []
    for found in findings:
        host = f"{found.host:<{hosts}}  " if hosts else ""
        lines.append(f"{marks[found.state]:<{wide}}  {host}{found.name:<{names}}  {found.seen}".rstrip())
        if found.remedy:
            lines.append(f"{'':{wide}}    → {found.remedy}")
    measured = pairs.matrix(ways)
    lines += ["", *measured] if measured else []
    lines += ["", closing(findings)]
    return "\n".join(lines).translate(table)


def closing(findings: Sequence[Finding]) -> str:
    """How many things are wrong or worth a look, in a sentence."""
    wrong, notes = count(findings, "wrong"), count(findings, "note")
    if not wrong and not notes:
        return "All is well."
    first = f"{wrong} thing{' is' if wrong == 1 else 's are'} wrong" if wrong else "Nothing is wrong"
    if not notes:
        return f"{first}."
    things = "" if wrong else f" thing{'' if notes == 1 else 's'}"
    return f"{first}, {notes}{things} {'is' if notes == 1 else 'are'} worth a look."


def data(findings: Sequence[Finding], ways: Sequence[Way]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "wrong": count(findings, "wrong"),
        "notes": count(findings, "note"),
        "findings": [found.plain() for found in findings],
        "pairs": [way.plain() for way in ways],
    }
