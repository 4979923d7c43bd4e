"""Shows findings: a line for each, remedies beneath, and a last line that counts; or all of it as plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hocket.launch.doctor import pairs
from hocket.launch.doctor.finding import Finding, State, count
from hocket.launch.doctor.pairs import Way

_MARKS: dict[State, str] = {"ok": "✓", "note": "•", "wrong": "✗"}
_WORDS: dict[State, str] = {"ok": "ok", "note": "note", "wrong": "WRONG"}
_MOST_NAMES, _MOST_SEEN, _WIDTH = 30, 120, 100  # characters: of hosts in their column, of a line, of a list beneath
_PLAIN = str.maketrans({"→": "->", "µ": "u", "–": "-", "±": "+-", "×": "x", "…": "..."})


def text(findings: Sequence[Finding], ways: Sequence[Way], encoding: str | None) -> str:
    """The report for people, in characters that ``encoding`` has."""
    try:
        "✓•✗→µ–±×…".encode(encoding or "ascii")
        marks, table = _MARKS, {}
    except (UnicodeError, LookupError):
        marks, table = _WORDS, _PLAIN
    wide = max(map(len, marks.values()))
    rows = merged(findings)
    columns = max((len(found.host) for found, _ in rows), default=0)
    names = max((len(found.name) for found, _ in rows), default=0)
    beneath = " " * (wide + 4)
    lines = []
    for found, left_out in rows:
        host = f"{found.host:<{columns}}  " if columns else ""
        seen, listed = _without_list(found.seen)
        lines.append(f"{marks[found.state]:<{wide}}  {host}{found.name:<{names}}  {seen}".rstrip())
        lines += _wrapped(listed, beneath)
        if left_out and found.state != "ok":
            lines += _wrapped(f"on {', '.join(left_out)}", beneath)
        if found.remedy:
            lines.append(f"{beneath}→ {found.remedy}")
    measured = pairs.matrix(ways)
    lines += ["", *measured] if measured else []
    lines += ["", closing(findings)]
    return "\n".join(lines).translate(table)


def merged(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """What is the same on several hosts once; host by host, then what is between.

    Returns:
        Findings with their hosts in few characters, and these hosts in full where not all names are among them.
    """
    known = list(dict.fromkeys(found.host for found in findings if found.host))
    same: dict[Finding, list[str]] = {}
    for found in findings:
        same.setdefault(found.at(""), []).append(found.host)
    placed: list[tuple[int, Finding, list[str]]] = []
    for found, hosts in same.items():
        joined = ",".join(hosts)
        if not hosts[0]:
            placed.append((len(known) + 1, found, []))
        elif len(hosts) == len(known) > 1:
            placed.append((0, found.at(f"all {len(known)}"), []))
        elif len(hosts) > 1 and len(joined) > _MOST_NAMES:
            placed.append((1 + known.index(hosts[0]), found.at(f"{hosts[0]} and {len(hosts) - 1} more"), hosts))
        else:
            placed.append((1 + known.index(hosts[0]), found.at(joined), []))
    return [(found, hosts) for _, found, hosts in sorted(placed, key=lambda entry: entry[0])]


def _without_list(seen: str) -> tuple[str, str]:
    """A line that is too long, cut at its colon: a list of things follows there."""
    head, colon, rest = seen.partition(": ")
    return (f"{head}:", rest) if colon and len(seen) > _MOST_SEEN else (seen, "")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def closing(findings: Sequence[Finding]) -> str:
    """How many things are wrong or worth a look, in a sentence; what is so on three hosts is three things."""
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
