"""What connects the hosts of a job: groups over PyTorch's Gloo, or over connections of the job's own."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from hocket.comm.channel import Channels
from hocket.comm.group_watch import LiveWatch
from hocket.comm.tcp_group import TcpGroup
from hocket.config import Config
from hocket.coordinator.coordinator_client import open_board
from hocket.coordinator.liveness_client import Watch
from hocket.job import introductions
from hocket.transport.member_links import Links
from hocket.transport.network_group import Among, NetworkGroup, Overview, introduce
from hocket.transport.process_group import ProcessGroup
from hocket.transport.requests import encrypted
from hocket.transport.store import AskedStore, Store, prefixed


def opener(
    config: Config, store: Store, met: introductions.Introductions, watch: Overview, refused: Counter[str]
) -> Callable[[str, list[int]], NetworkGroup]:
    """What makes a group of some ranks by a name of its own; all of these ranks call it. It counts who is refused."""

    def gloo(name: str, members: list[int]) -> NetworkGroup:
        rank = members.index(config.rank)
        return ProcessGroup(prefixed(store, name), rank, len(members), met.address, config.timeout, watch)

    secured = secured_as(config)

    def tcp(name: str, members: list[int]) -> NetworkGroup:
        own, rank, size = prefixed(store, name), members.index(config.rank), len(members)
        links = Links(
            name, rank, size, met.secret, met.address, lambda address: encrypted(address, secured), refused=refused
        )
        return TcpGroup.connect(
            links, Among(watch, members), lambda said, wait: introduce(own, rank, size, said, wait), config.algorithm
        )

    return gloo if config.transport == "gloo" else tcp


def channels(
    config: Config, store: Store, met: introductions.Introductions, watch: Watch, refused: Counter[str]
) -> Channels:
    """What makes one end of the messages between some ranks, over connections of the job's own."""
    secured = secured_as(config)

    def make(name: str, ranks_: Sequence[int]) -> TcpGroup:
        own, rank, size = prefixed(store, f"channel {name}"), ranks_.index(config.rank), len(ranks_)
        links = Links(
            name, rank, size, met.secret, met.address, lambda address: encrypted(address, secured), refused=refused
        )
        return TcpGroup.connect_later(
            links,
            Among(watch, ranks_),
            lambda said, wait: introduce(own, rank, size, said, wait),
            lambda: watch.look_for(ranks_),
            config.algorithm,
        )

    return make


def channels_beside_servers(config: Config, secret: bytes, live: Callable[[], Collection[int]]) -> Channels:
    """The same where the workers meet at the coordinator alone, whose board tells them where the others are."""
    boards: list[Store] = []  # of which one is opened when it is first needed

    def make(name: str, ranks_: Sequence[int]) -> TcpGroup:
        if not boards:
            boards.append(AskedStore(open_board(config, secret), config.timeout))
        own, rank, size = prefixed(boards[0], f"channel {name}"), ranks_.index(config.rank), len(ranks_)
        address = config.host_address or config.address
        links = Links(name, rank, size, secret, address, lambda to: encrypted(to, config))
        watch = LiveWatch(config.rank, ranks_, live, config.timeout)
        return TcpGroup.connect_later(
            links, watch, lambda said, wait: introduce(own, rank, size, said, wait), lambda: None, config.algorithm
        )

    return make


def secured_as(config: Config) -> Config:
    """The configuration for what goes between hosts: encrypted or not.

    Where nothing has handed over a secret, the workers found each other through a store that is not encrypted, and auto
    is off.
    """
    is_given = introductions.job_secret(config) is not None
    return config if is_given or config.tls == "on" else dataclasses.replace(config, tls="off")
