"""The rig: hosts on one machine, made of network namespaces, to try out jobs across hosts. Beside the layers."""

from __future__ import annotations

from hocket.lab.rig.rig import Rig as Rig
from hocket.lab.rig.rig_names import RigHost as RigHost
from hocket.lab.rig.rig_state import names as names

__all__ = ["Rig", "RigHost", "names"]
