"""Hosts that come to a job while it runs: each is looked at as those were with which it began, and nobody waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hocket.errors import UsageError
from hocket.launch import preflight
from hocket.launch.agent_links import AgentLink, AgentLinks
from hocket.launch.environment import HostPart, Job
from hocket.launch.host_list import Host, Wishes
from hocket.launch.interview import Interview, Talk
from hocket.launch.message_pipe import Frame
from hocket.transport import routes

_TRY = 2.0  # seconds to try addresses; agents of the job pass on no output meanwhile


class Recruits:
    """Agents of hosts that are asked to join the job, some at a time.

    Attributes:
        refused: The hosts that could not join, and why, in words; who says so takes them away.
    """

    def __init__(self, wishes: Wishes, job: Job, links: AgentLinks) -> None:
        self._wishes, self._job, self._links = wishes, job, links
        self.refused: list[tuple[str, str]] = []
        self._number = len(links.all)  # of the next agent: none has one that another one had
        self._asked: list[Host] = []  # those that are next
        self._looks: _Looks | None = None
        self._interview: Interview | None = None
        self._new: list[AgentLink] = []

    @property
    def coming(self) -> set[str]:
        """The hosts that are looked at, or will be."""
        return {host.name for host in self._asked} | {link.host.name for link in self._new}

    def ask(self, hosts: Sequence[Host]) -> None:
        """Have hosts join; those that are asked already are not asked again."""
        coming = self.coming
        self._asked += [host for host in hosts if host.name not in coming]

    def take(self, link: AgentLink, frame: Frame) -> None:
        """An agent has said something; it may be of the job already."""
        if self._interview is not None:
            self._interview.take(link, frame)

    def tick(self, there: Mapping[AgentLink, HostPart]) -> Iterator[tuple[AgentLink, HostPart]]:
        """Go on; gives out those that are ready, and what they have of the job, which is no worker yet.

        Args:
            there: The hosts of the job, which all others have to reach.
        """
        if self._interview is None and self._asked:
            self._begin(there)
        if self._interview is None:
            return
        self._interview.tick()
        if not self._interview.is_over:
            return
        ready: dict[AgentLink, HostPart] = self._interview.found
        assert self._looks is not None
        wrong: dict[AgentLink, str] = {}
        for link, problem in self._looks.problems:
            wrong.setdefault(link, problem)
        for link in self._new:
            if link not in ready:
                self.refused.append((link.host.name, wrong.get(link, "it did not answer")))
                self._links.drop(link)
        self._interview, self._new = None, []
        yield from ready.items()

    def _begin(self, there: Mapping[AgentLink, HostPart]) -> None:
        hosts, self._asked = self._asked, []
        for host in hosts:
            try:
                link = self._wishes.engine.begin(host, self._number)
            except UsageError as error:
                self.refused.append((host.name, str(error)))
                continue
            self._number += 1
            self._links.add(link)
            self._new.append(link)
        self._looks = _Looks(self._wishes, self._job, self._links)
        self._interview = Interview(self._looks.run(self._new, dict(there)))


class _Looks(preflight.Preflight):
    """Looks at hosts that are to join others."""

    def run(self, new: list[AgentLink], there: dict[AgentLink, HostPart]) -> Talk[dict[AgentLink, HostPart]]:
        """What each host that is good has of the job."""
        good = yield from self.connect(new)
        self.check_memory({link: link.host.slots or 1 for link in good}, {})
        good = self._good(good)
        yield from self.look_for_script(good)
        good = self._good(good)
        found = yield from self._find_addresses(good, there)
        first = next(iter(there.values()))
        return {
            link: HostPart(
                link.number, len(there) + len(good), link.host.name, 0, 0, address, interface, first.master,
                slots=preflight.slots_of(link),
            )
            for link, (interface, address) in found.items()
            if link in self._good(good)
        }  # fmt: skip

    def _good(self, links: Sequence[AgentLink]) -> list[AgentLink]:
        wrong = {link for link, _ in self.problems}
        return [link for link in links if link not in wrong and not link.trouble]

    def _find_addresses(
        self, new: list[AgentLink], there: dict[AgentLink, HostPart]
    ) -> Talk[dict[AgentLink, tuple[str, str]]]:
        """The interface and address of each new host, which the others reach, and which reaches them."""
        if not new:
            return {}
        interface = self._wishes.interface
        everyone = [*new, *(link for link in there if not link.trouble)]
        listening = yield from self.ask("listen", "listening", {link: {"interface": interface} for link in everyone})
        targets = {
            link: [[link.number, address, said["port"]] for address in _addresses(link, said, there)]
            for link, said in listening.items()
        }
        questions: dict[AgentLink, dict[str, Any]] = {}
        for link in targets:
            others = [other for other in targets if other is not link and (link in new or other in new)]
            questions[link] = {"targets": [t for other in others for t in targets[other]], "seconds": _TRY}
        reached = yield from self.ask("reach", "reached", questions)
        for link in there:
            link.channel.send("listen no more")
        same = len({link.hello["network"] for link in everyone}) == 1
        found = {}
        for link in new:
            if link not in reached:
                continue
            entries = [(name, address) for name, address in listening[link]["addresses"]]
            node = routes.Node(link.host.name, entries, link.hello["address"])
            for other in reached:
                if other is not link:
                    seen = {address for number, address in reached[other]["found"] if number == link.number}
                    node.reached_by[other.host.name] = seen
            unreached = [
                f"{other.host.name} at {part.address}" for other, part in there.items()
                if other in targets and [other.number, part.address] not in reached[link]["found"]
            ]  # fmt: skip
            chosen = routes.choose(node, same_network=same)
            if unreached:
                self.problems.append((link, f"it cannot reach {', '.join(unreached)}: let TCP through between them"))
            elif chosen is None:
                self.problems.append((link, routes.explain(node, interface)))
            else:
                found[link] = chosen
        return found


def _addresses(link: AgentLink, said: Mapping[str, Any], there: Mapping[AgentLink, HostPart]) -> list[str]:
    """The addresses of a host that are tried: of one that is in the job, the one that it has there."""
    return [there[link].address] if link in there else [str(address) for _, address in said["addresses"]]
