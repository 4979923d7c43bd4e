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
    findings = merged(findings)
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


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """What is the same on several hosts as one finding, with the names of all; host by host, then what is between."""
    known = list(dict.fromkeys(found.host for found in findings if found.host))
    same: dict[Finding, list[str]] = {}
    for found in findings:
        same.setdefault(found.at(""), []).append(found.host)
    placed: list[tuple[int, Finding]] = []
    for found, hosts in same.items():
        if hosts == [""]:
            placed.append((len(known) + 1, found))
        elif len(hosts) == len(known) > 1:
            placed.append((0, found.at(f"all {len(known)}")))
        else:
            placed.append((1 + known.index(hosts[0]), found.at(",".join(hosts))))
    return [found for _, found in sorted(placed, key=lambda entry: entry[0])]


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
