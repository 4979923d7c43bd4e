"""What was found out about one thing: whether it is fine, what was seen, and what to do if it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

State = Literal["ok", "note", "wrong"]
_MOST_WORDS = 600  # characters that are kept of what a program of others said


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at, such as ``torch``.
        state: ``ok``, ``note`` (works, but is worth a look) or ``wrong``.
        seen: What was seen there.
        remedy: What to do about it; empty only if all is fine.
        host: The host, as the user wrote it; empty for this machine, or for what concerns several.
    """

    name: str
    state: State
    seen: str
    remedy: str = ""
    host: str = ""

    def at(self, host: str) -> Finding:
        """This finding, as found on ``host``."""
        return replace(self, host=host)

    def plain(self) -> dict[str, str]:
        """This finding as plain data."""
        return {
            "name": self.name,
            "state": self.state,
            "seen": self.seen[:_MOST_WORDS],
            "remedy": self.remedy[:_MOST_WORDS],
            "host": self.host,
        }


def ok(name: str, seen: str) -> Finding:
    """All is fine."""
    return Finding(name, "ok", seen)


def note(name: str, seen: str, remedy: str) -> Finding:
    """A finding about something that works, but is worth a look."""
    return Finding(name, "note", seen, remedy)


def wrong(name: str, seen: str, remedy: str) -> Finding:
    """A finding about something that has to be put right."""
    return Finding(name, "wrong", seen, remedy)


def split(name: str, problem: str) -> Finding:
    """A finding from a line ``cause: remedy``, as errors are written."""
    seen, _, remedy = problem.rpartition(": ")
    return wrong(name, seen, remedy) if seen else wrong(name, problem, "see above")


def read(raw: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """A finding from plain data that came from another process.

    Raises:
        ValueError: it is none.
    """
    found = []
    for entry in raw:
        if not isinstance(entry, dict) or entry.get("state") not in get_args(State):
            raise ValueError(f"no finding: {entry!r:.80}")
        texts = {key: str(entry.get(key, ""))[:_MOST_WORDS] for key in ("name", "seen", "remedy", "host")}
        found.append(Finding(state=entry["state"], **texts))
    return found


def count(findings: Iterable[Finding], state: State) -> int:
    """How many are in this state."""
    return sum(finding.state == state for finding in findings)
