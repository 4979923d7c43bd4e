"""The strategies that can be chosen.

This package imports no torch, so that the command line can check a choice before it starts anything.
"""

from hocket.strategies.choices.fitting import check_fit, differs_alone, servers_of, survives_loss
from hocket.strategies.choices.replicas import EASGD, DiLoCo, Gossip, Hogwild, LocalSGD
from hocket.strategies.choices.served import BSP, PS, SSP, Asynchronous, Downpour, Served, Softsync
from hocket.strategies.choices.switching import Switch
from hocket.strategies.choices.synchronous import DMB, Central, Delayed, FullBatch, Mirrored
from hocket.strategies.choices.text import TABLE, Choice, parse, write

__all__ = [
    "BSP", "DMB", "EASGD", "PS", "SSP", "TABLE", "Asynchronous", "Central", "Choice", "Delayed", "DiLoCo",
    "Downpour", "FullBatch", "Gossip", "Hogwild", "LocalSGD", "Mirrored", "Served", "Softsync", "Switch", "check_fit",
    "differs_alone", "parse", "servers_of", "survives_loss", "write",
]  # fmt: skip
