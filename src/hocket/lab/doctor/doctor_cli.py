"""The command ``hocket doctor``: has all looked at, shows the findings, and ends with 1 if something is wrong."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import config
from hocket.errors import UsageError
from hocket.lab.doctor import doctor_visit, host_links, small_allreduce
from hocket.lab.doctor.findings import Finding, State, count, ok, wrong
from hocket.lab.doctor.host_links import HostPair
from hocket.launch import config_file, host_list, machine
from hocket.launch.config_file import ConfigFile
from hocket.launch.engines.ssh import SshEngine
from hocket.launch.flags import flag
from hocket.launch.host_list import Host, Wishes
from hocket.launch.signals import Signals
from hocket.launch.stdio import PLAIN

_MARKS: dict[State, str] = {"ok": "✓", "note": "•", "wrong": "✗"}
_WORDS: dict[State, str] = {"ok": "ok", "note": "note", "wrong": "WRONG"}
_MOST_NAMES, _MOST_SEEN, _WIDTH = 30, 120, 100  # characters: of hosts in their column, of a line, of a list beneath


def doctor(
    host: Annotated[
        str | None, typer.Option("-H", "--hosts", help="Look at these machines over SSH, and between: node1,node2.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", help="The same from a file: a host in every line.")
    ] = None,
    ssh: Annotated[str | None, flag("ssh")] = None,
    python: Annotated[str | None, flag("python")] = None,
    interface: Annotated[str | None, flag("interface")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the small all-reduce at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look at this machine, or with -H at several and between them: what is wrong for training, and its remedy."""
    if host is not None and hostfile is not None:
        raise UsageError("-H and --hostfile both name the hosts: use one of them")
    file, about_file = _read_file()
    host = host if host is not None or hostfile is not None else file.hosts
    named = host_list.parse(host) if host is not None else host_list.read_file(hostfile) if hostfile is not None else []
    for name, value in {"--ssh": ssh, "--python": python}.items():
        if value is not None and not named:
            raise UsageError(f"{name} is for other hosts: name these with -H node1,node2 or --hostfile")
    try:
        machine.working_folder()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used ({error.strerror}): change to another") from None
    told = {**file.settings, **config.told()}
    hosts, exported = named or [Host("localhost")], config.exported()
    command = ssh or told.get("ssh") or config.SETTINGS["ssh"].default
    engine = SshEngine(hosts, command, python or told.get("python"), exported)
    wishes = Wishes(hosts, None, engine, interface or told.get("interface"), exported)
    with Signals() as signals:
        _say(f"looking at {f'{len(named)} hosts and what is between them' if named else 'this machine'} …")
        found = doctor_visit.look(wishes, signals, alone=not named)
        found.findings += about_file
        if not quick:
            _say("trying a small all-reduce …")
            found.findings.append(small_allreduce.run(wishes, found.fit, found.slowest, signals, alone=not named))
        _say("")
        doctor_visit.stop_if_asked(signals)
    if as_json:
        print(json.dumps(data(found.findings, found.pairs), indent=1))
    else:
        print(text(found.findings, found.pairs, sys.stdout.encoding))
    sys.exit(1 if count(found.findings, "wrong") else 0)


def _read_file() -> tuple[ConfigFile, list[Finding]]:
    """What ``hocket.toml`` says, and a finding about it if there is one."""
    try:
        file = config_file.read()
    except UsageError as error:
        seen = str(error).removeprefix(f"{config_file.NAME}: ")
        remedy = "mend it by hand, or remove it and let hocket config write it"
        return ConfigFile(), [wrong(config_file.NAME, seen, remedy)]
    said = ", ".join(f"{key} = {text}" for key, text in file.values().items())
    return file, [ok(config_file.NAME, said)] if said else []


def _say(text: str) -> None:
    """What is being done, on a terminal, in a line that the next one takes the place of."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def text(findings: Sequence[Finding], pairs: Sequence[HostPair], encoding: str | None) -> str:
    """The report for people, in characters that ``encoding`` has."""
    try:
        "✓•✗→µ–±×…".encode(encoding or "ascii")
        marks, table = _MARKS, {}
    except (UnicodeError, LookupError):
        marks, table = _WORDS, PLAIN
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
    measured = host_links.matrix(pairs)
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
    for found, where in same.items():
        joined = ",".join(where)
        if not where[0]:
            placed.append((len(known) + 1, found, []))
        elif len(where) == len(known) > 1:
            placed.append((0, found.at(f"all {len(known)}"), []))
        elif len(where) > 1 and len(joined) > _MOST_NAMES:
            placed.append((1 + known.index(where[0]), found.at(f"{where[0]} and {len(where) - 1} more"), where))
        else:
            placed.append((1 + known.index(where[0]), found.at(joined), []))
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


def data(findings: Sequence[Finding], pairs: Sequence[HostPair]) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "wrong": count(findings, "wrong"),
        "notes": count(findings, "note"),
        "findings": [found.plain() for found in findings],
        "pairs": [pair.plain() for pair in pairs],
    }
