"""``hocket rig``: makes hosts on this machine, runs commands in them, removes them."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer

from hocket.errors import RigError
from hocket.lab.rig import rig, rig_needs, rig_state
from hocket.lab.rig import rig_names as naming

app = typer.Typer(no_args_is_help=True, help="Hosts on one machine, to try out jobs across hosts. Needs root.")

_Name = Annotated[str, typer.Option("--name", help="The name of the rig; there may be several.")]


@app.command()
def up(
    hosts: Annotated[int, typer.Argument(help="How many hosts: h1, h2 and so on.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="What each host can send, and receive: 1gbit, 100mbit … [default: no limit]")
    ] = None,
    trunk: Annotated[
        str | None, typer.Option(help="Two sites with half of the hosts each, joined by one link of this rate.")
    ] = None,
    name: _Name = naming.DEFAULT,
    interfaces: Annotated[
        str, typer.Option(help="What the hosts call their interface; several, with commas, are given out in turns.")
    ] = "eth0",
    decoys: Annotated[
        bool, typer.Option("--decoys", help="Give every host a docker0 with the same address that leads nowhere.")
    ] = False,
) -> None:
    """Make a rig: hosts h1, h2 … with a network between them and a secure shell each."""
    begun = time.monotonic()
    made = rig.Rig.up(
        hosts,
        rate,
        name,
        interfaces=interfaces.split(","),
        decoys=rig.DOCKER if decoys else None,
        keep=True,
        trunk=trunk,
    )
    speed = f"{rate} each way" if rate else "no limit of rate"
    flag = "" if name == naming.DEFAULT else f" --name {name}"
    sites = f", in two sites with {trunk} between them" if trunk else ""
    print(f"Rig {name!r} is up after {time.monotonic() - begun:.1f} s: {len(made.hosts)} hosts, {speed}{sites}.")
    for host in made.hosts.values():
        print(f"  {host.name:<5} {host.address:<15} {host.interface}")
    slots = ",".join(f"{host}:1" for host in list(made.hosts)[:2])
    print(f"Run inside h1:      hocket rig exec{flag} hocket run -H {slots} train.py")
    print(f"Run from outside:   HOCKET_SSH='{made.ssh}' hocket run -H {slots} train.py")
    print(f"Log in:             {made.ssh} h1")
    print(f"Remove:             hocket rig down{flag}")


@app.command("exec", context_settings={"allow_interspersed_args": False})
def execute(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
    host: Annotated[str, typer.Option(help="In which host.")] = "h1",
    name: _Name = naming.DEFAULT,
) -> None:
    """Run COMMAND inside a host, in the present folder with the present environment and HOCKET_SSH."""
    argv = rig.Rig.find(name).command(host, command)
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        raise RigError(f"{argv[0]} cannot be run: {error.strerror}") from None


@app.command()
def down(name: _Name = naming.DEFAULT) -> None:
    """Remove a rig with all that runs in it; also one that is half-made or damaged."""
    print(f"Rig {name!r} is removed." if rig.down(name) else f"There is no rig {name!r}.")


@app.command("list")
def show() -> None:
    """List the rigs there are."""
    rig_needs.check()
    found = rig_state.names()
    if not found:
        print("No rigs. hocket rig up 2 makes one.")
    for name in found:
        known = rig_state.load(name)
        if known is None:
            print(f"{name}: half-made or damaged; hocket rig down --name {name} removes what is there")
            continue
        left = ", left over from a process that has ended" if rig_state.is_abandoned(known) else ""
        hosts = " ".join(f"{host.name}={host.address}" for host in known.hosts)
        print(f"{name}: {hosts}{left}")
