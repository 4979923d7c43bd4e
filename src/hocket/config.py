"""What a process is told from outside; the only module that reads ``os.environ``.

Every setting has one definition in ``SETTINGS``, from which the flags of ``hocket run`` and the environment
variables follow. Precedence: flag, then environment, then the script, then the default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hocket.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """One value that a user may set by flag or environment variable.

    Attributes:
        name: The flag without its dashes.
        default: What holds when nobody sets it.
        choices: The values allowed; empty means any.
        help: What it does, in one sentence.
    """

    name: str
    default: str
    choices: tuple[str, ...]
    help: str

    @property
    def variable(self) -> str:
        return "HOCKET_" + self.name.replace("-", "_").upper()


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting(
            "strategy",
            "mirrored",
            (),
            "How the workers train together: mirrored, central, delayed, dmb, full_batch, local_sgd, diloco, easgd, "
            "gossip, hogwild, or with servers ps, bsp, ssp, asynchronous, softsync, downpour.",
        ),
        Setting("timeout", "1800", (), "Seconds to wait for a rank that is alive but does not arrive."),
        Setting(
            "on-nan",
            "raise",
            ("raise", "skip", "ignore"),
            "A gradient that is not finite: end the job, skip the step on all ranks, or do not look.",
        ),
        Setting(
            "transport",
            "auto",
            ("auto", "shared-memory", "gloo"),
            "How bytes move between workers; auto is shared memory on x86-64 Linux, Gloo elsewhere.",
        ),
        Setting(
            "checkpoint",
            "",
            (),
            "The folder for checkpoints of a script that calls hocket.resume(); the same command continues from there.",
        ),
        Setting("checkpoint-every", "500", (), "Steps between two checkpoints."),
        Setting("checkpoint-keep", "3", (), "How many checkpoints are kept."),
        Setting(
            "check-replicas",
            "auto",
            (),
            "Every so many steps, compare the parameters of all workers and end the job if they differ; 0 is never, "
            "auto in the first steps, at checkpoints, at the end, and between for 0.5 % of the time.",
        ),
        Setting("servers", "0", (), "How many parameter servers, for the strategies that need them: ps, downpour …"),
        Setting(
            "tls",
            "auto",
            ("auto", "on", "off"),
            "Encryption between workers and servers over TCP; auto is wherever a server can be reached from beyond its "
            "host.",
        ),
        Setting("verbose", "off", ("off", "on"), "Say more: which parameters are on which server, for example."),
        Setting(
            "hide-torch-env",
            "off",
            ("off", "on"),
            "Keep RANK, WORLD_SIZE and the like from the script, so that accelerate, the Trainer of Hugging Face or "
            "Lightning see one process and wrap nothing; Hocket does the rest.",
        ),
        Setting("timeline", "", (), "A .json file for the timeline of the run, for Perfetto, Chrome, hocket trace."),
        Setting("ssh", "ssh", (), "The command for reaching the hosts of -H, with options: 'ssh -p 2222 -i key'."),
        Setting("python", "", (), "The interpreter on the other hosts, if it is not at the same path as here."),
        Setting("interface", "", (), "The network interface for the job, or several (eth0,ens3); else it is found."),
        Setting("seed", "", (), "Where hocket.init() starts all random numbers of a worker; else the script does."),
        Setting("run-dir", "hocket-runs", (), "The folder for the records of runs, one folder each."),
    )
}


@dataclass(frozen=True)
class Config:
    """Who this process is and what it was told; ``None`` where nobody said.

    ``local_size`` is 0 where nobody has said how many workers are on this host: they find out.
    ``address`` and ``port`` are those of the job's store (MASTER_ADDR); ``host_name`` is this host as the user wrote
    it, ``host_address`` where the other hosts reach it, and ``secret_fd`` the pipe with the job's 32-byte secret;
    ``events`` and ``ledger`` are pipes to the launcher and to its guardian.
    ``server`` is the number of a server, from 0; a process that has one is no worker. In a job with servers,
    ``address`` and ``port`` are those of server 0.
    """

    launched: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    store_is_hosted: bool = False
    rendezvous: str | None = None
    restart: str = "0"
    events: int | None = None
    ledger: int | None = None
    strategy: str | None = None
    timeout: float = 1800.0
    on_nan: str | None = None
    transport: str = "auto"
    checkpoint: str | None = None
    checkpoint_every: int = 500
    checkpoint_keep: int = 3
    check_replicas: int | None = None
    job: str | None = None
    group: int | None = None
    host_name: str | None = None
    host_address: str | None = None
    secret_fd: int | None = None
    interface: str | None = None
    server: int | None = None
    servers: int = 0
    tls: str = "auto"
    verbose: bool = False
    seed: int | None = None
    timeline: bool = False


def read(environ: Mapping[str, str] | None = None) -> Config:
    """Read the environment as ``hocket run`` or torchrun has set it; alone when nobody has."""
    env = _reveal(os.environ if environ is None else environ)
    launched = ("RANK" in env or "HOCKET_SERVER" in env) and "WORLD_SIZE" in env
    size = _integer(env, "WORLD_SIZE", 1) if launched else 1
    return Config(
        launched=launched,
        rank=_integer(env, "RANK", 0) if launched else 0,
        size=size,
        local_rank=_integer(env, "LOCAL_RANK", 0) if launched else 0,
        local_size=_integer(env, "LOCAL_WORLD_SIZE", 0) if launched else 1,
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_integer(env, "MASTER_PORT", 0) or None,
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        rendezvous=env.get("HOCKET_RENDEZVOUS") if launched else None,
        restart=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        events=_integer(env, "HOCKET_EVENTS", -1) if launched and "HOCKET_EVENTS" in env else None,
        ledger=_integer(env, "HOCKET_LEDGER", -1) if launched and "HOCKET_LEDGER" in env else None,
        strategy=env.get("HOCKET_STRATEGY") or None,
        timeout=seconds(env.get("HOCKET_TIMEOUT") or SETTINGS["timeout"].default),
        on_nan=choice("on-nan", env["HOCKET_ON_NAN"]) if env.get("HOCKET_ON_NAN") else None,
        transport=choice("transport", env.get("HOCKET_TRANSPORT") or "auto"),
        checkpoint=env.get("HOCKET_CHECKPOINT") or None,
        checkpoint_every=_counted(env, "checkpoint-every"),
        checkpoint_keep=_counted(env, "checkpoint-keep"),
        check_replicas=_replicas(env.get("HOCKET_CHECK_REPLICAS") or "auto"),
        job=env.get("HOCKET_JOB"),
        group=_integer(env, "GROUP_RANK", 0) if launched and "GROUP_RANK" in env else None,
        host_name=env.get("HOCKET_HOST_NAME") if launched else None,
        host_address=env.get("HOCKET_ADDRESS") if launched else None,
        interface=env.get("HOCKET_INTERFACE") or None,
        secret_fd=_integer(env, "HOCKET_SECRET_FD", -1) if launched and "HOCKET_SECRET_FD" in env else None,
        server=_integer(env, "HOCKET_SERVER", 0) if launched and "HOCKET_SERVER" in env else None,
        servers=_counted(env, "servers"),
        tls=choice("tls", env.get("HOCKET_TLS") or "auto"),
        verbose=choice("verbose", env.get("HOCKET_VERBOSE") or "off") == "on",
        seed=count("seed", env["HOCKET_SEED"]) if env.get("HOCKET_SEED") else None,
        timeline=bool(env.get("HOCKET_TIMELINE")),
    )


OF_TORCHRUN = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
               "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
               "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
"""The variables by which a script sees that it is one process of several."""


def hide(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment of a worker in which only Hocket finds them."""
    return {HIDDEN + name if name in OF_TORCHRUN else name: value for name, value in environ.items()}


def _reveal(environ: Mapping[str, str]) -> Mapping[str, str]:
    hidden = {name: environ[HIDDEN + name] for name in OF_TORCHRUN if HIDDEN + name in environ}
    return {**environ, **hidden} if hidden else environ


HIDDEN = "HOCKET_HIDDEN_"
"""With this before their names."""


def told() -> dict[str, str]:
    """The settings that the environment makes, by name."""
    return {name: os.environ[s.variable] for name, s in SETTINGS.items() if os.environ.get(s.variable)}


def environment() -> dict[str, str]:
    """A copy of this process's environment, to give to a child."""
    return dict(os.environ)


FOR_HOSTS = ("ssh", "python", "interface")
"""Settings that mean something with several hosts only."""

LAUNCHERS_OWN = (*FOR_HOSTS, "run-dir")
"""Settings that concern the launcher alone."""

_EXPORTED = ("HOCKET_", "PYTHON", "OMP_", "MKL_", "GLOO_", "NCCL_", "TORCH", "TP_SOCKET_", "UCX_")
_OF_A_JOB = {"HOCKET_RENDEZVOUS", "HOCKET_JOB", "HOCKET_LAUNCHER", "HOCKET_EVENTS", "HOCKET_LEDGER", "HOCKET_SERVER",
             "HOCKET_SECRET_FD", "HOCKET_HOST_NAME", "HOCKET_ADDRESS", "PYTHONHOME", "PYTHONUNBUFFERED"}  # fmt: skip


def exported(more: Sequence[str] = ()) -> dict[str, str]:
    """The variables of this environment that workers on other hosts get too.

    Args:
        more: Variables by name, or ``NAME=VALUE``, that the user wants them to get.
    """
    own = {SETTINGS[name].variable for name in LAUNCHERS_OWN}
    found = {k: v for k, v in os.environ.items() if k.startswith(_EXPORTED) and k not in own | _OF_A_JOB}
    found = {k: v for k, v in found.items() if not k.startswith(HIDDEN)}
    for text in more:
        name, given, value = text.partition("=")
        if not name.isidentifier() or not (given or name in os.environ):
            raise UsageError(f"-x {text}: must be a variable that is set here, or NAME=VALUE")
        found[name] = value if given else os.environ[name]
    return found


_OF_A_SHELL = {
    "PWD",
    "OLDPWD",
    "SHLVL",
    "HOSTNAME",
    "HOME",
    "USER",
    "LOGNAME",
    "MAIL",
    "SHELL",
    "TERM",
    "DISPLAY",
    "TMUX",
}


def names_for_rig() -> list[str]:
    """What is not exported anyway, and a script may read, for hosts that are this machine under another name."""
    named = (name for name in os.environ if name.isidentifier() and name.strip("_") and name not in _OF_A_SHELL)
    return sorted(name for name in named if not name.startswith(("SSH_", *_EXPORTED)))


def of_libraries() -> dict[str, str]:
    """The variables by which libraries choose threads and GPUs: where they differ, so do times."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_CPU_AFFINITY")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def working_folder() -> str:
    """The working folder by the name that the user has for it, which other hosts know too if it is a link."""
    named = os.environ.get("PWD", "")
    try:
        return named if os.path.isabs(named) and os.path.samefile(named, ".") else str(Path.cwd())  # noqa: PTH117, PTH121
    except OSError:
        return str(Path.cwd())


def ssh_address() -> str | None:
    """The address of this host at which SSH was reached, if this process was started through it."""
    parts = os.environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else None


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES leaves to see, or None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part for part in value.split(",") if part.strip() not in ("", "-1")]


def choice(name: str, value: str) -> str:
    """``value`` if the setting allows it."""
    allowed = SETTINGS[name].choices
    if value not in allowed:
        raise UsageError(f"--{name} {value}: the choices are {', '.join(allowed)}")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--timeout {text}: must be a positive number of seconds, for example --timeout 1800")
    return value


COUNTS = {"checkpoint-every": 1, "checkpoint-keep": 1, "check-replicas": 0, "servers": 0, "seed": 0}
"""Settings that are whole numbers, and the least that each may be."""


def count(name: str, text: str) -> int:
    """The value of a setting that is a whole number."""
    least = COUNTS[name]
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--{name} {text}: must be a whole number from {least}, for example --{name} 100")
    return int(text)


def _counted(env: Mapping[str, str], name: str) -> int:
    return count(name, env.get(SETTINGS[name].variable) or SETTINGS[name].default)


def _replicas(text: str) -> int | None:
    return None if text == "auto" else count("check-replicas", text)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name} is {text!r}, which is no whole number") from None
