"""A long run of jobs whose workers are killed, stopped, told to leave, added and removed, at random, all the time.

    python tests/fuzz/churn.py --minutes 30 [--seed 1] [--strategy 'local_sgd(period=4)'] [--workers 3] [--hosts 3]

With ``--hosts`` they are on the hosts of a rig, which are killed, cut off, left out and added again, too.
Ends with an error, the seed and all that was done if a sample of an epoch was not counted exactly once, if workers
differ, if a job ends badly, or if anything of it is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from fuzz.churn_check import AT_ONCE, QUEUED, SERVED, check_job, check_nothing_is_left, is_queued, keeps_marks
from hocket.lab.rig import Rig
from hocket.transport.gate import STACK_SIGNAL

SCRIPT = Path(__file__).parent / "churn_script.py"
START = Path(__file__).parent.parent / "start"  # with which processes start in half the time
HOCKET = [sys.executable, "-m", "hocket.launch.cli"]


def switch(*strategies: str, every: int = 30, times: int = 60) -> str:
    """A switch from each strategy to the next one after so many steps, and again from the first."""
    names = [strategies[number % len(strategies)] for number in range(times + 1)]
    return " -> ".join([names[0], *(f"{name} @ step {every * at}" for at, name in enumerate(names) if at)])


FRAGMENTS = "diloco(period=4, fragments=2)"  # takes no new workers
SWITCHES = (
    switch("mirrored", "local_sgd(period=4)"),
    switch("easgd(period=3)", "delayed", "diloco(period=4)", "dmb(extra=1)", "mirrored"),
)
ON_HOSTS = (
    *("mirrored", "local_sgd(period=4)", "diloco(period=4)", "easgd(period=4)", "delayed", "dmb(extra=1)", FRAGMENTS),
    *SWITCHES,
)
IN_STEP = (*ON_HOSTS, "central", "central(fused=True)")
STRATEGIES = (*IN_STEP, *QUEUED)
BATCHES = ("fixed", "per-worker", "10")
CALLS = (0, 0, 100, 400, 501)  # of all workers before the training; after more than 500 nobody is replaced
SECONDS = (0.0, 0.0, 2.0, 2.0, 20.0)  # that rank 0 evaluates now and then; the longest time only once
PHASES = {  # of a worker, and the longest time after which it dies in it: none for those in which it kills itself
    "before": 0.0, "forward": 0.0, "backward": 0.0, "between": 0.0, "reading": 0.0,
    "exchange": 0.003, "step": 0.003, "next": 0.004, "leaving": 0.05, "collective": 0.01, "joining": 0.8,
}  # fmt: skip
ACTIONS = {"kill": 3, "order": 7, "both": 2, "stop": 2, "notice": 3, "spare": 1, "newcomer": 2, "resize": 2}
OF_HOSTS = {"host": 2, "cut": 1, "pair": 1, "hosts": 4}  # actions, beside the others
_STACKS = 2.0  # seconds in which the stacks of a job that is stuck reach its output
_SPARED = 300.0  # seconds without any change after which a job is stuck


class Churn:
    """One job, and what is done to its workers.

    Args:
        folder: An empty folder, the working folder of the job.
        seed: Decides what is done; when it is done differs between runs, as processes do.
        strategy: How the workers train together.
        workers: How many there are at the start.
        rig: The hosts on which they are; without one, they are on this machine alone.
    """

    def __init__(self, folder: Path, seed: int, strategy: str, workers: int, rig: Rig | None = None) -> None:
        self._rig, self._links = rig, list[tuple[float, tuple[str, ...]]]()  # links that are cut, and until when
        self._folder, self._chance, self._workers = folder, random.Random(seed), workers
        self._enough = 0  # batches of all workers before another one is killed
        self._told: dict[int, str] = {}  # processes that will end, and why
        self._stopped: dict[int, float] = {}  # processes that go on again, and when
        processes, saves = self._chance.randint(0, 1), self._chance.random() < 0.5
        marks = "marks" if keeps_marks(strategy) else "lines"
        queued = is_queued(strategy)
        # With others, more of what a lost worker had may be missing at an epoch's end if scripts are ahead.
        self.ahead = ahead = strategy in AT_ONCE and self._chance.random() < 0.3
        calls, seconds = self._chance.choice(CALLS), self._chance.choice(SECONDS)
        habits = [str(processes), marks, "ahead" if ahead else "one by one", str(calls), str(seconds)]
        strategy, _, servers = strategy.partition(" --servers ")
        servers = servers or ("1" if strategy.startswith(SERVED) else "0")
        flags = [] if rig is None else ["--ssh", str(folder / "shell"), "-H", self._slots(), "--transport", "tcp"]
        flags += ["-n", str(workers), "--on-loss", "replace", "--spares", "1"]
        flags += ["--max-losses", "100000", "--strategy", strategy, "--log-dir", "logs"]
        flags += [] if queued else ["--check-replicas", "1", "--batch", self._chance.choice(BATCHES)]
        flags += ["--servers", servers]
        flags += ["--checkpoint", "saved", "--checkpoint-every", "50"] if saves else []
        (folder / "temporary").mkdir()
        start = os.pathsep.join(filter(None, (str(START), os.environ.get("PYTHONPATH"))))
        env = {
            **os.environ,
            "PYTHONPATH": start,
            "OMP_NUM_THREADS": "1",
            "HOCKET_RUN_DIR": "runs",
            "TMPDIR": str(folder / "temporary"),
        }
        if rig is not None:
            rig.write_shell(folder / "shell")
            flags += ["-x", "CHURN_SEES_ALL=1", "-x", f"TMPDIR={folder / 'temporary'}"]
        self.command = [*HOCKET, "run", *flags, str(SCRIPT), *habits]
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.job = subprocess.Popen(
                self.command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.mark = ""

    def run(self, seconds: float) -> None:
        """Do something now and then, for so long; then let the job end by itself."""
        self._wait_for_beginning()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._pause(self._chance.uniform(0.5, 2.0))
            actions = ACTIONS if self._rig is None else ACTIONS | OF_HOSTS
            (action,) = self._chance.choices(list(actions), list(actions.values()))
            getattr(self, f"_{action}")()
        while self._stopped or self._links:
            self._pause(0.1)
        for order in self._folder.glob("order.*"):
            order.unlink(missing_ok=True)
        (self._folder / "over").touch()
        self.job.wait(_SPARED)

    def close(self) -> None:
        """End the job, if it has not ended; its workers say where they are."""
        for process in self._stopped:
            self._signal(process, signal.SIGCONT)
        if self.job.poll() is None:
            here = {int(path.stem) for path in self._folder.glob("*.log")} & set(self._processes())
            for process in here:
                self._signal(process, STACK_SIGNAL)
            time.sleep(_STACKS)
            self._signal(self.job.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.wait(20)
        self.job.kill()
        self.job.wait()

    def say(self, *words: object) -> None:
        """Write down what is done."""
        with (self._folder / "actions").open("a") as actions:
            print(f"{time.monotonic():.4f}", *words, file=actions)

    def _wait_for_beginning(self) -> None:
        deadline = time.monotonic() + _SPARED
        while len(self._workers_at_work()) < self._workers:
            assert self.job.poll() is None and time.monotonic() < deadline, (self._folder / "err").read_text()
            time.sleep(0.1)
        environ = self._environ(self._workers_at_work()[0])
        self.mark = environ["HOCKET_JOB"]

    def _pause(self, seconds: float) -> None:
        """Wait, and let stopped processes go on when it is time."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._let_go_on(now)
            assert self.job.poll() is None, "the job has ended by itself"
            changed = max((p.stat().st_mtime for p in self._folder.glob("*.log")), default=time.time())
            assert time.time() - changed < _SPARED, "the job is stuck"
            time.sleep(min(0.05, max(0.0, end - now)))

    def _let_go_on(self, now: float) -> None:
        """Undo what was done for a while."""
        for until, hosts in [link for link in self._links if link[0] < now]:
            self._links.remove((until, hosts))
            self._connect(hosts, connected=True)
        for process, until in list(self._stopped.items()):
            if until < now:
                self._signal(process, signal.SIGCONT)
                del self._stopped[process]

    def _processes(self) -> list[int]:
        """All processes of this job, this one excepted, that have not ended."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if entry.joinpath("cwd").readlink() == self._folder and int(entry.name) != self.job.pid:
                    found.append(int(entry.name))
        return sorted(found)

    def _environ(self, process: int) -> dict[str, str]:
        with contextlib.suppress(OSError):
            texts = Path(f"/proc/{process}/environ").read_text().split("\0")
            return dict(text.split("=", 1) for text in texts if "=" in text)
        return {}

    def _workers_at_work(self) -> list[int]:
        """The processes that have joined the others, and are not about to end."""
        here, found = set(self._processes()), []
        for path in self._folder.glob("*.log"):
            text = path.read_text()
            if int(path.stem) in here and " in " in text and " left\n" not in text and " end " not in text:
                found.append(int(path.stem))
        return sorted(set(found) - self._told.keys())

    def _victims(self, count: int = 1) -> list[int]:
        """Some workers, of which at least one other is left; fewer if there are not enough."""
        workers, done = self._workers_at_work(), self._batches()
        if self._rig is not None:  # two in a row may not die with the same samples
            if any(path.suffix != ".1" for path in self._folder.glob("order.*")):  # somebody is still to die
                self._enough = done + 6 * len(workers)
            if done < self._enough:
                return []
        self._enough = done + 6 * len(workers)
        return self._chance.sample(workers, max(0, min(count, len(workers) - 1)))

    def _batches(self) -> int:
        return sum(path.read_text().count(" batch ") for path in self._folder.glob("*.log"))

    def _signal(self, process: int, number: int) -> None:
        with contextlib.suppress(OSError):
            if process == self.job.pid or Path(f"/proc/{process}/cwd").readlink() == self._folder:
                os.kill(process, number)

    def _kill(self, count: int = 1) -> None:
        for process in self._victims(count):
            self._told[process] = "killed"
            self.say("kill", process)
            self._signal(process, signal.SIGKILL)
            time.sleep(self._chance.choice((0.0, 0.01, 0.1, 0.12)) if count > 1 else 0.0)

    def _both(self) -> None:
        """Two workers, one shortly after the other."""
        self._kill(2)

    def _order(self) -> None:
        phase = self._chance.choice(list(PHASES))
        seconds = self._chance.uniform(0.0, PHASES[phase])
        victims = [1] if phase == "joining" else self._victims()
        for process in victims:
            if process > 1:
                self._told[process] = phase
            self.say("order", process, phase, f"{seconds:.6f}")
            made = self._folder / f"new-order.{process}"
            made.write_text(f"{phase} {seconds:.6f}")
            made.rename(self._folder / f"order.{process}")

    def _stop(self) -> None:
        """Stop any process of the job for some seconds, the coordinator and newcomers included."""
        process, seconds = self._chance.choice(self._processes()), self._chance.uniform(0.05, 3.0)
        self.say("stop", process, f"{seconds:.3f}")
        self._signal(process, signal.SIGSTOP)
        self._stopped[process] = time.monotonic() + seconds

    def _notice(self) -> None:
        for process in self._victims():
            self._told[process] = "notice"
            self.say("notice", process)
            self._signal(process, signal.SIGTERM)

    def _others(self) -> list[int]:
        """Spares, and newcomers that have not joined."""
        known = {int(path.stem) for path in self._folder.glob("*.log") if " in " in path.read_text()}
        others = [process for process in self._processes() if process not in known]
        starters = {self.job.pid, *(p for p in others if is_agent(p))}
        return [p for p in others if "HOCKET_NEWCOMER" in self._environ(p) and parent(p) in starters]

    def _spare(self) -> None:
        spares = [process for process in self._others() if "HOCKET_SPARE_FD" in self._environ(process)]
        for process in self._chance.sample(spares, min(1, len(spares))):
            self.say("kill spare", process)
            self._signal(process, signal.SIGKILL)

    def _newcomer(self) -> None:
        """Kill a worker, and who comes in its place a little later."""
        self._kill()
        time.sleep(self._chance.uniform(0.0, 1.0))
        began = [p for p in self._others() if (self._folder / f"{p}.log").exists()]
        for process in began[:1]:
            self.say("kill newcomer", process)
            self._signal(process, signal.SIGKILL)

    def _resize(self) -> None:
        count = self._chance.randint(2, self._workers + 1)
        if len(workers := self._workers_at_work()) < 2:
            return
        self.say("resize", count, "now", *workers)
        self._ask("-n", str(count))

    def _ask(self, *flags: str) -> None:
        command = [*HOCKET, "resize", self.mark[:6], *flags]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while asked.poll() is None:
            self._let_go_on(time.monotonic())
            time.sleep(0.05)
        said, _ = asked.communicate()
        self.say("resized", said.strip())

    def _slots(self, left_out: str = "") -> str:
        """All hosts but one, each with a slot more than is needed."""
        assert self._rig is not None
        slots = -(-self._workers // len(self._rig.hosts)) + 1
        return ",".join(f"{host}:{slots}" for host in self._rig.hosts if host != left_out)

    def _other_host(self) -> str:
        """A host that may go: not the first, which has the coordinator; empty if the others have no worker then."""
        assert self._rig is not None
        free = [host for host in list(self._rig.hosts)[1:] if not any(host in hosts for _, hosts in self._links)]
        host = self._chance.choice(free) if free else ""
        mine = set(self._rig.processes(host)) if host else set()
        left = [process for process in self._workers_at_work() if process not in mine]
        return host if any(self._host_of(process) == "h1" for process in left) else ""

    def _host_of(self, process: int) -> str:
        return self._environ(process).get("HOCKET_HOST_NAME", "")

    def _tell_all(self, host: str, why: str) -> None:
        self._told |= {process: why for process in self._workers_at_work() if self._host_of(process) == host}

    def _host(self) -> None:
        """Kill all that runs on a host."""
        if self._rig is not None and (host := self._other_host()):
            self.say("kill host", host)
            self._tell_all(host, "its host was killed")
            self._rig.kill(host)

    def _cut(self) -> None:
        """Cut a host off, mostly for so short that nothing is lost."""
        if host := self._other_host():
            seconds = self._chance.choice((0.5, 1.0, 2.0, 4.0, 15.0))
            if seconds > 10:
                self._tell_all(host, "its host was cut off")
            self._disconnect((host,), seconds)

    def _pair(self) -> None:
        """Cut the link between two hosts, both of which reach the first."""
        assert self._rig is not None
        hosts = tuple(list(self._rig.hosts)[1:3])
        if len(hosts) == 2 and not self._links and self._other_host():
            seconds = self._chance.choice((1.0, 3.0, 14.0))
            if seconds > 10:  # nobody knows who goes
                for host in hosts:
                    self._tell_all(host, "its host was cut off")
            self._disconnect(hosts, seconds)

    def _disconnect(self, hosts: tuple[str, ...], seconds: float) -> None:
        self.say("cut", *hosts, seconds)
        self._connect(hosts, connected=False)
        self._links.append((time.monotonic() + seconds, hosts))

    def _connect(self, hosts: tuple[str, ...], *, connected: bool) -> None:
        assert self._rig is not None
        if len(hosts) == 1:
            (self._rig.restore if connected else self._rig.cut)(hosts[0])
        else:
            (self._rig.restore_between if connected else self._rig.cut_between)(*hosts)
        self.say("connected" if connected else "cut", *hosts)

    def _hosts(self) -> None:
        """Leave a host out, or have all again."""
        out = self._other_host() if self._chance.random() < 0.3 else ""
        self._tell_all(out, "its host was left out")
        self.say("hosts", self._slots(out))
        self._ask("-H", self._slots(out), "-n", str(self._workers))


def parent(process: int) -> int:
    """The process that has started ``process``; 0 if that is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def is_agent(process: int) -> bool:
    """Whether it starts the processes of a host."""
    with contextlib.suppress(OSError):
        return b"hocket.launch.agent" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def churn(folder: Path, seconds: float, seed: int, strategy: str, workers: int = 3, rig: Rig | None = None) -> str:
    """Run one job and check it; a line that says what has happened.

    Args:
        folder: An empty folder for it.
        seconds: How long something is done to it.
        seed: Decides what is done.
        strategy: How the workers train together.
        workers: How many there are.
        rig: The hosts on which they are, if they are not on this machine alone.
    """
    made = Churn(folder, seed, strategy, workers, rig)
    try:
        made.run(seconds)
        assert made.job.returncode == 0, f"status {made.job.returncode}"
        said = check_job(folder, strategy, ahead=made.ahead)
        check_nothing_is_left(folder, made.mark)
    except BaseException as error:
        made.close()
        actions = (folder / "actions").read_text() if (folder / "actions").exists() else ""
        text = f"{actions}\n{(folder / 'err').read_text()[-20000:]}\n{' '.join(made.command)}\nseed {seed}: {error}"
        raise AssertionError(text) from error
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--strategy", default="", help="one strategy; without it, all in turn")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=0, help="of a rig; without it, all workers are on this machine")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each job")
    told = parser.parse_args()
    end, seed = time.monotonic() + 60 * told.minutes, told.seed
    while time.monotonic() < end:
        strategies = ON_HOSTS if told.hosts else STRATEGIES
        strategy = told.strategy or strategies[seed % len(strategies)]
        shown = strategy if len(strategy) < 100 else f"{strategy[:100]} …"
        print(f"seed {seed}: {shown} ", end="", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"churn-{seed}-")).resolve()
        with Rig.up(told.hosts, name=f"churn-{seed}") if told.hosts else contextlib.nullcontext() as rig:
            print(churn(folder, told.seconds, seed, strategy, told.workers, rig), flush=True)
        subprocess.run(["rm", "-r", str(folder)], check=True)
        seed += 1


if __name__ == "__main__":
    main()
