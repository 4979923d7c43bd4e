"""``hocket run -H`` over a real sshd: output, environment, statuses, and what a user gets wrong."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hocket.launch import agent_links, machine
from launch.sshd import Sshd
from launch.test_run import HOCKET

TELL = """
import json, os
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
         "MASTER_PORT", "HOCKET_HOST_NAME", "HOCKET_ADDRESS", "HOCKET_RENDEZVOUS", "HOCKET_JOB", "GLOO_SOCKET_IFNAME",
         "NCCL_SOCKET_IFNAME", "HOCKET_SECRET_FD", "HOCKET_SSH", "OMP_NUM_THREADS")
secret = os.read(int(os.environ["HOCKET_SECRET_FD"]), 100)
assert secret.hex() not in str(dict(os.environ))
print(*(f"{name}={os.environ.get(name)}" for name in names), f"secret={len(secret)}:{hash(secret)}", os.getcwd())
"""


def test_workers_of_several_hosts_get_their_places_and_one_secret(sshd: Sshd, tmp_path: Path) -> None:
    done = sshd.run("a:2,b:1", tmp_path, TELL, PYTHONHASHSEED="0", OMP_NUM_THREADS="")
    assert done.returncode == 0, done.stderr
    told = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in sorted(done.stdout.splitlines())]
    assert [line[:3] for line in sorted(done.stdout.splitlines())] == ["[0]", "[1]", "[2]"]
    assert [t["RANK"] for t in told] == ["0", "1", "2"] and {t["WORLD_SIZE"] for t in told} == {"3"}
    assert [t["LOCAL_RANK"] for t in told] == ["0", "1", "0"]
    assert [t["LOCAL_WORLD_SIZE"] for t in told] == ["2", "2", "1"]
    assert [t["GROUP_RANK"] for t in told] == ["0", "0", "1"] and {t["GROUP_WORLD_SIZE"] for t in told} == {"2"}
    assert [t["HOCKET_HOST_NAME"] for t in told] == ["a", "a", "b"]
    assert {t["MASTER_ADDR"] for t in told} == {t["HOCKET_ADDRESS"] for t in told} == {"127.0.0.1"}
    assert {t["GLOO_SOCKET_IFNAME"] for t in told} == {t["NCCL_SOCKET_IFNAME"] for t in told} == {"lo"}
    assert [t["HOCKET_RENDEZVOUS"] for t in told] == [f"hocket-{t['HOCKET_JOB']}-{t['GROUP_RANK']}" for t in told]
    assert len({t["HOCKET_JOB"] for t in told}) == len({t["MASTER_PORT"] for t in told}) == 1
    assert len({t["secret"] for t in told}) == 1 and told[0]["secret"].startswith("32:")
    assert {t["HOCKET_SSH"] for t in told} == {"None"}
    cores = len(os.sched_getaffinity(0))
    assert [t["OMP_NUM_THREADS"] for t in told] == [str(max(1, cores // count)) for count in (2, 2, 1)]


def test_the_status_of_a_rank_elsewhere_is_the_jobs(sshd: Sshd, tmp_path: Path) -> None:
    text = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)"
    done = sshd.run("a:1,b:1", tmp_path, text)
    assert done.returncode == 7
    assert "hocket: rank 1 on b ended with exit code 7" in done.stderr


def test_gloo_finds_its_way(sshd: Sshd, tmp_path: Path) -> None:
    text = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)\nprint('sum', int(x))\n"
        "dist.destroy_process_group()\n"
    )
    done = sshd.run("a:1,b:1", tmp_path, text)
    assert sorted(done.stdout.splitlines()) == ["[0] sum 2", "[1] sum 2"], done.stderr


def test_the_first_slots_of_a_host_file(sshd: Sshd, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2  # first\nb:2\nnowhere.invalid:4\n")
    (tmp_path / "script.py").write_text("import os; print(os.environ['HOCKET_HOST_NAME'], os.environ['WORLD_SIZE'])")
    command = [*HOCKET, "run", "--hostfile", "hosts", "-n", "3", "--ssh", sshd.ssh, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(done.stdout.splitlines()) == ["[0] a 3", "[1] a 3", "[2] b 3"], done.stderr


def test_a_host_without_a_number_has_a_worker_per_gpu_or_core(sshd: Sshd, tmp_path: Path) -> None:
    done = sshd.run("localhost", tmp_path, "print('here')", CUDA_VISIBLE_DEVICES="0,1,2")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] here" for rank in range(3)], done.stderr
    done = sshd.run("localhost", tmp_path, "print('here')", CUDA_VISIBLE_DEVICES="")
    assert len(done.stdout.splitlines()) == machine.cores(), done.stderr


def test_a_traceback_from_elsewhere_comes_last_and_once(sshd: Sshd, tmp_path: Path) -> None:
    text = (
        "import os, sys, time\nprint('on stderr', file=sys.stderr)\n"
        "if os.environ['RANK'] == '1': raise ValueError('this rank is broken')\ntime.sleep(60)"
    )
    done = sshd.run("a:1,b:1", tmp_path, text, "--log-dir", "logs")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: this rank is broken"
    assert "hocket: rank 1 on b ended with exit code 1 after " in done.stderr
    assert done.stderr.count("Traceback") == 1 and "[0] on stderr" in done.stderr
    assert "ValueError: this rank is broken" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "on stderr\n"


def test_what_a_login_prints_is_not_taken_for_messages(sshd: Sshd, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"
    noise = "printf 'Welcome!\\n\\000HOCK\\n'; echo 'motd of the day' >&2"
    noisy.write_text(f'#!/bin/sh\n{noise}\nexec {sshd.ssh} "$@"\n')
    noisy.chmod(0o700)
    done = sshd.run("a:1,b:1", tmp_path, "print('hello')", "--ssh", str(noisy))
    assert sorted(done.stdout.splitlines()) == ["[0] hello", "[1] hello"], done.stderr
    assert "motd" not in done.stderr


def test_output_that_looks_like_messages_is_output(sshd: Sshd, tmp_path: Path) -> None:
    text = (
        "import sys\nfrom hocket.launch import message_pipe\n"
        "sys.stdout.buffer.write(message_pipe.MARKER + message_pipe.encode('ended', rank=0, status=9) + b'\\nlast\\n')"
    )
    done = sshd.run("a:1", tmp_path, text)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[0] last"


def test_much_output_arrives_whole(sshd: Sshd, tmp_path: Path) -> None:
    text = "import os\nfor i in range(20_000): print(i, 'x' * 500)\nprint('a' + 'b' * 3_000_000 + 'c')"
    done = sshd.run("a:1,b:1", tmp_path, text)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ") and "b" not in line]
        assert [int(line.split()[1]) for line in lines if "x" in line] == list(range(20_000))
    assert done.stdout.count("b") == 6_000_000


@pytest.mark.few(1)
@pytest.mark.parametrize("hosts", ["a:1,b:1", "localhost:1,b:1"])
def test_the_standard_input_is_rank_0s(sshd: Sshd, tmp_path: Path, hosts: str) -> None:
    given = "".join(f"line {i} {'y' * 90}\n" for i in range(5_000))
    text = "import os, sys; d = sys.stdin.read(); print(os.environ['RANK'], len(d), d.endswith('yyy' + chr(10)))"
    done = sshd.run(hosts, tmp_path, text, stdin=given)
    assert sorted(done.stdout.splitlines()) == [f"[0] 0 {len(given)} True", "[1] 1 0 False"], done.stderr


def test_input_that_nobody_reads_does_no_harm(sshd: Sshd, tmp_path: Path) -> None:
    done = sshd.run("a:1", tmp_path, "print('done')", stdin="x" * 1_000_000)
    assert done.returncode == 0 and done.stdout == "[0] done\n", done.stderr


def test_variables_that_are_passed_on(sshd: Sshd, tmp_path: Path) -> None:
    text = "import os; print(*(os.environ.get(n) for n in ('MINE', 'OTHER', 'NCCL_DEBUG', 'ELSE', 'HOCKET_TIMEOUT')))"
    done = sshd.run("a:1", tmp_path, text, "-x", "MINE", "-x", "OTHER=a b", "--timeout", "77",
                    MINE="1", ELSE="2", NCCL_DEBUG="INFO")  # fmt: skip
    assert done.stdout == "[0] 1 a b INFO None 77\n", done.stderr


def test_a_record_has_the_hosts_and_what_workers_tell(sshd: Sshd, tmp_path: Path) -> None:
    text = (
        "import os\nfrom hocket import events\n"
        "sink = events.PipeSink(int(os.environ['HOCKET_EVENTS']))\n"
        "sink.put(events.Metrics(1, 2, 3.0, {'loss': 0.5 + int(os.environ['RANK'])}))"
    )
    done = sshd.run("a:1,b:1", tmp_path, text, HOCKET_RUN_DIR="runs")
    assert done.returncode == 0, done.stderr
    command = [*HOCKET, "runs", "--run-dir", "runs", "show", "last"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
    assert re.search(r"\n  b  ranks 1-1, at 127.0.0.1 \(lo\), ", shown), shown
    assert "loss" in shown


@pytest.mark.all_combinations
def test_a_blocked_screen_does_not_end_the_job(sshd: Sshd, tmp_path: Path) -> None:
    """Slow is not dead: who reads the output may stop reading for longer than agents wait for a word."""
    command = sshd.command("a:1,b:1", tmp_path, "for i in range(20_000): print(i, 'x' * 500)")
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL) as job:
        assert job.stdout is not None and job.stdout.readline()
        time.sleep(agent_links.SILENCE + 2)  # it is the time itself that is tested
        assert job.poll() is None
        assert len(job.stdout.readlines()) == 39_999
    assert job.returncode == 0


BEGUN = """
import os, time
from hocket.events import FOLDER_BEGUN, Happening, PipeSink
os.mkdir(".unfinished")
PipeSink(int(os.environ["HOCKET_LEDGER"])).put(Happening(FOLDER_BEGUN, {"folder": os.path.abspath(".unfinished")}))
print("running", flush=True)
time.sleep(600)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("host", ["a", "localhost"])
def test_an_unfinished_checkpoint_is_removed_where_it_is(
    sshd: Sshd, tmp_path: Path, host: str, how: signal.Signals
) -> None:
    command = sshd.command(f"{host}:1", tmp_path, BEGUN)
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        assert job.stdout is not None and "running" in job.stdout.readline()
        job.send_signal(how)
    deadline = time.monotonic() + 5
    while (tmp_path / ".unfinished").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
