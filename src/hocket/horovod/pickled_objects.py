"""The one place where anything is pickled: objects of a script's own, in Horovod's calls that promise to send any.

Reading a pickle runs what its writer wants. So it is done between workers of one job only, each of which has proved to
the others that it knows the job's secret, or shares memory with them that only processes of the job are given.
"""

from __future__ import annotations

import pickle
from typing import Any

from hocket.errors import UsageError
from hocket.horovod import context
from hocket.job.introductions import job_secret


def write(value: Any) -> bytes:
    """An object, pickled."""
    _check(f"an object of type {type(value).__module__}.{type(value).__qualname__}")
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def read(data: bytes) -> Any:
    """What another worker has pickled."""
    _check("a pickled object")
    return pickle.loads(data)


def _check(what: str) -> None:
    """Raise if what connects the workers does not prove that they belong to one job."""
    found = context.current()
    config = found.worker.config
    shares = found.communicator.memory is not None and len(found.communicator.topology.hosts) == 1
    if config.size > 1 and not shares and (job_secret(config) is None or config.transport == "gloo"):
        raise UsageError(
            f"{what} cannot be sent here, where nothing proves who sends it: start the job with hocket run, without "
            "--transport gloo; or send numbers, texts, lists, dictionaries and tensors"
        )
