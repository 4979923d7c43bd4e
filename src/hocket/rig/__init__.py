"""The rig: hosts on one machine, made of network namespaces, to try out jobs across hosts. Beside the layers."""

from __future__ import annotations

from hocket.rig.hosts import Host as Host
from hocket.rig.rig import Rig as Rig
from hocket.rig.state import names as names

__all__ = ["Host", "Rig", "names"]
