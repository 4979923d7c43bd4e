"""``hocket compare``: one script under several strategies, side by side."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import __version__, config
from hocket.errors import UsageError
from hocket.lab.compare import comparison_folder as folders
from hocket.lab.compare import html_report, pictures, plan, target, terminal_table
from hocket.lab.compare.conduct import Conduct
from hocket.lab.compare.display import open_display
from hocket.lab.compare.plan import BASELINE, Planned, Way
from hocket.lab.compare.results import Comparison
from hocket.lab.compare.running import Interrupted
from hocket.lab.rig import Rig
from hocket.lab.rig.rig_network import parse_rate
from hocket.launch import host_list, machine, scripts
from hocket.launch.signals import Signals, asking

FOLDER = "hocket-compare"
_NOT_PASSED_ON = ("checkpoint", "strategy", "servers", "seed", "timeline", "run-dir")  # a run has its own, or none


@dataclass(frozen=True)
class Wanted:
    """What a user wants to be compared, after it was checked.

    Attributes:
        command: The script, or ``-m`` and the module, and its arguments.
        names: The names of the strategies; None for all that fit.
        workers: Numbers of workers.
        servers: How many servers there are, for strategies that need them.
        rig: How many hosts of a rig to make; 0 for no rig.
        hosts: Real hosts, as the user has given them.
        rate: The rate of the links of the rig.
        threads: Threads of every worker; None for the default of ``hocket run``.
    """

    command: tuple[str, ...]
    names: list[str] | None
    workers: list[int]
    servers: int
    rig: int
    hosts: str | None
    rate: str | None
    threads: int | None

    def choose(self, told: Mapping[str, Any]) -> tuple[list[Way], list[str]]:
        """What is compared with the baseline, and what was left out."""
        if self.names is not None:
            return plan.given(self.names, self.workers, self.servers), []
        several = bool(self.rig or self.hosts)
        return plan.fitting(self.workers, self.servers, told, several_hosts=several)


def compare(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module.")],
    args: Annotated[
        list[str] | None, typer.Argument(help="Its arguments; {seed} becomes the number of the repeat.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("-n", "--workers", help="How many workers, or several numbers: 2,4. [default: one per core]"),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            help="With , or ; between them: 'mirrored, local_sgd(period=16)'. [default: some that fit]",
            show_default=False,
        ),
    ] = None,
    servers: Annotated[int, typer.Option(help="Parameter servers, for the strategies that need them.")] = 1,
    until: Annotated[
        str | None, typer.Option(help="End each run when a metric is there: accuracy=0.95, or loss<=0.3.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="How often each is run, with seeds 0, 1, 2 …")] = 1,
    host: Annotated[
        str | None,
        typer.Option("-H", "--hosts", help="A number makes so many on a rig; else other machines: node1:4,node2:4."),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="What each host of the rig can send: 100mbit.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Of every worker. [default: the cores divided by the workers]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help=f"The folder for it. [default: one in {FOLDER}]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run SCRIPT under several strategies, and compare them with one worker: time to a target, speed, costs.

    The same command again goes on with a comparison that was interrupted.
    """
    for flag, count in {"--servers": servers, "--repeat": repeat, "--threads": threads}.items():
        if count is not None and count < 1:
            raise UsageError(f"{flag} {count}: must be a whole number from 1, for example {flag} 2")
    config.read()  # what the environment sets wrongly would fail every run
    command = scripts.command(script, args or [], module)
    wish = target.parse(until) if until is not None else None
    names = plan.split(strategies) if strategies else None
    rig, named = _hosts(host, rate)
    counted = plan.counts(workers, rig, host_list.parse(named) if named else [])
    wanted = Wanted(command, names, counted, servers, rig, named, rate, threads)
    if not wanted.choose({})[0]:
        raise UsageError("no strategy fits: name some with --strategies")
    found = scripts.find(script, module)
    signed: dict[str, Any] = {
        "script": f"-m {script}" if module else str(Path(script).resolve()),
        "folder": str(Path.cwd()),
        "content": hashlib.sha256(found.read_bytes()).hexdigest()[:16] if found and found.is_file() else "",
        "arguments": args or [],
        "strategies": names,
        "workers": counted,
        "servers": servers,
        "until": until,
        "repeat": repeat,
        "hosts": host,
        "rate": rate,
        "threads": threads,
        "environment": {name: value for name, value in config.told().items() if name not in _NOT_PASSED_ON},
        "cores": machine.cores(),
        "libraries": _of_libraries(),
    }
    name = script.rpartition(".")[2] if module else Path(script).stem
    place = folders.named(out, signed) if out is not None else folders.found_or_made(Path(FOLDER), name, signed)
    subject = Comparison(
        script=" ".join(command[: 2 if module else 1]),
        arguments=tuple(args or []),
        command=shlex.join(["hocket", *sys.argv[1:]]),
        about=_about(wanted),
        target=None,
        repeats=repeat,
        entries=(),
        wanted=until or "",
    )
    sys.exit(_conduct(wanted, subject, wish, place, signed, as_json=as_json))


def _conduct(
    wanted: Wanted,
    subject: Comparison,
    wish: target.Wish | None,
    place: folders.ComparisonFolder,
    signed: dict[str, Any],
    *,
    as_json: bool,
) -> int:
    """Make the runs, show what they found, return the exit status."""
    with contextlib.closing(place), Signals() as signals:
        place.prepare(signed)
        with contextlib.closing(open_display()) as display, contextlib.ExitStack() as stack:
            made: list[Rig] = []
            conduct = Conduct(
                place, subject, wish, wanted.choose, lambda run: _start(wanted, run, place.records, made), signals,
                display,
            )  # fmt: skip
            left = conduct.left()
            if place.earlier is not None:
                good = sum(not result.failure for result in conduct.results.values())
                display.say(f"hocket: {place.folder} is continued: {_left(good, len(left))}")
            if wanted.rig and left:
                name = f"compare-{plan.signature(signed)[:8]}"  # the same again takes the place of one that was killed
                made.append(stack.enter_context(Rig.up(wanted.rig, wanted.rate, name=name)))
            with contextlib.suppress(Interrupted):
                conduct.go()
        is_cut = bool(signals.received and conduct.left())
        comparison = conduct.comparison()
        folders.save(comparison, place.folder)
        try:
            with _at_once(signals):
                _show(comparison, place.folder, as_json=as_json)
        except KeyboardInterrupt:
            is_cut = True
        if is_cut:
            print(f"hocket: interrupted; the same command goes on from here ({place.folder})", file=sys.stderr)
            return 128 + signals.received[0]
    works = [entry for entry in comparison.entries if entry.good]
    return 0 if comparison.baseline in works and len(works) > 1 else 1


@contextlib.contextmanager
def _at_once(signals: Signals) -> Iterator[None]:
    """Within, a signal that asks for the end raises KeyboardInterrupt: no run is at work that it should not harm."""

    def take(number: int, _: object) -> None:
        signals.received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, take) for number in asking()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _left(good: int, left: int) -> str:
    """How far a comparison was that is continued."""
    there = f"{good or 'none'} of its runs {'is' if good == 1 else 'are'} there"
    return f"{there}, {left} {'is' if left == 1 else 'are'} left" if left else "all of its runs are there"


def _show(comparison: Comparison, folder: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(folders.to_json(comparison), indent=1))
    elif comparison.entries:
        terminal_table.show(comparison)
    made = _pictures(comparison, folder) if any(entry.good for entry in comparison.entries) else None
    where = f"Report: {made}" if made is not None else f"Results: {folder / folders.RESULTS}"
    print(where, file=sys.stderr if as_json else sys.stdout, flush=True)


def _pictures(comparison: Comparison, folder: Path) -> Path:
    """The report, and plots where matplotlib is installed."""
    try:
        pictures.write(comparison, folder)
    except UsageError as error:  # the report has its table in any case
        print(f"hocket: {error}", file=sys.stderr)
    return html_report.write(comparison, folder)


def _start(wanted: Wanted, run: Planned, records: Path, rig: list[Rig]) -> tuple[list[str], dict[str, str]]:
    """The command of one run, and its environment."""
    way, seed = run.way, str(run.repeat)
    flags = ["-n", str(way.workers), "--strategy", way.strategy, "--servers", str(way.servers), "--seed", seed]
    environment = config.environment()
    for name in _NOT_PASSED_ON:
        environment.pop(config.SETTINGS[name].variable, None)
    if wanted.threads is not None:
        environment["OMP_NUM_THREADS"] = str(wanted.threads)
    if wanted.hosts is not None:
        flags += ["-H", wanted.hosts]
    elif rig and way != BASELINE:
        named = list(rig[0].hosts)
        each, more = divmod(way.workers, len(named))
        slots = {name: each + (number < more) for number, name in enumerate(named)}
        flags += ["-H", ",".join(f"{name}:{slot}" for name, slot in slots.items() if slot), "--ssh", rig[0].ssh]
        flags += [part for name in config.names_for_rig() for part in ("-x", name)]  # as one worker has them, here
        if not environment.get("OMP_NUM_THREADS"):  # hosts of a rig share the cores of this machine
            environment["OMP_NUM_THREADS"] = str(max(1, machine.cores() // (way.workers + way.servers)))
    script = list(wanted.command)
    if script[0] == "-m":
        flags, script = [*flags, "-m"], script[1:]
    script[1:] = [part.replace("{seed}", seed) for part in script[1:]]
    launcher = [sys.executable, "-m", "hocket.launch.cli", "run", "--with-parent", str(os.getpid())]
    return [*launcher, "--run-dir", str(records), *flags, *script], environment


def _hosts(text: str | None, rate: str | None) -> tuple[int, str | None]:
    """How many hosts a rig is to have, or real ones."""
    rig = int(text) if text is not None and text.isdecimal() else 0
    if text is not None and text.isdecimal() and rig < 1:
        raise UsageError(f"--hosts {text}: a rig has at least one, for example --hosts 4")
    if rate is not None:
        if not rig:
            raise UsageError(f"--rate {rate} limits the hosts of a rig: say how many with --hosts 4")
        parse_rate(rate)
    if rig:
        from hocket.lab.rig import rig_needs

        rig_needs.check()
    elif text is not None:
        host_list.parse(text)
    return rig, None if rig else text


def _of_libraries() -> dict[str, str]:
    """The variables by which libraries choose threads and GPUs: where they differ, so do times."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY")
    environment = config.environment()
    return {name: environment[name] for name in names if environment.get(name)}


def _about(wanted: Wanted) -> dict[str, str]:
    network = "one host"
    if wanted.rig:
        network = f"{wanted.rig} hosts of a rig, {wanted.rate or 'unlimited'}" + ("/s each" if wanted.rate else "")
    elif wanted.hosts:
        network = wanted.hosts
    gpus = machine.gpus()
    return {
        "cpu": machine.cpu(),
        "cores": str(machine.cores()),
        **({"gpus": str(gpus)} if gpus else {}),
        "network": network,
        "torch": machine.version("torch") or "?",
        "hocket": __version__,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
