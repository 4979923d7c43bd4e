"""``hocket jobs`` lists the jobs that run on this machine, and ``hocket resize`` gives one more workers, or fewer."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from hocket.errors import UsageError
from hocket.launch import host_list, job_socket
from hocket.observe import show


def jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List your jobs that run on this machine: script, workers, how often these have changed, and how far they are."""
    found: list[dict[str, Any]] = []
    for name in job_socket.running():
        if name.user == os.geteuid():
            try:
                found.append({"id": name.id, **job_socket.ask(name, "describe")})
            except UsageError as error:  # it may end at this moment
                if "has just ended" not in str(error):
                    found.append({"id": name.id, "trouble": str(error)})
    if as_json:
        print(json.dumps([{key: value for key, value in job.items() if key != "kind"} for job in found], indent=1))
    elif not found:
        print("No job of yours runs on this machine.")
    else:
        rows = [("job", "script", "workers", "generation", "step", "running for", "folder"), *map(_row, found)]
        print(*show.align(rows), sep="\n")


def resize(
    job: Annotated[str, typer.Argument(help="A job's id, as hocket jobs lists it, or its beginning.")],
    workers: Annotated[
        str | None, typer.Option("-n", "--workers", help="How many workers it is to have.", show_default=False)
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "-H", "--hosts", help="All hosts that it is to have, and workers on each: node1:4,node3:4. Others leave."
        ),
    ] = None,
) -> None:
    """Give a running JOB that was started on this machine more workers, or fewer, or other hosts."""
    if workers is None and hosts is None:
        raise UsageError("say how many workers it is to have, with -n 4, or on which hosts, with -H node1:4,node2:4")
    if workers is not None and (not workers.isdecimal() or int(workers) < 1):
        raise UsageError(f"-n {workers}: must be a whole number of workers from 1, for example -n 4")
    if hosts is not None:
        host_list.parse(hosts)
    name = job_socket.find(job)
    count = None if workers is None else int(workers)
    print(f"job {name.id}: {job_socket.ask(name, 'resize', workers=count, hosts=hosts)['done']}")


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    if "trouble" in job:
        return (job["id"], "?", "?", "?", "does not answer", "?", "?")
    more = [f"{job['joining']} joining"] if job["joining"] else []
    more += [f"{job['spares']} spare{'s' if job['spares'] > 1 else ''}"] if job["spares"] else []
    workers = f"{job['workers']} ({', '.join(more)})" if more else str(job["workers"])
    step = "-" if job["epoch"] is None else f"epoch {job['epoch']}, {job['step']}/{job['steps'] or '?'}"
    return (job["id"], job["script"], workers, str(job["generation"]), step, show.span(job["seconds"]), job["folder"])
