"""The command with streams that are closed, full or read by nobody; and with Ctrl-C before it has begun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.launch import stdio

HOCKET = f"{sys.executable} -m hocket"


def shell(command: str) -> tuple[int, str, str]:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("to", "reason"), [(">&-", "is closed"), ("> /dev/full", "cannot be written (No space left on device)")]
)
@pytest.mark.parametrize("before", ["", "PYTHONUNBUFFERED=1 "])  # is it seen at the end, or in the middle
def test_an_output_that_takes_nothing(before: str, to: str, reason: str) -> None:
    status, _, said = shell(f"{before}{HOCKET} version {to}")
    told = f"hocket: standard output {reason}: send it to where there is room, or to /dev/null\n"
    assert (status, said) == (2, told)


def test_it_is_all_the_same_without_a_stream_for_errors() -> None:
    assert shell(f"{HOCKET} version >&- 2>&-") == (2, "", "")
    assert shell(f"{HOCKET} version >/dev/full 2>/dev/full") == (2, "", "")
    assert shell(f"{HOCKET} runs show --run-dir /nowhere 2>&-") == (2, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        command = [*HOCKET.split(), "version"]
        done = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("where", ["> /dev/full", "2> /dev/full", "> /dev/full 2>&1"])
def test_a_job_goes_on_without_room_for_its_output(tmp_path: Path, where: str) -> None:
    script = (
        "import sys\nfor _ in range(3):\n    print('out')\n    print('error', file=sys.stderr)\nopen('done', 'w')\n"
    )
    (tmp_path / "script.py").write_text(script)
    status, out, said = shell(f"cd {tmp_path}; {HOCKET} run -n 1 --no-record script.py {where}")
    assert status == 0 and (tmp_path / "done").exists(), said
    assert out.count("out") == (0 if where.startswith("> ") else 3)
    lines = [line for line in said.splitlines() if "The job goes on" in line]
    assert len(lines) == (1 if where == "> /dev/full" else 0), said


def test_a_job_without_input_and_errors(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('read', sys.stdin.read())\n")
    status, out, said = shell(f"{HOCKET} run -n 1 --no-record {tmp_path}/script.py <&- 2>&-")
    assert (status, out.split(), said) == (0, ["[0]", "read"], "")


@pytest.mark.parametrize("ignores", [False, True])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, ignores: bool) -> None:
    """Also where a shell has started it in the background, and it is to be ignored."""
    (tmp_path / "typer.py").write_text(
        f"open({str(tmp_path / 'fifo')!r}, 'w').write('x')\n"
        f"open({str(tmp_path / 'fifo')!r}).read()\n"
        "raise SystemExit('went on')\n"
    )
    os.mkfifo(tmp_path / "fifo")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    trap = "trap '' INT; " if ignores else ""
    process = subprocess.Popen(["sh", "-c", f"{trap}exec {HOCKET} version"], env=env, stderr=subprocess.PIPE, text=True)
    assert (tmp_path / "fifo").read_text() == "x"
    process.send_signal(signal.SIGINT)
    if ignores:
        (tmp_path / "fifo").write_text("on")
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == ((1, "went on\n") if ignores else (130, ""))


def test_what_a_shell_has_it_ignore_does_not_end_a_job(tmp_path: Path) -> None:
    """In the background of a script SIGINT, and under nohup SIGHUP, are meant for others."""
    (tmp_path / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    command = f"trap '' INT HUP; exec {HOCKET} run -n 1 --no-record {tmp_path}/script.py"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "[0] ready\n"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_what_a_terminal_cannot_show_is_written_plainly() -> None:
    assert "20× → é".encode("ascii", stdio.AS_PLAIN) == b"20x -> ?"
