"""The command ``hocket template``: prints what Kubernetes or SkyPilot needs to run a script on several machines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import config, specs
from hocket.errors import UsageError
from hocket.launch import templates
from hocket.launch.templates import Wanted

app = typer.Typer(no_args_is_help=True, help="Print what a cluster manager needs to run SCRIPT on several machines.")
_Script = Annotated[str, typer.Argument(help="The script, as the image or the working folder has it.")]
_Args = Annotated[list[str] | None, typer.Argument(help="Its arguments.")]
_Nodes = Annotated[int, typer.Option("-n", "--nodes", help="How many machines, each with one worker.")]
_Image = Annotated[str, typer.Option("--image", help="The image, with Hocket and torch in it.")]
_Name = Annotated[str | None, typer.Option("--name", help="The name of the job. [default: that of the script]")]
_Gpus = Annotated[int, typer.Option("--gpus", min=0, help="1 if each machine has a GPU.")]
_Kinds = Annotated[str, typer.Option("--gpus", help="The GPU of each machine: A100:1.")]
_Cpus = Annotated[int | None, typer.Option("--cpus", min=1, help="Cores of each machine.")]
_Set = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of hocket run: --set strategy=central; may be repeated.")
]
_CONTEXT = {"allow_interspersed_args": True, "ignore_unknown_options": True}


@app.command(context_settings=_CONTEXT)
def k8s(
    script: _Script, image: _Image, args: _Args = None, nodes: _Nodes = 2, name: _Name = None, gpus: _Gpus = 0,
    cpus: _Cpus = None, settings: _Set = None,
) -> None:  # fmt: skip
    """Print a JobSet of Kubernetes."""
    _print(templates.jobset, script, args, nodes, image, name, str(gpus or ""), cpus, settings, [
        "kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)",
        "kubectl apply -f {name}.yaml",
    ])  # fmt: skip


@app.command(context_settings=_CONTEXT)
def skypilot(
    script: _Script, image: _Image, args: _Args = None, nodes: _Nodes = 2, name: _Name = None, gpus: _Kinds = "",
    cpus: _Cpus = None, settings: _Set = None,
) -> None:  # fmt: skip
    """Print a task of SkyPilot."""
    _print(templates.skypilot, script, args, nodes, image, name, gpus, cpus, settings, [
        "sky launch {name}.yaml --secret HOCKET_JOB_SECRET=$(openssl rand -hex 32)",
    ])  # fmt: skip


def _print(
    make: Callable[[Wanted], dict[str, Any]],
    script: str,
    args: list[str] | None,
    nodes: int,
    image: str,
    name: str | None,
    gpus: str,
    cpus: int | None,
    given: list[str] | None,
    then: list[str],
) -> None:
    called = name if name is not None else re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:40]
    if make is templates.skypilot and gpus and not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*(:[1-9]\d*)?", gpus):
        raise UsageError(f"--gpus {gpus}: SkyPilot wants its kind: for example --gpus A100:1")
    settings = [_setting(text) for text in given or []]
    wanted = Wanted([script, *(args or [])], nodes, image, called, gpus, cpus, settings)
    wanted.check()
    print("# Then:")
    for line in then:
        print(f"#   {line.format(name=called)}")
    print(templates.write(make(wanted)), end="")


def _setting(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or name not in config.SETTINGS or config.SETTINGS[name].is_switch:
        raise UsageError(
            f"--set {text}: must be a flag of hocket run and its value, for example --set strategy=central"
        )
    config.SETTINGS[name].read(value)
    if name == "strategy":
        specs.parse(value)
    return name, value
