"""``hocket.launch``: runs a function of a notebook, a script or a module on fresh workers.

The only module of this layer that imports torch, because it packs tensors; ``hocket run`` does not load it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import selectors
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

import hocket
from hocket import config, specs
from hocket.errors import JobError, UsageError
from hocket.job.function import function_worker
from hocket.job.function.references import Sender
from hocket.launch import machine

_PATIENCE = 15.0  # seconds that an interrupted launcher has to end; it needs about two


def launch(
    fn: Callable[..., Any],
    *args: Any,
    n: int | Literal["auto"] = "auto",
    strategy: str | specs.Spec | None = None,
    **options: Any,
) -> Any:
    """Call ``fn(*args)`` on ``n`` fresh workers of this machine, and return what it returns on rank 0.

    Blocks until the job has ended; what workers print appears meanwhile, with the rank before each line. Workers are
    fresh interpreters: they share nothing with this process, and changes that ``fn`` makes to its arguments or to
    global variables stay there. ``hocket.init()`` has been called when ``fn`` begins.

    Args:
        fn: A function of a module, or one of the notebook or script itself. The latter takes along the functions,
            classes, imports and plain data that it uses.
        *args: Its arguments: plain data, tensors, arrays, or functions and classes such as ``fn`` itself.
        n: How many workers, or ``"auto"``: one per core.
        strategy: How they train together, as ``hocket run --strategy`` has it, or for example ``hocket.Central()``.
        **options: Other settings of ``hocket run`` by name (``servers=2``, ``timeout=60``, ``on_nan="skip"``,
            ``verbose=True``); all others are keyword arguments of ``fn``.

    Raises:
        UsageError: something cannot be sent to workers or brought back, or a setting is wrong.
        JobError: a worker has failed; the message is the report that ``hocket run`` would show.
    """
    settings = take_settings(strategy, options)
    _check_arguments(fn, args, options, {"n" if n != "auto" else "", *(name.replace("-", "_") for name in settings)})
    env = _environment(settings)
    count = machine.worker_count(str(n), config.read(env).servers)
    with _sent(fn, args, options, sys.path) as folder:
        return _call(folder, env, [str(count)], _name(fn))


def launch_elsewhere(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n: str,
    settings: dict[str, Any],
    flags: Callable[[Path], list[str]],
) -> Any:
    """Call ``fn`` on workers of other machines, as ``launch`` does on this one.

    Args:
        fn: See ``launch``; it takes ``args`` and ``kwargs``.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        n: How many workers, as ``hocket run`` has it.
        settings: Other settings, by name.
        flags: The flags of ``hocket run`` that say where machines come from, and bring a folder along.
    """
    _check_arguments(fn, args, kwargs, set())
    env = _environment(settings)
    with _sent(fn, args, kwargs, None) as folder:
        (folder / "nonce").write_bytes(os.urandom(16))  # what was brought along for another call is not taken for this
        return _call(folder, env, [n, *flags(folder)], _name(fn))


def take_settings(strategy: str | specs.Spec | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings among ``options``, which are taken out, by name."""
    names = [name for name in config.SETTINGS if name not in config.FOR_HOSTS]
    settings = {name: options.pop(key) for name in names if (key := name.replace("-", "_")) in options}
    if strategy is not None:
        settings["strategy"] = strategy if isinstance(strategy, str) else specs.write(strategy)
    return settings


@contextlib.contextmanager
def _sent(fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], path: list[str] | None) -> Iterator[Path]:
    """A folder that has what workers need; with ``path``, they look for modules where this process does."""
    folder = Path(tempfile.mkdtemp(prefix="hocket-"))  # which only this user can read
    try:
        _send(folder, fn, args, kwargs, path)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call(folder: Path, env: dict[str, str], more: list[str], name: str) -> Any:
    """Launch the function that is in ``folder``; what it returns on rank 0."""
    arguments = [str(os.getpid()), str(folder), *more]
    status = _run([sys.executable, "-X", "utf8", "-m", "hocket.launch", *arguments], env)
    return _outcome(folder, status, name)


def _check_arguments(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], taken: set[str]) -> None:
    if not callable(fn):
        raise UsageError(f"hocket.launch() needs a function, not {fn!r}: write hocket.launch(train, …), without ()")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # some built-in functions have none
    try:
        unfilled = set(signature.parameters) - set(signature.bind_partial(*args).arguments)
        if both := sorted(taken & unfilled):
            raise UsageError(f"{both[0]!r} is an option of hocket.launch() and of {_name(fn)}(): pass it by position")
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"{_name(fn)}{signature} cannot be called with these arguments: {error}") from None


def _environment(settings: dict[str, Any]) -> dict[str, str]:
    """The launcher's environment, with the settings in it, which are right."""
    env = config.environment()
    for name, value in settings.items():
        if value is not None:
            text = ("off", "on")[value] if isinstance(value, bool) else str(value)
            env[config.SETTINGS[name].variable] = text
    told = config.read(env)
    if told.job is not None or told.size > 1:
        raise UsageError(
            "hocket.launch() was called in a worker of a job, and workers launch nothing: call it where the job is "
            "started, in a module under if __name__ == '__main__':"
        )
    if told.strategy is not None:
        specs.parse(told.strategy)
    home = str(Path(hocket.__file__).parent.parent)
    if home not in (*site.getsitepackages(), site.getusersitepackages()):  # found through sys.path alone, perhaps
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (home, env.get("PYTHONPATH"))))
    return env


def _send(
    folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], path: list[str] | None
) -> None:
    sender, name = Sender(), _name(fn)
    call = {
        "function": sender.refer(fn, f"{name}()" if name != "<lambda>" else "the lambda"),
        "args": [sender.refer(value, f"argument {i} of {name}()") for i, value in enumerate(args, 1)],
        "kwargs": {key: sender.refer(value, f"argument {key!r} of {name}()") for key, value in kwargs.items()},
        # Filled by what was referred to above.
        "names": sender.names, "modules": sorted(sender.modules), "files": sender.files,
        "definitions": sender.definitions, "order": sender.order(), "path": path,
    }  # fmt: skip
    function_worker.send(folder, call, sender.tensors)


def _outcome(folder: Path, status: int, name: str) -> Any:
    report = folder / "report.txt"
    if status != 0:
        text = ""
        with contextlib.suppress(FileNotFoundError):  # a launcher that was killed has left none
            text = report.read_text(encoding="utf-8")
        raise JobError(text.removeprefix("hocket: ") or f"the launcher ended with status {status}: see what it printed")
    try:
        return function_worker.receive_result(folder)
    except FileNotFoundError:
        raise JobError(f"rank 0 ended before {name}() returned: let it return instead of calling exit()") from None


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


def _run(command: list[str], env: dict[str, str]) -> int:
    """Run ``command`` to its end and return its status; pass on its lines to the streams that Python has now.

    In a notebook those are no files, so a child cannot write to them by itself.
    An exception meanwhile (KeyboardInterrupt is one) first ends the process, and waits for that.
    """
    # A session of its own: Ctrl-C reaches only the caller, which passes it on once.
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, bufsize=0,
    )  # fmt: skip
    with process:
        try:
            _pass_on(process, None)
            return process.wait()
        except BaseException as error:
            _end(process, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        process.send_signal(number)
        _pass_on(process, time.monotonic() + _PATIENCE)
    finally:
        process.kill()  # after its time, or at a second Ctrl-C; the launcher's guardian then ends the workers
        process.wait()


def _pass_on(process: subprocess.Popen[bytes], deadline: float | None) -> None:
    """Wait until both streams have ended, or the time is over."""
    rests: dict[int, bytes] = {}
    with selectors.DefaultSelector() as selector:
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, name)
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            for key, _ in selector.select(0.25):
                data = os.read(key.fd, 1 << 16)
                *lines, rests[key.fd] = (rests.get(key.fd, b"") + data).split(b"\n")
                if not data:
                    selector.unregister(key.fileobj)
                    lines = [rests[key.fd]] if rests[key.fd] else []
                _write(getattr(sys, key.data), lines)


def _write(stream: TextIO | None, lines: list[bytes]) -> None:
    if lines and stream is not None:
        text = b"".join(line + b"\n" for line in lines).decode(errors="replace")
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode("ascii", "backslashreplace").decode())
        stream.flush()
