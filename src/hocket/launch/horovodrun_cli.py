"""``hocket horovodrun``: the vocabulary of ``horovodrun``, said as ``hocket run`` says it."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer

from hocket import __version__, config
from hocket.errors import UsageError
from hocket.launch import stdio

_BUILD = f"""Horovod v0.28.1, as Hocket v{__version__} has it:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [ ] MPI
    [X] Gloo (Hocket's own)

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo (Hocket's own: shared memory, and TCP between hosts)"""

_NAMES = {  # what is the same under another name
    "network_interfaces": "--interface", "output_filename": "--log-dir", "hosts": "-H",
    "hostfile": "--hostfile", "host_discovery_script": "--discover", "timeline_filename": "--timeline",
    "reset_limit": "--max-losses",
}  # fmt: skip
_VARIABLES = {  # what the worker reads
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
_SWITCHES = (  # what has no meaning here
    "disable-cache", "hierarchical-allreduce", "no-hierarchical-allreduce", "hierarchical-allgather",
    "no-hierarchical-allgather", "autotune", "no-autotune", "timeline-mark-cycles", "no-timeline-mark-cycles",
    "mpi-threads-disable", "no-mpi-threads-disable", "log-with-timestamp", "log-without-timestamp",
    "log-hide-timestamp", "no-log-hide-timestamp", "prefix-output-with-timestamp", "gloo", "mpi", "jsrun", "tcp",
    "stall-check", "torch-disable-version-check",
)  # fmt: skip
_VALUES = (
    "start-timeout", "elastic-timeout", "slots-per-host", "cache-capacity", "autotune-log-file",
    "autotune-warmup-samples", "autotune-steps-per-sample", "autotune-bayes-opt-max-samples",
    "autotune-gaussian-process-noise", "mpi-args", "binding-args", "num-nccl-streams", "thread-affinity",
    "gloo-timeout-seconds", "log-level", "cooldown-range", "blacklist-cooldown-range",
)  # fmt: skip
_IN_FILES = {  # the sections of a configuration file, and what their keys begin with as flags
    "params": "", "autotune": "autotune-", "timeline": "timeline-", "stall-check": "stall-check-",
    "library-options": "", "logging": "log-",
}  # fmt: skip

TAKES_ALL = {
    "ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False,
    "help_option_names": [],
}  # fmt: skip
"""How the command leaves all its arguments to ``translate``."""


class Translation(NamedTuple):
    """What ``hocket run`` is given.

    Attributes:
        arguments: Its arguments.
        variables: Variables for the workers.
        ignored: The flags that have no meaning here.
    """

    arguments: list[str]
    variables: dict[str, str]
    ignored: list[str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"horovodrun: {message}; see 'hocket horovodrun --help'")


def _parser() -> _Parser:
    parser = _Parser(prog="hocket horovodrun", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version")
    add("-np", "--num-proc", dest="np", type=int, help="how many workers")
    add("--min-np", "--min-num-proc", dest="min_np", type=int, help="the fewest workers with which the job goes on")
    add("--max-np", "--max-num-proc", dest="max_np", type=int, help="the most workers that it may have")
    add("-H", "--hosts", help="hosts and slots: node1:4,node2:4")
    add("-hostfile", "--hostfile", help="the same from a file")
    add("--host-discovery-script", help="a command that prints them, asked again while the job runs")
    add("-p", "--ssh-port", type=int, help="the port of SSH on the hosts")
    add("-i", "--ssh-identity-file", help="the key for SSH")
    add("--network-interfaces", "--network-interface", help="the network interfaces for the job")
    add("--output-filename", help="a folder for the output of each worker")
    add("--timeline-filename", help="a file for the timeline")
    add("--fusion-threshold-mb", type=float, help="MiB that travel as one, at most")
    add("--cycle-time-ms", type=float, help="milliseconds that a worker waits for more to be submitted")
    add("--no-stall-check", action="store_true", help="report no operation that some workers have not submitted")
    add("--stall-check-warning-time-seconds", type=float, help="seconds after which it is reported")
    add("--stall-check-shutdown-time-seconds", type=float, help="seconds after which it fails")
    add("--reset-limit", type=int, help="how many workers may be lost within an hour")
    add("--check-build", "-cb", action="store_true", help="say what there is")
    add("--config-file", help="a file with these settings")
    add("--verbose", action="store_true", help="say more")
    for name in _SWITCHES:
        add(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in _VALUES:
        add(f"--{name}", help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help="python and the script, and its arguments")
    return parser


def translate(arguments: Sequence[str]) -> Translation:
    """What ``hocket run`` is given for the arguments of ``horovodrun``.

    Raises:
        UsageError: a flag is not known, or no Python script is to be run.
    """
    parser = _parser()
    given = parser.parse_args(list(arguments))
    if given.config_file:
        given = parser.parse_args([*read_settings(Path(given.config_file)), *arguments])
    found: list[str] = ["--as-horovod"]
    for name, flag in _NAMES.items():
        if (value := getattr(given, name)) is not None:
            found += [flag, str(value)]
    if (workers := _workers(given)) is not None:
        found += ["-n", workers]
    if given.ssh_port or given.ssh_identity_file:
        port = ["-p", str(given.ssh_port)] if given.ssh_port else []
        found += ["--ssh", shlex.join(["ssh", *port, *(["-i", key] if (key := given.ssh_identity_file) else [])])]
    if given.verbose:
        found.append("--verbose")
    variables = {
        variable: f"{value:g}" for name, variable in _VARIABLES.items() if (value := getattr(given, name)) is not None
    }
    if given.fusion_threshold_mb is not None:
        variables["HOROVOD_FUSION_THRESHOLD"] = str(int(given.fusion_threshold_mb * (1 << 20)))
    if given.no_stall_check:
        variables["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    ignored = [f"--{name}" for name in (*_SWITCHES, *_VALUES) if getattr(given, name.replace("-", "_"))]
    return Translation([*found, *_script(given.command)], variables, ignored)


def _workers(given: Any) -> str | None:
    """How many workers, as ``-n`` has it."""
    if given.min_np is None and given.max_np is None:
        return None if given.np is None else str(given.np)
    least = given.min_np or given.np or 1
    most = given.max_np or given.np
    if most is None:
        raise UsageError(f"horovodrun --min-np {given.min_np}: say how many at most with -np or --max-np")
    return f"{least}..{most}"


def _script(command: Sequence[str]) -> list[str]:
    """The script, or module, that a command runs."""
    words = list(command)
    if not words:
        raise UsageError("horovodrun: no command: write hocket horovodrun -np 4 python train.py")
    if re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        del words[0]
        while words and re.fullmatch(r"-[uOBEsISdqvb]+", words[0]):
            del words[0]
    elif not words[0].endswith(".py"):
        raise UsageError(f"horovodrun: {words[0]!r} is no Python: write python train.py, or python -m module")
    return words


def read_settings(path: Path) -> list[str]:
    """The flags that a configuration file of horovodrun stands for: YAML of sections, keys and values."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path}: cannot be read ({error})") from None
    found: list[str] = []
    section = ""
    for number, line in enumerate(lines, start=1):
        text = line.split(" #")[0].rstrip()
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        key, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or (not value and text[0].isspace()):
            raise UsageError(f"--config-file {path}, line {number}: {line.strip()!r} is no 'key: value'")
        key, value = key.replace("_", "-"), value.strip("'\"")
        if not text[0].isspace():
            section = "" if value else key
        if not value:
            continue
        if section == "stall-check" and key in ("enabled", "disabled"):
            found += ["--no-stall-check"] if (key == "disabled") == (value.lower() == "true") else []
            continue
        flag = f"--{_IN_FILES.get(section, '')}{key}"
        if section == "autotune" and key == "enabled":
            flag = "--autotune"
        if value.lower() in ("true", "false"):
            found += [flag] if value.lower() == "true" else []
        else:
            found += [flag, value]
    return found


def command(run: Callable[[list[str]], None]) -> Callable[[typer.Context], None]:
    """The command, which calls ``run`` with the arguments of ``hocket run``."""

    def horovodrun(context: typer.Context) -> None:
        """Run a command of horovodrun: -np 4 python train.py; flags without a meaning here are named and ignored."""
        arguments = context.args
        if "--help" in arguments or "-h" in arguments:
            print(_parser().format_help())
        elif "-v" in arguments[:1] or "--version" in arguments[:1]:
            print(f"0.28.1 (hocket {__version__})")
        elif "--check-build" in arguments or "-cb" in arguments:
            print(_BUILD)
        else:
            told = translate(arguments)
            if told.ignored:
                stdio.say(f"hocket: of no meaning here, and ignored: {', '.join(told.ignored)}")
            config.tell_workers(told.variables)
            run(told.arguments)

    return horovodrun
