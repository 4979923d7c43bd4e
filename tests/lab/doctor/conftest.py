"""The SSH server of the launcher's tests, for doctors who visit hosts."""

from launch.conftest import sshd

__all__ = ["sshd"]
