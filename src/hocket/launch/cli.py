"""The command ``hocket``. It reads flags and picks; the work is done elsewhere, and nothing here imports torch."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from hocket import __version__, config
from hocket.errors import HocketError, UsageError
from hocket.launch import bench_cli, machine, supervisor
from hocket.launch.workers import Job
from hocket.strategies import choices

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train one PyTorch script together on many processes.",
)
app.add_typer(bench_cli.app, name="bench")


def _flag(name: str) -> typer.models.OptionInfo:
    setting = config.SETTINGS[name]
    allowed = f" [{'|'.join(setting.choices)}]" if setting.choices else ""
    option: typer.models.OptionInfo = typer.Option(
        f"--{name}",
        help=f"{setting.help}{allowed} Also {setting.variable}. [default: {setting.default}]",
        show_default=False,
    )
    return option


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[str, typer.Argument(help="The script, or with -m the module, that every worker runs.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    workers: Annotated[str, typer.Option("-n", "--workers", help="How many workers, or auto: one per core.")] = "auto",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    strategy: Annotated[str | None, _flag("strategy")] = None,
    timeout: Annotated[str | None, _flag("timeout")] = None,
    on_nan: Annotated[str | None, _flag("on-nan")] = None,
    transport: Annotated[str | None, _flag("transport")] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Keep each worker's output in a file there.")
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", hidden=True)] = None,
) -> None:
    """Run SCRIPT on several workers of this machine."""
    count = machine.worker_count(workers)
    settings = {"strategy": strategy, "timeout": timeout, "on-nan": on_nan, "transport": transport}
    job = Job(_command(script, args or [], module), count, _checked(settings))
    if log_dir is not None:
        _check_folder(log_dir)
    sys.exit(supervisor.run(job, log_dir, report))


@app.command()
def version() -> None:
    """Print the version of Hocket."""
    print(__version__)


def main() -> None:
    """The entry point: a wrong use is one line and status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # workers may write what this terminal cannot show
    try:
        app()
    except HocketError as error:
        print(f"hocket: {error}", file=sys.stderr)
        sys.exit(2)


def _command(script: str, args: list[str], module: bool) -> tuple[str, ...]:
    if module:
        sys.path.insert(0, str(Path.cwd()))
        try:
            known = importlib.util.find_spec(script) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            raise UsageError(f"no module named {script!r} can be found from {Path.cwd()}: check its name")
        return ("-m", script, *args)
    if not Path(script).is_file():
        raise UsageError(f"no script {script!r} in {Path.cwd()}: check its path (or use -m for a module)")
    return (script, *args)


def _checked(settings: dict[str, str | None]) -> dict[str, str]:
    given = {name: value for name, value in settings.items() if value is not None}
    effective = {**config.told(), **given}
    if "strategy" in effective:
        choices.parse(effective["strategy"])
    if "timeout" in effective:
        config.seconds(effective["timeout"])
    for name in ("on-nan", "transport"):
        if name in effective:
            config.choice(name, effective[name])
    return given


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: {error.strerror}; choose a folder that can be written to") from None


if __name__ == "__main__":
    main()
