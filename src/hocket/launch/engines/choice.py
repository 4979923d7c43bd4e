"""Whether this process is one task of several that something else has started, and what its flags say to that."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from hocket import clusters, config, surroundings
from hocket.errors import UsageError
from hocket.launch.engines.tasks import TasksEngine, take_part
from hocket.surroundings import Surroundings


def find(flags: Mapping[str, object], cluster: Path | None, task: str | None) -> Surroundings | None:
    """The tasks of this start; None if this process is alone, or is told otherwise.

    Args:
        flags: The flags that say where workers are, and what was given.
        cluster: The cluster file, if there is one.
        task: Which of its tasks this is.

    Raises:
        UsageError: what is said does not fit together.
    """
    given = [flag for flag, value in flags.items() if value]
    if cluster is None:
        if task is not None:
            raise UsageError(f"--task {task} is a task of a cluster file: name that with --cluster cluster.json")
        found = surroundings.find(config.environment())
        if found is not None and given:
            if found.number == 0:
                _say(
                    f"{given[0]} is given, so {found.sign} does not count: each of {found.count} tasks has its own job"
                )
            return None
        return found
    if given:
        raise UsageError(f"{given[0]} and --cluster both say where the workers are: use one of them")
    read = clusters.read_file(cluster)
    if task is None:
        raise UsageError(f"{read.source}: which of its tasks is this? add for example --task {read.tasks[-1]}")
    return surroundings.of_cluster(read, read.find(task), read.source)


def begin(tasks: Surroundings, settings: dict[str, str]) -> TasksEngine:
    """Be the launcher if this is task 0; else take part, and end with the job's status.

    Args:
        tasks: The surroundings of this task.
        settings: Those of the job; the number of servers is put in.

    Raises:
        UsageError: what is said does not fit together, or tasks do not come.
        SystemExit: this is not task 0, and the job is over.
    """
    own = {
        name: settings.get(name) or config.SETTINGS[name].default for name in ("secret-file", "start-timeout", "tls")
    }
    servers = int(settings.get("servers", "0"))
    if tasks.servers and servers not in (0, tasks.servers):
        raise UsageError(f"--servers {servers}, but {tasks.sign} names {tasks.servers}: leave out --servers")
    if tasks.servers:
        settings["servers"] = str(tasks.servers)
    if tasks.number:
        sys.exit(take_part(tasks, own, config.environment()))
    engine = TasksEngine(tasks, own, config.environment())
    _say(f"{tasks.sign}: {tasks.count} tasks are one job, launched by this one")
    if engine.is_open:
        _say("it is open: whoever reaches this host can join it; name a file with --secret-file for all tasks")
    return engine


def _say(text: str) -> None:
    print(f"hocket: {text}", file=sys.stderr, flush=True)
