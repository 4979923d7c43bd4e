"""The command ``hocket doctor``: reads its flags, has everything looked at, shows it, and ends with 1 if it is bad."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hocket import config
from hocket.errors import UsageError
from hocket.launch import hosts
from hocket.launch.doctor import reduction, show, visit
from hocket.launch.doctor.finding import count
from hocket.launch.hosts import Host
from hocket.launch.party import Wishes
from hocket.launch.signals import Signals


def _flag(name: str) -> typer.models.OptionInfo:
    setting = config.SETTINGS[name]
    option: typer.models.OptionInfo = typer.Option(
        f"--{name}", help=f"{setting.help} Also {setting.variable}. [default: {setting.default or 'none'}]",
        show_default=False,
    )  # fmt: skip
    return option


def doctor(
    host: Annotated[
        str | None, typer.Option("-H", "--hosts", help="Look at these machines over SSH, and between: node1,node2.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", help="The same from a file: a host in every line.")
    ] = None,
    ssh: Annotated[str | None, _flag("ssh")] = None,
    python: Annotated[str | None, _flag("python")] = None,
    interface: Annotated[str | None, _flag("interface")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the small all-reduce at the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Look at this machine, or with -H at several and between them: what is wrong for training, and its remedy."""
    if host is not None and hostfile is not None:
        raise UsageError("-H and --hostfile both name the hosts: use one of them")
    named = hosts.parse(host) if host is not None else hosts.read_file(hostfile) if hostfile is not None else []
    for flag, value in {"--ssh": ssh, "--python": python}.items():
        if value is not None and not named:
            raise UsageError(f"{flag} is for other hosts: name these with -H node1,node2 or --hostfile")
    try:
        config.working_folder()
    except OSError as error:
        raise UsageError(f"the working folder cannot be used ({error.strerror}): change to another") from None
    told = config.told()
    wishes = Wishes(
        named or [Host("localhost")],
        None,
        ssh or told.get("ssh") or config.SETTINGS["ssh"].default,
        python or told.get("python"),
        interface or told.get("interface"),
        config.exported(),
    )
    with Signals() as signals:
        _say(f"looking at {f'{len(named)} hosts and what is between them' if named else 'this machine'} …")
        found = visit.look(wishes, signals, alone=not named)
        if not quick:
            _say("trying a small all-reduce …")
            found.findings.append(reduction.run(wishes, found.fit, found.slowest, signals, alone=not named))
        _say("")
        visit.stop_if_asked(signals)
    if as_json:
        print(json.dumps(show.data(found.findings, found.ways), indent=1))
    else:
        print(show.text(found.findings, found.ways, sys.stdout.encoding))
    sys.exit(1 if count(found.findings, "wrong") else 0)


def _say(text: str) -> None:
    """What is being done, on a terminal, in a line that the next one takes the place of."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
