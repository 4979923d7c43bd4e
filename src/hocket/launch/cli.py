"""The command ``hocket``. It reads flags and picks; the work is done elsewhere, and nothing here imports torch."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hocket import __version__, config, specs
from hocket.errors import HocketError, UsageError
from hocket.lab.bench import bench_cli
from hocket.lab.compare import compare_cli
from hocket.lab.doctor import doctor_cli
from hocket.lab.rig import rig_cli
from hocket.lab.trace import trace_cli
from hocket.launch import (
    config_cli,
    config_file,
    horovodrun_cli,
    host_list,
    jobs_cli,
    leftovers,
    listener,
    machine,
    remote,
    runs_cli,
    scripts,
    stdio,
    supervisor,
    template_cli,
)
from hocket.launch.discovery import Discovery
from hocket.launch.engines import choice, ray_engine
from hocket.launch.engines.ray_places import RayTexts
from hocket.launch.engines.ssh import SshEngine
from hocket.launch.environment import Job
from hocket.launch.flags import takes_settings
from hocket.launch.host_list import Host, Wishes
from hocket.observe.recorder import Recorder
from hocket.observe.timeline import Timeline

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train one PyTorch script together on many processes.",
)
app.add_typer(bench_cli.app, name="bench")
app.add_typer(runs_cli.app, name="runs")
app.add_typer(rig_cli.app, name="rig")
app.add_typer(template_cli.app, name="template")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@takes_settings(
    before={
        "tls": ["server_hosts"],
        "ssh": ["no_record", "tensorboard", "log_dir", "host", "hostfile", "discover", "cluster", "task"],
    },
)
def run(
    *,
    script: Annotated[str, typer.Argument(help="The script, or with -m the module, that every worker runs.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "-n", "--workers", help="How many workers; auto (default), one per core; or 2..8, never fewer or more."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    settings: dict[str, str],
    server_hosts: Annotated[
        str | None,
        typer.Option("--server-hosts", help="Hosts for the servers: node3,node4:2. [default: the workers' hosts]"),
    ] = None,
    no_record: Annotated[bool, typer.Option("--no-record", help="Keep no record of this run.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write curves for TensorBoard, into the run's folder.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Keep the output of each worker and server in a file there.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("-H", "--hosts", help="Other machines over SSH, and workers on each: node1:4,node2:4.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", help="The same from a file: a host in every line, node1 slots=4.")
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(
            "--discover", help="The same from a command that prints such lines: asked again while the job runs."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", help="A JSON file with chief, worker, ps: each machine starts its --task."),
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Which task of --cluster this is: worker:1.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option("-x", "--export", help="An environment variable for workers on other hosts: NAME or NAME=VALUE."),
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="Where machines come from instead: ray.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="The Ray cluster. [default: that of this machine]")
    ] = None,
    per_worker: Annotated[
        str, typer.Option("--per-worker", help="What Ray reserves for each worker, as JSON.")
    ] = '{"CPU": 1}',
    per_server: Annotated[
        str, typer.Option("--per-server", help="What Ray reserves for each server, as JSON.")
    ] = '{"CPU": 1}',
    placement: Annotated[
        str, typer.Option("--placement", help="How Ray spreads workers: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD.")
    ] = "PACK",
    runtime_env: Annotated[
        str | None, typer.Option("--runtime-env", help="What Ray brings to the nodes, as JSON or a file with it.")
    ] = None,
    wait: Annotated[
        float, typer.Option("--wait", help="Seconds to wait for places that the Ray cluster does not have.")
    ] = 0.0,
    report: Annotated[Path | None, typer.Option("--report", hidden=True)] = None,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
) -> None:
    """Run SCRIPT on several workers, of this machine or with -H of several."""
    if with_parent is not None:
        leftovers.end_with_parent(with_parent)
    flags = {"-H": host, "--hostfile": hostfile, "--discover": discover, "--on": on}
    naming = _naming(flags)
    called = report is not None or with_parent is not None  # by hocket.launch() or compare, which say what they want
    file = config_file.ConfigFile() if called else config_file.read()
    tasks = choice.find({"-n": workers, **flags}, cluster, task)
    if not naming and tasks is None:  # the number of the file is for its hosts
        host, workers = file.hosts, workers or file.workers
    workers = workers or "auto"
    bounds = machine.worker_bounds(workers)
    discovery = Discovery(discover) if discover is not None else None
    named = host_list.parse(host) if host is not None else host_list.read_file(hostfile) if hostfile is not None else []
    if discovery is not None:
        named = discovery.first()
    _check_engine(
        on, {"--ssh": settings.get("ssh"), "--python": settings.get("python"), "--server-hosts": server_hosts}
    )
    if not (named or on or tasks):
        of_hosts = {f"--{name}": settings.get(name) for name in config.FOR_HOSTS}
        _refuse_without_hosts({**of_hosts, "-x": export, "--server-hosts": server_hosts})
    _check_record(no_record, tensorboard)
    command = scripts.command(script, args or [], module)
    settings = _checked(settings, file.settings)
    _check_spares(settings)
    started = choice.begin(tasks, settings) if tasks is not None else None
    if started is not None:
        named = started.first()
    elsewhere = bool(named or on)
    beside = _adapt(settings, bounds, named, changes=bool(discovery or on))
    count = 0
    if not elsewhere:
        count = machine.choose_workers(bounds, beside) if bounds else machine.worker_count(workers, beside)
        machine.check_files(count + beside)
    _check_strategy(settings, count)
    told = {name: value for name, value in settings.items() if name not in config.FOR_LAUNCHER}
    job = Job(command, count, told, most=bounds[1] if bounds else None)
    if log_dir is not None:
        _check_folder("log-dir", log_dir)

    drawn = Timeline(Path(settings["timeline"])) if settings.get("timeline") else None

    def record(sized: Job, facts: Mapping[str, Any] | None) -> Recorder | None:
        return None if no_record else listener.open_record(sized, settings, tensorboard=tensorboard, hosts=facts)

    if on is not None:
        texts = RayTexts(workers, address, per_worker, per_server, placement, runtime_env, wait)
        sys.exit(_run_on_ray(texts, job, settings, export or [], log_dir, record, drawn, report))
    if named:
        dealt = _server_hosts(server_hosts, job.servers) if server_hosts is not None else {}
        wishes = _wishes(named, workers, settings, export or [], dealt, discovery)
        if started is not None:
            job, wishes = started.own(job, wishes)
        sys.exit(remote.run_on_hosts(job, wishes, log_dir, record, drawn))
    sys.exit(supervisor.run(job, log_dir, record(job, None), report, timeline=drawn, gives_notice=not called))


app.command(context_settings={"allow_interspersed_args": False})(compare_cli.compare)
app.command()(trace_cli.trace)
app.command()(doctor_cli.doctor)
app.command()(config_cli.config)
app.command()(jobs_cli.jobs)
app.command()(jobs_cli.resize)
app.command(context_settings=horovodrun_cli.TAKES_ALL)(horovodrun_cli.command(lambda told: app(["run", *told])))


@app.command()
def version() -> None:
    """Print the version of Hocket."""
    print(__version__)


def main() -> None:
    """A wrong use is one line and status 2, and so is an output that cannot be written; Ctrl-C is status 130."""
    try:
        stdio.prepare()
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where it can still be said that it fails
    except stdio.Unwritable as error:
        sys.exit(stdio.end(error))
    except HocketError as error:
        stdio.say(f"hocket: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if not (line := machine.explain(error)):
            raise
        stdio.say(f"hocket: {line}")
        sys.exit(2)


def _adapt(settings: dict[str, str], bounds: tuple[int, int] | None, named: list[Host], *, changes: bool) -> int:
    """Set what follows from the number of workers and the hosts; returns how many processes there are beside them."""
    spares = int(settings.get("spares", "0"))
    if (named or changes) and (changes or bounds or spares) and settings.get("transport", "auto") == "auto":
        settings["transport"] = "tcp"  # so that workers and hosts can come, and go
    if bounds is not None:
        settings["min-workers"] = str(max(bounds[0], int(settings.get("min-workers", "1"))))
    return int(settings.get("servers", "0")) + spares


def _run_on_ray(
    texts: RayTexts,
    job: Job,
    settings: dict[str, str],
    export: list[str],
    log_dir: Path | None,
    record: remote.MakeRecord,
    drawn: Timeline | None,
    report: Path | None,
) -> int:
    """Run a job on the nodes of a Ray cluster."""
    engine = ray_engine.make(texts, job, settings, config.exported(export), log_dir, report)
    try:
        return remote.run_on_hosts(job, engine.wishes(settings.get("interface")), log_dir, record, drawn, report)
    finally:
        engine.close()


def _check_record(no_record: bool, tensorboard: bool) -> None:
    if no_record and tensorboard:
        raise UsageError("--tensorboard writes into the folder of the run's record: leave out --no-record")


def _naming(given: Mapping[str, object]) -> list[str]:
    """The flag that says where machines come from, if there is one."""
    naming = [flag for flag, value in given.items() if value]
    if len(naming) > 1:
        raise UsageError(f"{naming[0]} and {naming[1]} both name the hosts: use one of them")
    return naming


def _check_engine(on: str | None, of_ssh: Mapping[str, object]) -> None:
    if on not in (None, "ray"):
        raise UsageError(f"--on {on}: the choices are ray")
    for flag, value in of_ssh.items():
        if on is not None and value is not None:
            raise UsageError(f"{flag} is for hosts over SSH: leave it out with --on {on}")


def _refuse_without_hosts(flags: dict[str, object]) -> None:
    for flag, value in flags.items():
        if value is not None and value != []:
            raise UsageError(f"{flag} is for other hosts: name these with -H node1:4,node2:4 or --hostfile")


def _server_hosts(text: str, servers: int) -> dict[str, list[int]]:
    """Which servers are where."""
    named = host_list.parse(text, "--server-hosts", "server")
    if not servers:
        raise UsageError(f"--server-hosts {text}, but there are no servers: add --servers {max(1, len(named))}")
    return host_list.deal_servers(named, servers)


def _wishes(
    named: list[Host],
    workers: str,
    settings: dict[str, str],
    export: list[str],
    servers: dict[str, list[int]],
    discovery: Discovery | None,
) -> Wishes:
    """What the user says about the hosts, after a look at it."""
    bounds = machine.worker_bounds(workers)
    count = bounds[1] if bounds else machine.number(workers)
    command, exported = settings.get("ssh") or config.SETTINGS["ssh"].default, config.exported(export)
    engine = SshEngine(named, command, settings.get("python") or None, exported, discovery)
    least = bounds[0] if bounds else None
    return Wishes(named, count, engine, settings.get("interface") or None, exported, servers, least)


def _checked(given: dict[str, str], of_file: dict[str, str]) -> dict[str, str]:
    """What flags, environment and ``hocket.toml`` set, after a look at every value."""
    told = {**config.told(), **given}
    settings = {**of_file, **told}
    config.note_file([name for name in of_file if name not in told])
    for name, text in settings.items():
        config.SETTINGS[name].read(text)
    if "strategy" in settings:
        specs.parse(settings["strategy"])
    if settings.get("codec"):
        specs.parse_codec(settings["codec"])
    if "checkpoint" in settings:
        folder = Path(settings["checkpoint"]).absolute()  # a script may change its working directory
        _check_folder("checkpoint", folder)
        settings["checkpoint"] = str(folder)
    return settings


def _check_spares(settings: dict[str, str]) -> None:
    count = settings.get("spares", "0")
    on_loss = settings.get("on-loss", config.SETTINGS["on-loss"].default)
    if int(count) and on_loss not in ("auto", "replace"):
        raise UsageError(f"--spares {count} needs --on-loss replace: leave out --on-loss {on_loss}, or the spares")


def _check_strategy(settings: dict[str, str], workers: int) -> None:
    """Whether it fits the job; how many workers there are on several hosts will be seen there."""
    if "strategy" in settings:
        specs.parse(settings["strategy"]).check_fit(workers, int(settings.get("servers", "0")))


def _check_folder(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # permissions do not say all: the disk may be read-only
    except OSError as error:
        raise UsageError(f"--{flag} {folder}: {error.strerror}; choose a folder that can be written to") from None


if __name__ == "__main__":
    main()
