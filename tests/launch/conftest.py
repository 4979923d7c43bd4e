"""Fixtures of the launcher's tests."""

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import slurm as slurms
from launch.sshd import SSHD, Sshd


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    if not Path(SSHD).exists():
        pytest.skip("sshd is not installed")
    shell = pwd.getpwuid(os.getuid()).pw_shell
    if shell.endswith(("nologin", "false")):
        pytest.skip(f"nobody can log in as this user, whose shell is {shell}")
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurms.Slurm]:
    if reason := slurms.missing():
        pytest.skip(reason)
    made = slurms.Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()
