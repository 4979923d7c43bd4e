"""A real Slurm of two nodes on this machine, for the tests of launching under it."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from conftest import KEPT

from hocket.launch.local_crew import reserve_port

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CONFIGURATION = """ClusterName=hocket-test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=300
KillWait=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None if one can."""
    if os.geteuid():
        return "slurmd needs root"
    absent = [name for name in NEEDED if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]
    return f"{', '.join(absent)}: not installed (slurm-wlm)" if absent else None


class Slurm:
    """Runs until it is closed.

    Attributes:
        environment: What its commands need.
        processes: Its daemons, by name: slurmctld, n1, n2.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reserved = [reserve_port() for _ in range(3)]
        ports = [each.getsockname()[1] for each in reserved]
        path = folder / "slurm.conf"
        path.write_text(CONFIGURATION.format(folder=folder, ports=ports, host=os.uname().nodename.partition(".")[0]))
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        (folder / "home").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(path), "HOME": str(folder / "home")}
        for each in reserved:
            each.close()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start("slurmctld", "slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start_node(node)

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, and wait until the node can be used."""
        self._start(node, "slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 180
        while (state := self._state(node)) not in ("idle", "mixed"):
            assert time.monotonic() < deadline, (state, (self.folder / "slurmctld.log").read_text()[-3000:])
            if state.startswith("down"):
                self.command("scontrol", "update", f"nodename={node}", "state=resume")
            time.sleep(0.1)

    def kill_node(self, node: str) -> None:
        """As if the node had lost its power: all of its processes are gone at once."""
        tasks = self.tasks(node)
        steps = {parent for parent in map(_parent, tasks) if b"slurmstepd" in _read(f"/proc/{parent}/cmdline")}
        for process in [self.processes[node].pid, *steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.processes[node].wait()

    def tasks(self, node: str) -> list[int]:
        """The processes of jobs on a node."""
        wanted = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()}
        return [
            int(path.name) for path in Path("/proc").glob("[0-9]*")
            if wanted <= set(_read(f"{path}/environ").split(b"\0"))
        ]  # fmt: skip

    def command(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of its commands to its end."""
        return subprocess.run(
            words, env={**self.environment, **more}, capture_output=True, text=True, timeout=300, check=False
        )

    def close(self) -> None:
        for name in ("n1", "n2", "slurmctld"):
            process = self.processes[name]
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            KEPT.discard(process.pid)

    def _state(self, node: str) -> str:
        return self.command("sinfo", "-h", "-n", node, "-o", "%T").stdout.strip()

    def _start(self, name: str, program: str, *arguments: str) -> None:
        path = shutil.which(program) or f"/usr/sbin/{program}"
        with (self.folder / f"{name}.out").open("w") as out:
            environment = {key: value for key, value in self.environment.items() if key != "HOCKET_TEST_SESSION"}
            KEPT.discard(self.processes[name].pid if name in self.processes else 0)
            self.processes[name] = subprocess.Popen([path, *arguments], env=environment, stdout=out, stderr=out)
        KEPT.add(self.processes[name].pid)


def _parent(process: int) -> int:
    fields = _read(f"/proc/{process}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
