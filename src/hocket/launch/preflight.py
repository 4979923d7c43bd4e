"""Looks at all hosts of a job before anything starts, and tells all that is wrong there at once."""

from __future__ import annotations

import platform
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket import __version__, config
from hocket.errors import HostError
from hocket.launch import host_list, machine, scripts
from hocket.launch.agent_links import AgentLink, AgentLinks
from hocket.launch.engines.engine import Engine
from hocket.launch.environment import HostPart, Job, Ports
from hocket.launch.host_list import Host, Wishes
from hocket.launch.interview import Answers, Question, Talk
from hocket.launch.signals import Signals
from hocket.transport import routes

_ANSWER = 30.0
_TRY = 4.0  # seconds to try all addresses of all hosts at once
_CLOCKS = 30.0

Ask = Callable[[str, str, dict[AgentLink, dict[str, Any]]], Talk[Answers]]
"""Puts questions of one kind to agents at once, and gives the answers, of another kind, of those that gave one."""


@dataclass(frozen=True)
class ReadyHosts:
    """Hosts that are ready to start.

    Attributes:
        links: The links to their agents.
        parts: What each host has of the job, in the order of the ranks; hosts without workers come last.
        ports: Reserved on the host at whose address all meet.
        folder: The folder in which workers and servers start.
        reserve: Hosts that the user has named, and that are not needed yet.
        warnings: What a user should know, in lines.
    """

    links: AgentLinks
    parts: dict[AgentLink, HostPart]
    ports: Ports
    folder: str
    reserve: list[Host]
    warnings: list[str]

    @property
    def size(self) -> int:
        return sum(part.count for part in self.parts.values())

    def facts(self) -> dict[str, dict[str, Any]]:
        """What a record says of each host, by its name."""
        found = {}
        for link, part in self.parts.items():
            ranks = f"{part.first}-{part.first + part.count - 1}" if part.count else None
            servers = {"servers": ", ".join(map(str, part.servers))} if part.servers else {}
            known = {name: link.hello.get(name) for name in ("hostname", "system", "cores", "gpus", "torch")}
            where = {"address": part.address, "interface": part.interface}
            found[part.name] = {"ranks": ranks, **servers, **where, **known}
        return found


def gather(wishes: Wishes, job: Job, signals: Signals) -> ReadyHosts:
    """Connect to all hosts and look at them.

    Raises:
        HostError: something is wrong; the message has a line for each problem. All is closed then.
        SystemExit: a signal asked for the end meanwhile.
    """
    started: list[AgentLink] = []
    try:
        for number, host in enumerate(_needed(wishes)):
            started.append(wishes.engine.begin(host, number))
    except BaseException:
        for link in started:
            link.close()
        raise
    links = AgentLinks(started, signals, wishes.engine.reception)
    try:
        return links.carry_out(_First(wishes, job, links, signals).run())
    except BaseException:
        links.close()
        raise


class Preflight:
    """Looks at hosts, with whatever is wrong there in ``problems``; each look is at all hosts at once."""

    def __init__(self, wishes: Wishes, job: Job, links: AgentLinks) -> None:
        self._wishes, self._job, self._links = wishes, job, links
        self._folder = machine.working_folder()
        self._there = wishes.engine.folder or self._folder
        self.problems: list[tuple[AgentLink, str]] = []

    def connect(self, links: list[AgentLink]) -> Talk[list[AgentLink]]:
        """The hosts whose agents said hello and are of the same versions as this process."""
        yield Question("", "hello", {link: {} for link in links}, self._wishes.engine.patience)
        good = []
        for link in links:
            problem = compare_versions(link.hello) if link.hello else why_silent(self._links, link, self._wishes.engine)
            if problem:
                self.problems.append((link, problem))
            else:
                good.append(link)
        return good

    def check_memory(self, counts: dict[AgentLink, int], servers: dict[AgentLink, list[int]]) -> None:
        """Look whether the memory of each host is enough for so many workers, and for servers."""
        for link, count in counts.items():
            free, own = link.hello["free memory"], len(servers.get(link, ()))
            most = machine.most_workers(free)
            if most is None or count + own <= most:
                continue
            remedy = f"write {link.host.name}:{most - own}" if most > own else "put fewer servers there"
            self.problems.append((link, f"{machine.too_many(count, free, own)}: {remedy}"))

    def look_for_script(self, links: list[AgentLink]) -> Talk[None]:
        """Tell agents the job, and look whether the script is there, with the same contents as here."""
        for link in links:
            reception = self._wishes.engine.reception
            is_known = link.has_dialed and reception is not None and reception.secret == self._job.secret
            secret = b"" if is_known else self._job.secret
            link.channel.send("job", secret, number=link.number, environment=self._wishes.exported)
        command = list(self._job.command[:2])
        what = f"module {command[1]!r}" if command[0] == "-m" else f"script {command[0]!r}"
        base = config.environment()
        here = scripts.look_for(self._folder, command, base)
        questions = {link: {"folder": self._there, "command": command} for link in links}
        said = yield from self.ask("check", "checked", questions)
        for link, there in said.items():
            if not there["folder"]:
                problem = f"there is no folder {self._folder}: share it between the hosts, or copy it there"
            elif there["digest"] is None:
                problem = f"there is no {what} in {self._folder}: share the folder between the hosts, or copy it there"
            elif there["digest"] != here["digest"]:
                problem = f"the {what} there has other contents than the one here: copy it there again"
            else:
                continue
            self.problems.append((link, problem))

    def ask(self, kind: str, answer: str, questions: dict[AgentLink, dict[str, Any]]) -> Talk[Answers]:
        """The answers of the agents that are there; the others have a problem."""
        asked = {link: head for link, head in questions.items() if not link.trouble}
        answered = yield Question(kind, answer, asked, _ANSWER)
        for link in asked:
            if link not in answered:
                self.problems.append((link, why_silent(self._links, link, self._wishes.engine)))
        return answered


class _First(Preflight):
    """Looks at the hosts with which a job begins."""

    def __init__(self, wishes: Wishes, job: Job, links: AgentLinks, signals: Signals) -> None:
        super().__init__(wishes, job, links)
        self._signals = signals
        self._slots: dict[AgentLink, int] = {}

    def run(self) -> Talk[ReadyHosts]:
        """All looks, one after the other."""
        links = yield from self.connect(self._links.all)
        if not links:
            self._raise_problems()
        left_out = self._leave_out(links)
        counts = self._deal(links)
        servers = self._deal_servers(links, counts)
        links = [link for link in links if counts[link] or servers[link]]
        self.check_memory(counts, servers)
        yield from self.look_for_script(links)
        found = yield from self._find_addresses(links)
        self._raise_problems()
        meeting = links[0]  # rank 0's, where the coordinator is
        master = found[meeting][1]
        with_workers = sum(map(bool, counts.values()))
        spans = with_workers > 1 or self._job.setting("transport") == "tcp"
        parts, first = {}, 0
        for number, link in enumerate(links):
            interface, address = found[link]
            parts[link] = HostPart(
                number, with_workers, link.host.name, first, counts[link], address, interface, master, servers[link],
                tuple(range(number, self._job.spares, with_workers)) if counts[link] else (),
                self._slots[link] if counts[link] else 0, spans, any(link.hello["gpus"] for link in links),
            )  # fmt: skip
            first += counts[link]
        reserved = yield from self.ask("reserve", "reserved", {meeting: {"address": master}})
        self._raise_problems()
        for idle in set(self._links.all) - set(links):
            idle.channel.send("end")
        ports = Ports(*reserved[meeting]["ports"])
        reserve = [host for host in self._wishes.hosts if host.name not in {part.name for part in parts.values()}]
        return ReadyHosts(self._links, parts, ports, self._there, reserve, [*left_out, *_compare_clocks(links)])

    def _leave_out(self, links: list[AgentLink]) -> list[str]:
        """Do without hosts that do not answer, if the others have enough slots; what is to be said of it."""
        least, named = self._wishes.least, {host.name for host in self._wishes.hosts}
        slots = sum(slots_of(link) for link in links if link.host.name in named)
        if least is None or slots < least or any(link.host.name in self._wishes.servers for link, _ in self.problems):
            return []
        lines = [f"hocket: {link.host.name} is left out: {problem}" for link, problem in self.problems]
        self.problems.clear()
        return lines

    def _deal(self, links: list[AgentLink]) -> dict[AgentLink, int]:
        """How many workers each host gets; none is on those for servers alone, which come last."""
        named = {host.name for host in self._wishes.hosts}
        slots = self._slots = {
            link: slots_of(link) if link.host.name in named else 0 for link in links
        }  # fmt: skip
        is_complete = not self.problems
        wished = (self._wishes.workers, self._wishes.least)
        counts = host_list.deal(list(slots.values()), *wished) if is_complete else list(slots.values())
        return dict(zip(links, counts, strict=True))

    def _deal_servers(self, links: list[AgentLink], counts: dict[AgentLink, int]) -> dict[AgentLink, list[int]]:
        """The numbers of the servers that each host gets."""
        with_workers = [Host(link.host.name) for link in links if counts[link]]
        dealt = self._wishes.servers
        if not dealt and with_workers:
            dealt = host_list.deal_servers(with_workers, self._job.servers)
        return {link: list(dealt.get(link.host.name, ())) for link in links}

    def _find_addresses(self, links: list[AgentLink]) -> Talk[dict[AgentLink, tuple[str, str]]]:
        """The interface and address of each host, found by trying."""
        interface = self._wishes.interface
        nodes = yield from explore(self.ask, links, interface)
        same = len({link.hello["network"] for link in links}) == 1
        found = {}
        for link, (node, known) in nodes.items():
            chosen = routes.choose(node, same_network=same)
            if not node.addresses:
                problem = f"it has no interface {interface!r} that is up, but {', '.join(known)}"
                self.problems.append((link, f"{problem}: use --interface {interface},NAME"))
            elif chosen is None:
                self.problems.append((link, routes.explain(node, interface)))
            else:
                found[link] = chosen
        return found

    def _raise_problems(self) -> None:
        if self._signals.received:
            number = self._signals.received[0]
            print(f"hocket: ended by {signal.Signals(number).name} before anything was started", file=sys.stderr)
            raise SystemExit(128 + number)
        if self.problems:
            ordered = sorted(self.problems, key=lambda found: found[0].number)
            lines = [f"  {link.host.name}: {problem}" for link, problem in ordered]
            raise HostError("\nhocket: ".join(["nothing was started, because of these problems:", *lines]))


def _needed(wishes: Wishes) -> list[Host]:
    """The hosts of the workers, as far as they are needed, then those that have servers alone."""
    found = host_list.needed(wishes.hosts, wishes.workers)
    names = {host.name for host in found}
    return [*found, *(Host(name) for name in wishes.servers if name not in names)]


def explore(
    ask: Ask, links: list[AgentLink], interface: str | None
) -> Talk[dict[AgentLink, tuple[routes.Node, list[str]]]]:
    """Have every host try to reach each of the others.

    Args:
        ask: Puts questions to agents.
        links: The links to the agents of the hosts.
        interface: Look only at the addresses of this one, or of several.

    Returns:
        For those who answered all: what was found out about their addresses, and the names of all their interfaces.
    """
    listening = yield from ask("listen", "listening", {link: {"interface": interface} for link in links})
    targets = {
        link: [[link.number, address, said["port"]] for _, address in said["addresses"]]
        for link, said in listening.items()
    }
    questions: dict[AgentLink, dict[str, Any]] = {
        link: {"targets": [t for other in targets if other is not link for t in targets[other]], "seconds": _TRY}
        for link in targets
    }
    reached = yield from ask("reach", "reached", questions)
    found = {}
    for link in reached:
        entries = [(name, address) for name, address in listening[link]["addresses"]]
        node = routes.Node(link.host.name, entries, link.hello["address"])
        for other in reached:
            if other is not link:
                node.reached_by[other.host.name] = {
                    address for number, address in reached[other]["found"] if number == link.number
                }
        found[link] = node, listening[link]["interfaces"]
    return found


def slots_of(link: AgentLink) -> int:
    """How many workers a host may have."""
    return int(link.host.slots or link.hello["gpus"] or link.hello["cores"])


def why_silent(links: AgentLinks, link: AgentLink, engine: Engine) -> str:
    """Why an agent does not answer, that ``engine`` was to start."""
    links.listen_to_end(link)
    if link.hello:
        return f"{link.trouble or f'no answer within {_ANSWER:.0f} s'}{link.said()}: try again"
    return engine.why_silent(link)


def compare_versions(hello: dict[str, Any]) -> str:
    """What differs between a host and this process; empty if nothing does."""
    torch = machine.version("torch")
    pairs = {
        "Hocket": (hello.get("hocket"), __version__),
        "Python": (_short(str(hello.get("python"))), _short(platform.python_version())),
        "torch": tuple(str(v).partition("+")[0] for v in (hello.get("torch"), torch)),  # builds for other GPUs are fine
    }
    different = [f"{name} {there} there and {here} here" for name, (there, here) in pairs.items() if there != here]
    if not different:
        return ""
    return f"{', '.join(different)}: install the same versions, or name another interpreter with --python"


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _compare_clocks(links: list[AgentLink]) -> list[str]:
    first = links[0]
    lines = []
    for link in links[1:]:
        apart = link.clock - first.clock
        if abs(apart) > _CLOCKS:
            way = "ahead of" if apart > 0 else "behind"
            lines.append(
                f"hocket: the clock of {link.host.name} is {abs(apart):.0f} s {way} that of {first.host.name}: "
                "times in logs and records differ; set the clocks (NTP)"
            )
    return lines
