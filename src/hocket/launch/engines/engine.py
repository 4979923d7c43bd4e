"""What every engine does: it knows which hosts there are, and has an agent begin on each; the rest is the job's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hocket.launch.agent_links import AgentLink, here
from hocket.launch.host_list import Host
from hocket.launch.reception import Reception


class Engine(ABC):
    """Where machines come from: SSH, Slurm, Ray …

    An agent comes in one of two ways. A command leads to it, whose standard input and output it talks over; or it
    dials the engine's ``reception`` with the number of its link (see ``dialing``). Whatever becomes of it later, the
    link tells: an agent that is gone is a lost host, one that was told to end by SIGTERM gives notice.

    Attributes:
        reception: Where agents come in that dial; None if commands lead to all of them.
        patience: Seconds that an agent has to say hello.
        folder: The folder of the script on the hosts, from where agents begin; None if it is that of the launcher.
    """

    reception: Reception | None = None
    patience: float = 30.0
    folder: str | None = None

    @abstractmethod
    def first(self) -> list[Host]:
        """The hosts with which a job begins, in the order of their ranks; may wait until they are there."""

    def begin(self, host: Host, number: int) -> AgentLink:
        """Have an agent begin on ``host``; waits for nothing. On this machine, that needs no engine.

        Raises:
            UsageError: that cannot be.
        """
        return AgentLink(host, number, here()) if host.is_here else self.begin_elsewhere(host, number)

    @abstractmethod
    def begin_elsewhere(self, host: Host, number: int) -> AgentLink:
        """Have an agent begin on another host; see ``begin``."""

    @abstractmethod
    def why_silent(self, link: AgentLink) -> str:
        """Why an agent has not said hello, and what to do; its process, if a command was to lead there, has ended."""

    def look(self, say: Callable[[str], None]) -> Sequence[Host] | None:
        """The hosts that there are now; None if there is nothing new. Called often while the job runs; never waits.

        The job asks hosts that are new to join, and lets go those that are not there any more.
        """
        return None

    @property
    def looks(self) -> bool:
        """Whether ``look`` ever says something."""
        return type(self).look is not Engine.look

    def notices(self) -> Sequence[tuple[str, str]]:
        """Hosts that will be taken away, by name, and how that is known, in words; each is told once."""
        return ()

    def close(self, status: int = 1) -> None:
        """The job is over, with this status; may be called twice."""
        if self.reception is not None:
            self.reception.close()
