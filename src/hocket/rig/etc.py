"""What stands over /etc inside the hosts of a rig; ip(8) mounts it for whoever enters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hocket.rig import hosts as naming
from hocket.rig.hosts import Host

_SHADOW = Path("/etc/shadow")


def write(crew: Iterable[Host], loopback_names: bool) -> None:
    """Write for every host the names of all, and the account of root where sshd would take the real one for locked."""
    crew = tuple(crew)
    naming.FILES_OVER_ETC.mkdir(mode=0o755, exist_ok=True)
    for host in crew:
        folder = naming.FILES_OVER_ETC / host.namespace
        folder.mkdir(mode=0o755)
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        if loopback_names:
            lines.append(f"127.0.1.1 {host.name}")
        lines += [f"{peer.address} {peer.name}" for peer in crew if peer is not host or not loopback_names]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        if _root_is_locked():
            account = folder / "shadow"
            account.touch(mode=0o600)
            account.write_text("root:*:19000:0:99999:7:::\n")  # no password fits, but a key may


def _root_is_locked() -> bool:
    try:
        return any(line.startswith("root:!") for line in _SHADOW.read_text().splitlines())
    except OSError:
        return False
