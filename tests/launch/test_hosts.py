"""``hocket run -H`` over a real sshd: output, environment, statuses, and what a user gets wrong."""

import os
import re
from pathlib import Path

from launch.sshd import Sshd

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
