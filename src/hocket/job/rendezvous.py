"""How the workers of a job find each other, and which communicator they get."""

from __future__ import annotations

import sys

from hocket.comm.alone import AloneCommunicator
from hocket.comm.communicator import Communicator
from hocket.comm.gloo import GlooCommunicator
from hocket.comm.shared import SharedCommunicator
from hocket.config import Config
from hocket.errors import UsageError
from hocket.transport import futex, handoff
from hocket.transport.process_group import ProcessGroup, Store, open_store
from hocket.transport.shared_memory import SharedMemory


def join(config: Config) -> Communicator:
    """Meet the other workers; blocks until all are there or the timeout."""
    _check(config)
    if config.size == 1:
        return AloneCommunicator()
    if config.transport == "gloo" or not futex.supported():
        if config.transport == "shared-memory":
            raise UsageError(
                "--transport shared-memory needs x86-64 Linux: use --transport auto, which takes Gloo here"
            )
        if config.transport == "auto" and config.rank == 0:
            print("hocket: shared memory needs x86-64 Linux; using Gloo, which is slower", file=sys.stderr)
        return GlooCommunicator(ProcessGroup(_open_store(config), config.rank, config.size, config.timeout))
    store = None if config.rendezvous else _open_store(config)  # rank 0's serves the others until all have joined
    name = config.rendezvous or _announce(store, config)
    return SharedCommunicator(SharedMemory.join(name, config.rank, config.size, config.timeout))


def _check(config: Config) -> None:
    if not 0 <= config.rank < config.size or not 0 <= config.local_rank < config.local_size:
        raise UsageError(
            f"RANK={config.rank}, WORLD_SIZE={config.size}, LOCAL_RANK={config.local_rank} and "
            f"LOCAL_WORLD_SIZE={config.local_size} do not fit together: start the script with hocket run or torchrun"
        )
    if config.local_size != config.size:
        raise UsageError(
            f"{config.size} workers, of which {config.local_size} on this host: Hocket trains on one host for now; "
            "start all workers there"
        )


def _announce(store: Store | None, config: Config) -> str:
    """Under torchrun: rank 0 tells the others its socket through the job's store."""
    assert store is not None
    key = f"hocket/socket/{config.restart}"
    if config.rank == 0:
        store.set(key, handoff.new_name())
    return bytes(store.get(key)).decode()


def _open_store(config: Config) -> Store:
    if config.port is None:
        raise UsageError("WORLD_SIZE is set but MASTER_PORT is not: start the script with hocket run or torchrun")
    host = config.rank == 0 and not config.store_is_hosted
    return open_store(config.address, config.port, host=host, timeout=config.timeout)
