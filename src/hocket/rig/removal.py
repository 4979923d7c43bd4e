"""Removes a rig, whole, half-made or damaged, by nothing but its name; what is not there is no error."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from hocket.errors import RigError
from hocket.rig import hosts as naming
from hocket.rig import processes, state
from hocket.rig.network import call


def remove(name: str) -> bool:
    """Remove processes, interfaces, namespaces and files of the rig; return whether there was anything."""
    spaces = {found for path in state.spaces_of(name) if (found := processes.inode(path)) is not None}
    spaces |= _of_marked(name)
    found = processes.kill(lambda: processes.inside(spaces, naming.namespace(name, ""))) > 0
    found |= _remove_link(Path("/sys/class/net", naming.outside_interface(name)))
    for path in state.spaces_of(name):
        call(["ip", "netns", "delete", path.name])
        found = True
    for path in [*state.files_of(name), naming.folder(name)]:
        if path.exists():
            shutil.rmtree(path)
            found = True
    with contextlib.suppress(OSError):
        naming.FILES_OVER_ETC.rmdir()  # if it is empty
    return found


def _remove_link(link: Path) -> bool:
    if not link.exists():
        return False
    try:
        call(["ip", "link", "delete", link.name])
    except RigError:
        if link.exists():  # else the kernel was faster: the other end has gone with its namespace
            raise
    return True


def _of_marked(name: str) -> set[int]:
    """The namespaces of what the rig has started, those of this machine itself excepted."""
    found = {processes.inode(Path(f"/proc/{pid}/ns/net")) for pid in processes.marked(name)}
    outside = {processes.inode(Path(f"/proc/{pid}/ns/net")) for pid in ("self", "1")}
    return {space for space in found - outside if space is not None}
