"""What a process is told from outside; the only module that reads ``os.environ``.

A field of ``Config`` that is made by ``_setting`` is the one statement of a setting: its flag of ``hocket run``, its
environment variable, its key in ``hocket.toml``, how a text is read, the default and the page of all settings follow
from it. Precedence: flag, then environment, then the script, then ``hocket.toml``, then the default.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket.errors import UsageError
from hocket.setting import Setting, any_text, choice, count, folder, seconds, switch, text_or_none

_DEFAULT: Any = object()
ALGORITHMS = ("auto", "ring", "tree", "halving_doubling", "star", "direct", "hierarchical")


def _setting(
    default: str, help: str, reads: Callable[[Setting, str], Any] = any_text, *, unset: Any = _DEFAULT, **more: Any
) -> Any:
    """A field of ``Config`` that is a setting; ``unset`` is its value where nobody sets it, if not the default's."""
    made = Setting(default, help, reads, **more)
    value = made.read(default) if unset is _DEFAULT else unset
    return dataclasses.field(default=value, metadata={"setting": made})


@dataclass(frozen=True)
class Config:
    """Who this process is and what it was told; ``None`` where nobody said.

    ``local_size`` is 0 where nobody has said how many workers are on this host: they find out.
    ``address`` and ``port`` are those of the job's store (MASTER_ADDR); ``host_name`` is this host as the user wrote
    it, ``host_address`` where the other hosts reach it, and ``secret_fd`` the pipe with the job's 32-byte secret;
    ``events`` and ``ledger`` are pipes to the launcher and to its guardian. The coordinator listens at ``address``,
    too, on ``coordinator_port``. ``server`` is the number of a server, from 0; a process that has one is no worker.
    ``newcomer`` says that the job goes on already, and that this process joins its workers; one that stands by reads
    its rank from the pipe ``spare_fd`` when there is one for it. With ``spans_hosts`` workers may be on several hosts,
    of which one has GPUs if it is ``gpus``.
    ``from_file`` names the settings that the launcher has read in ``hocket.toml``, which a script may overrule.
    """

    launched: bool = False
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    coordinator_port: int | None = None
    store_is_hosted: bool = False
    rendezvous: str | None = None
    restart: str = "0"
    events: int | None = None
    ledger: int | None = None
    job: str | None = None
    group: int | None = None
    host_name: str | None = None
    host_address: str | None = None
    secret_fd: int | None = None
    server: int | None = None
    newcomer: bool = False
    spare_fd: int | None = None
    spans_hosts: str = ""
    from_file: tuple[str, ...] = ()

    strategy: str | None = _setting(
        "mirrored",
        "How the workers train together: mirrored, central, delayed, dmb, full_batch, local_sgd, diloco, easgd, "
        "gossip, hogwild, or with servers ps, bsp, ssp, asynchronous, softsync, downpour.",
        unset=None,
    )
    timeout: float = _setting("1800", "Seconds to wait for a rank that is alive but does not arrive.", seconds)
    on_nan: str | None = _setting(
        "raise",
        "A gradient that is not finite: end the job, skip the step on all ranks, or do not look.",
        choice,
        choices=("raise", "skip", "ignore"),
        unset=None,
    )
    on_loss: str = _setting(
        "auto",
        "What follows when a worker is killed: the job ends, the others continue, or they continue and a new worker "
        "replaces the lost one; auto is the last of these that the strategy, the data and the script allow.",
        choice,
        choices=("auto", "end", "continue", "replace"),
    )
    spares: int = _setting(
        "0",
        "How many processes stand by for lost workers, with the script run up to where its rank matters.",
        count(0),
    )
    notice: float = _setting(
        "30", "Seconds that a worker has, after SIGTERM, to finish its batch and leave the others.", seconds
    )
    min_workers: int = _setting(
        "1", "The fewest workers with which a job goes on after a loss; with fewer, the job ends.", count(1)
    )
    max_losses: int = _setting(
        "10", "How many workers may be lost within an hour; with one more, the job ends.", count(0)
    )
    batch: str | int = _setting(
        "auto",
        "The batch of all workers: fixed stays as it is at the start, whoever comes and goes; per-worker keeps each "
        "one's part, so that the whole changes; or a number of samples. auto is fixed where workers may change.",
        count(1, auto="auto", fixed="fixed", per_worker="per-worker"),
    )
    max_part: int = _setting(
        "4", "How many times its first samples a worker may get when others are lost; then the job ends.", count(1)
    )
    transport: str = _setting(
        "auto",
        "How bytes move: auto and tcp are shared memory on a host (x86-64 Linux), else TCP; gloo is PyTorch's Gloo.",
        choice,
        choices=("auto", "shared-memory", "gloo", "tcp"),
    )
    algorithm: str = _setting(
        "auto", "How sums between hosts are made; auto is what measured links favour.", choice, choices=ALGORITHMS
    )
    codec: str | None = _setting(
        "",
        "How gradients travel between hosts in fewer bytes: fp16, bf16, int8, int4, qsgd, ternary, onebit, topk(0.01), "
        "randomk, threshold.",
        text_or_none,
    )
    share_gpus: bool = _setting(
        "off", "Let several workers share a GPU, over NCCL: for trials and tests.", switch, choices=("off", "on")
    )
    checkpoint: str | None = _setting(
        "",
        "The folder for checkpoints of a script that calls hocket.resume(); the same command continues from there.",
        folder,
        unset=None,
    )
    checkpoint_every: int = _setting("500", "Steps between two checkpoints.", count(1))
    checkpoint_keep: int = _setting("3", "How many checkpoints are kept.", count(1))
    check_replicas: int | None = _setting(
        "auto",
        "Every so many steps, compare the parameters of all workers and end the job if they differ; 0 is never, "
        "auto in the first steps, at checkpoints, at the end, and between for 0.5 % of the time.",
        count(0, auto=None),
    )
    servers: int = _setting("0", "How many parameter servers, for the strategies that need them: ps …", count(0))
    tls: str = _setting(
        "auto",
        "Encryption between workers and servers over TCP; auto is wherever a server can be reached from beyond its "
        "host.",
        choice,
        choices=("auto", "on", "off"),
    )
    timeline: str | None = _setting(
        "", "A .json file for the timeline of the run, for Perfetto, Chrome, hocket trace.", text_or_none
    )
    verbose: bool = _setting(
        "off", "Say more: which parameters are on which server, for example.", switch, choices=("off", "on")
    )
    hide_torch_env: bool = _setting(
        "off",
        "Keep RANK, WORLD_SIZE … from the script, so that accelerate, the HF Trainer or Lightning wrap nothing.",
        switch,
        choices=("off", "on"),
    )
    as_horovod: bool = _setting(
        "off", "Let 'import horovod.torch as hvd' be Hocket's own.", switch, choices=("off", "on")
    )
    seed: int | None = _setting(
        "", "Where hocket.init() starts all random numbers of a worker; else the script does.", count(0, _=None)
    )
    secret_file: str | None = _setting(
        "",
        "A file of mode 0600 with a secret that the machines of a job prove to each other, where each is started by "
        "something else: Slurm, mpirun, a JobSet, --cluster.",
        text_or_none,
        for_launcher=True,
    )
    start_timeout: float = _setting(
        "600", "Seconds in which all these machines have to be there.", seconds, for_launcher=True
    )
    run_dir: str = _setting(
        "hocket-runs", "The folder for the records of runs, one folder each.", folder, for_launcher=True
    )
    ssh: str = _setting(
        "ssh", "The command for reaching the hosts of -H, with options: 'ssh -p 2222 -i key'.", for_hosts=True
    )
    python: str | None = _setting(
        "", "The interpreter on the other hosts, if it is not at the same path as here.", text_or_none, for_hosts=True
    )
    interface: str | None = _setting(
        "",
        "The network interface for the job, or several (eth0,ens3); else it is found.",
        text_or_none,
        for_hosts=True,
    )

    def prefer(self, name: str, script: Any) -> Any:
        """What holds of a setting that a script may make, too: of flag or variable, the script's, or the file's."""
        told = getattr(self, name)
        return (script or told) if name.replace("_", "-") in self.from_file else (told or script)


_FIELDS = {field.name: field.metadata["setting"] for field in dataclasses.fields(Config) if field.metadata}
SETTINGS: dict[str, Setting] = {
    name.replace("_", "-"): dataclasses.replace(setting, name=name.replace("_", "-"))
    for name, setting in _FIELDS.items()
}
"""All settings by name, in the order of the help."""

_FROM_FILE = "HOCKET_FROM_FILE"
"""The variable with the names of the settings that the launcher has read in ``hocket.toml``."""

FOR_HOSTS = tuple(setting.name for setting in SETTINGS.values() if setting.for_hosts)
FOR_LAUNCHER = tuple(setting.name for setting in SETTINGS.values() if setting.for_launcher or setting.for_hosts)


def read(environ: Mapping[str, str] | None = None) -> Config:
    """Read the environment as ``hocket run`` or torchrun has set it; alone when nobody has."""
    env = _reveal(os.environ if environ is None else environ)
    roles = ("RANK", "HOCKET_SERVER", "HOCKET_COORDINATOR", "HOCKET_SPARE_FD")
    launched = any(name in env for name in roles) and "WORLD_SIZE" in env
    settings = {
        name.replace("-", "_"): setting.read(env[setting.variable])
        for name, setting in SETTINGS.items()
        if env.get(setting.variable)
    }
    return Config(
        launched=launched,
        rank=_integer(env, "RANK", 0) if launched else 0,
        size=_integer(env, "WORLD_SIZE", 1) if launched else 1,
        local_rank=_integer(env, "LOCAL_RANK", 0) if launched else 0,
        local_size=_integer(env, "LOCAL_WORLD_SIZE", 0) if launched else 1,
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_integer(env, "MASTER_PORT", 0) or None,
        coordinator_port=_integer(env, "HOCKET_COORDINATOR_PORT", 0) or None,
        store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        rendezvous=env.get("HOCKET_RENDEZVOUS") if launched else None,
        restart=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        events=_integer(env, "HOCKET_EVENTS", -1) if launched and "HOCKET_EVENTS" in env else None,
        ledger=_integer(env, "HOCKET_LEDGER", -1) if launched and "HOCKET_LEDGER" in env else None,
        job=env.get("HOCKET_JOB"),
        group=_integer(env, "GROUP_RANK", 0) if launched and "GROUP_RANK" in env else None,
        host_name=env.get("HOCKET_HOST_NAME") if launched else None,
        host_address=env.get("HOCKET_ADDRESS") if launched else None,
        secret_fd=_integer(env, "HOCKET_SECRET_FD", -1) if launched and "HOCKET_SECRET_FD" in env else None,
        server=_integer(env, "HOCKET_SERVER", 0) if launched and "HOCKET_SERVER" in env else None,
        newcomer=launched and "HOCKET_NEWCOMER" in env,
        spare_fd=_integer(env, "HOCKET_SPARE_FD", -1) if launched and "HOCKET_SPARE_FD" in env else None,
        spans_hosts=env.get("HOCKET_SPANS_HOSTS", "") if launched else "",
        from_file=tuple(filter(None, env.get(_FROM_FILE, "").split(","))) if launched else (),
        **settings,
    )


def take_place(config: Config, rank: int, local_rank: int, local_size: int) -> Config:
    """What a process that has stood by is told when it becomes the worker ``rank``, in its environment, too."""
    prefix = HIDDEN if HIDDEN + "WORLD_SIZE" in os.environ else ""
    told = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({prefix + name: str(number) for name, number in told.items()})
    place = dataclasses.replace(config, rank=rank, local_rank=local_rank, local_size=local_size)
    return dataclasses.replace(place, newcomer=True, spare_fd=None)


OF_TORCHRUN = ("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
               "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
               "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")  # fmt: skip
"""The variables by which a script sees that it is one process of several."""


def hide(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker in which only Hocket finds the variables of torchrun."""
    return {HIDDEN + name if name in OF_TORCHRUN else name: value for name, value in environ.items()}


def _reveal(environ: Mapping[str, str]) -> Mapping[str, str]:
    hidden = {name: environ[HIDDEN + name] for name in OF_TORCHRUN if HIDDEN + name in environ}
    return {**environ, **hidden} if hidden else environ


HIDDEN = "HOCKET_HIDDEN_"
"""The prefix of hidden variables."""


def told() -> dict[str, str]:
    """The settings that the environment makes, by name."""
    return {name: os.environ[s.variable] for name, s in SETTINGS.items() if os.environ.get(s.variable)}


def note_file(names: Sequence[str]) -> None:
    """Have the processes of a job know which settings are those of ``hocket.toml``."""
    os.environ.pop(_FROM_FILE, None)
    if names:
        os.environ[_FROM_FILE] = ",".join(names)


def environment() -> dict[str, str]:
    """A copy of this process's environment, to give to a child."""
    return dict(os.environ)


_EXPORTED = ("HOCKET_", "HOROVOD_", "PYTHON", "OMP_", "MKL_", "GLOO_", "NCCL_", "TORCH", "TP_SOCKET_", "UCX_")
_OF_A_JOB = {"HOCKET_RENDEZVOUS", "HOCKET_JOB", "HOCKET_LAUNCHER", "HOCKET_EVENTS", "HOCKET_LEDGER", "HOCKET_SERVER",
             "HOCKET_COORDINATOR", "HOCKET_COORDINATOR_PORT", "HOCKET_NEWCOMER", "HOCKET_SPARE_FD", "HOCKET_SECRET_FD",
             "HOCKET_SPANS_HOSTS", "HOCKET_HOST_NAME", "HOCKET_ADDRESS", "PYTHONHOME", "PYTHONUNBUFFERED"}  # fmt: skip


def exported(more: Sequence[str] = ()) -> dict[str, str]:
    """The variables of this environment that workers on other hosts get too.

    Args:
        more: Variables by name, or ``NAME=VALUE``, that the user wants them to get.
    """
    own = {SETTINGS[name].variable for name in FOR_LAUNCHER} | _OF_A_JOB
    found = {k: v for k, v in os.environ.items() if k.startswith(_EXPORTED) and not (k in own or k.startswith(HIDDEN))}
    for text in more:
        name, given, value = text.partition("=")
        if not name.isidentifier() or not (given or name in os.environ):
            raise UsageError(f"-x {text}: must be a variable that is set here, or NAME=VALUE")
        found[name] = value if given else os.environ[name]
    return found


_OF_A_SHELL = {"PWD", "OLDPWD", "SHLVL", "HOSTNAME", "HOME", "USER", "LOGNAME", "MAIL", "SHELL", "TERM", "DISPLAY",
               "TMUX"}  # fmt: skip


def names_for_rig() -> list[str]:
    """Names of other variables that a script may read, for hosts that are this machine under another name."""
    named = (name for name in os.environ if name.isidentifier() and name.strip("_") and name not in _OF_A_SHELL)
    return sorted(name for name in named if not name.startswith(("SSH_", *_EXPORTED)))


def tell_library(name: str, value: str) -> None:
    """Set a variable that a library reads, unless the user has."""
    os.environ.setdefault(name, value)


def tell_workers(variables: Mapping[str, str]) -> None:
    """Set variables that workers read, as flags say it."""
    os.environ.update(variables)


def visible_gpus() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES leaves to see, or None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [part for part in value.split(",") if part.strip() not in ("", "-1")]


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the environment variable {name} is {text!r}, which is no whole number") from None
