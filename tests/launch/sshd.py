"""A real sshd on a port of this machine, with keys of its own, for the tests of launching over SSH."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from hocket.launch.local_crew import reserve_port

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


class Sshd:
    """Runs until it is closed. The hosts ``a``, ``b``, ``c`` of ``ssh`` are this machine through it.

    Attributes:
        ssh: The value for ``--ssh``.
        port: Where it listens.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1") -> None:
        self.folder = folder
        for name in ("host", "user", "stranger"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"{name}_key")]
            subprocess.run(command, check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        self._reserved = reserve_port()
        self.port = self._reserved.getsockname()[1]
        known = (folder / "host_key.pub").read_text().split()[:2]
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {' '.join(known)}\n")
        Path("/run/sshd").mkdir(exist_ok=True)
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress {address}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"SetEnv HOCKET_TEST_SESSION={os.environ.get('HOCKET_TEST_SESSION', '')}\n"
        )
        self.ssh = self.configured("")
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=self._log)
        deadline = time.monotonic() + 10
        while self._process.poll() is None:
            try:
                socket.create_connection((address, self.port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
        raise AssertionError((folder / "log").read_text())

    def configured(self, first: str, name: str = "ssh_config") -> str:
        """An ssh command with a configuration of its own, in which ``first`` comes before all else."""
        path = self.folder / name
        path.write_text(
            f"{first}\nHost a b c\n  HostName 127.0.0.1\nHost *\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder}/user_key\n  IdentitiesOnly yes\n  StrictHostKeyChecking yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )
        return f"ssh -F {path}"

    def command(self, hosts: str, folder: Path, text: str, *flags: str) -> list[str]:
        """The command that runs a script of ``text`` in ``folder``."""
        (folder / "script.py").write_text(text)
        ssh = [] if "--ssh" in flags else ["--ssh", self.ssh]
        return [sys.executable, "-m", "hocket.launch.cli", "run", "-H", hosts, *ssh, *flags, "script.py"]

    def run(
        self, hosts: str, folder: Path, text: str, *flags: str, stdin: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of ``text`` to its end, in ``folder``."""
        return subprocess.run(
            self.command(hosts, folder, text, *flags), cwd=folder, input=stdin, env={**os.environ, **env},
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()
        self._reserved.close()
