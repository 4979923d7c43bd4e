"""Rigs that are damaged, abandoned or not possible at all."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Rigs
from lab.rig.test_rig import sleeping

from hocket.errors import UsageError
from hocket.lab.rig import Rig, names, rig_needs
from hocket.lab.rig.rig import down


def lose_a_name(rig: Rig) -> None:
    subprocess.run(["ip", "netns", "delete", rig.hosts["h1"].namespace], check=True)


def lose_all_names(rig: Rig) -> None:
    for host in [*rig.hosts, "switch"]:
        subprocess.run(["ip", "netns", "delete", f"hocket.{rig.name}.{host}"], check=True)


def lose_the_folder(rig: Rig) -> None:
    shutil.rmtree(f"/run/hocket-rig/{rig.name}")


def garble(rig: Rig) -> None:
    Path(f"/run/hocket-rig/{rig.name}/rig.json").write_text("{")


def lose_files(rig: Rig) -> None:
    shutil.rmtree(f"/etc/netns/{rig.hosts['h2'].namespace}")


def lose_the_cable(rig: Rig) -> None:
    subprocess.run(["ip", "link", "delete", f"hk-{rig.name}"], check=True)


def lose_nearly_all(rig: Rig) -> None:
    lose_all_names(rig)
    lose_the_folder(rig)


DAMAGES = [lose_a_name, lose_all_names, lose_the_folder, garble, lose_files, lose_the_cable, lose_nearly_all]


@pytest.mark.few(3)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_down_removes_what_is_left_of_a_damaged_rig(rig: Rigs, damage: Callable[[Rig], None]) -> None:
    made = rig(2)
    sleeper = sleeping(made, "h1")
    damage(made)
    assert down(made.name)
    assert sleeper.wait(30) == -signal.SIGKILL
    assert made.name not in names() and not list(Path("/sys/class/net").glob(f"*{made.name}"))
    assert not down(made.name)
    made.down()


@pytest.mark.parametrize("damage", [garble, lose_all_names, lose_the_cable], ids=lambda damage: damage.__name__)
def test_up_replaces_a_damaged_rig(rig: Rigs, damage: Callable[[Rig], None]) -> None:
    made = rig(2, keep=True)
    with pytest.raises(UsageError, match="already"):
        rig(2, name=made.name)
    damage(made)
    again = rig(3, name=made.name)
    assert subprocess.check_output(again.command("h3", ["hostname"]), text=True) == "h3\n"


def test_a_rig_whose_process_was_killed_is_replaced(rig: Rigs) -> None:
    name = rig.name()
    code = f"import signal, hocket.lab.rig as r; r.Rig.up(2, name={name!r}); print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "up\n"
        with pytest.raises(UsageError, match="already"):
            rig(2, name=name)
        maker.kill()
    listed = subprocess.check_output([sys.executable, "-m", "hocket.launch.cli", "rig", "list"], text=True)
    assert f"{name}: " in listed and "left over" in listed
    assert len(rig(3, name=name).hosts) == 3


@pytest.mark.few(2)
@pytest.mark.parametrize("args", [["up", "2"], ["down"], ["exec", "true"], ["list"]], ids=lambda args: args[0])
def test_without_root_the_reason_is_one_line(rig: Rigs, args: list[str]) -> None:
    code = (
        "import os, sys; from hocket.launch import cli\n"
        "cli.app(['rig', 'list'], standalone_mode=False)  # loads what nobody else may read here\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"sys.argv = ['hocket', 'rig', *{args!r}]; cli.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "needs root" in ran.stderr and "sudo" in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "package"), [("ip", "iproute2"), ("sshd", "openssh-server"), ("ssh-keygen", "openssh-client")]
)
def test_a_missing_program_is_named_with_its_package(
    rig: Rigs, program: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == program else which(name, path=path))
    reason = rig_needs.missing()
    assert reason is not None and f"apt-get install {package}" in reason
