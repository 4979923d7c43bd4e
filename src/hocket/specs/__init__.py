"""The strategies that can be chosen, as a user writes them.

This package imports no torch, so that the command line can check a choice before it starts anything.
"""

from hocket.specs.codecs import CodecSpec
from hocket.specs.local_steps import EASGD, DiLoCo, Gossip, Hogwild, LocalSGD
from hocket.specs.notation import parse, parse_codec, write
from hocket.specs.spec import Spec
from hocket.specs.switch import Switch
from hocket.specs.synchronous import DMB, Central, Delayed, FullBatch, Mirrored
from hocket.specs.with_servers import BSP, PS, SSP, Asynchronous, Downpour, Served, Softsync

__all__ = [
    "BSP", "DMB", "EASGD", "PS", "SSP", "Asynchronous", "Central", "CodecSpec", "Delayed", "DiLoCo", "Downpour",
    "FullBatch", "Gossip", "Hogwild", "LocalSGD", "Mirrored", "Served", "Softsync", "Spec", "Switch",
    "parse", "parse_codec", "write",
]  # fmt: skip
