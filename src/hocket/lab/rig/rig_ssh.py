"""A secure shell for every host: keys that only this rig knows, a daemon in each host, settings for the client."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from hocket.errors import RigError
from hocket.lab.rig import rig_names as naming
from hocket.lab.rig import rig_processes
from hocket.lab.rig.rig_names import RigHost
from hocket.lab.rig.rig_needs import call, program

_PRIVILEGE_SEPARATION = Path("/run/sshd")
_DAEMON = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {client}.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowUsers root
PrintMotd no
MaxStartups 200
MaxSessions 200
AcceptEnv LANG LC_*
SetEnv {variable}={rig}
Subsystem sftp internal-sftp
"""
_CLIENT = """\
Host *
  User root
  Port 22
  IdentityFile {client}
  IdentitiesOnly yes
  IdentityAgent none
  BatchMode yes
  PreferredAuthentications publickey
  StrictHostKeyChecking yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  CheckHostIP no
  ConnectTimeout 10
  LogLevel ERROR
"""
_DEADLINE = 15.0


def command(rig: str) -> str:
    """The ssh command that reaches the hosts of ``rig`` by their names."""
    return f"ssh -F {naming.folder(rig)}/ssh_config"


def prepare(rig: str, crew: Iterable[RigHost]) -> None:
    """Make the keys and write the settings of client and daemons."""
    folder = naming.folder(rig)
    client = folder / "client_key"
    _make_key(client)
    known, aliases = [], []
    for host in crew:
        own = folder / host.name
        own.mkdir(mode=0o700)
        _make_key(own / "host_key")
        key = (own / "host_key.pub").read_text().split()
        known.append(f"{host.name},{host.address} {key[0]} {key[1]}\n")
        aliases.append(f"Host {host.name}\n  HostName {host.address}\n")
        settings = _DAEMON.format(folder=own, client=client, variable=naming.VARIABLE, rig=rig)
        (own / "sshd_config").write_text(settings)
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text("".join(aliases) + _CLIENT.format(folder=folder, client=client))


def start(rig: str, crew: Iterable[RigHost]) -> list[subprocess.Popen[bytes]]:
    """Start the daemon of each host; return when all of them listen.

    Each is the first process of a process namespace: what is started over ssh sees the processes of its own host only.
    """
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    daemons = [(host, _start_one(rig, host)) for host in crew]
    deadline = time.monotonic() + _DEADLINE
    for host, daemon in daemons:
        own = naming.folder(rig) / host.name
        while not (own / "sshd.pid").exists():  # written when it listens
            if daemon.poll() is not None or time.monotonic() > deadline:
                said = (own / "sshd.log").read_text().strip().splitlines()[-3:]
                raise RigError(f"sshd does not start in {host.name}: {'; '.join(said) or 'it says nothing'}")
            time.sleep(0.005)
    return [daemon for _, daemon in daemons]


def _start_one(rig: str, host: RigHost) -> subprocess.Popen[bytes]:
    own = naming.folder(rig) / host.name
    daemon = [program("sshd"), "-D", "-e", "-f", str(own / "sshd_config")]
    # Mounts come in but do not go out: else another rig's namespace, unmounted outside, would live on in here.
    alone = ["--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "slave"]
    argv = rig_processes.entering(rig, host.name, command(rig), [program("unshare"), *alone, *daemon])
    with (own / "sshd.log").open("wb") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )


def _make_key(path: Path) -> None:
    call(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "hocket-rig", "-f", str(path)])
