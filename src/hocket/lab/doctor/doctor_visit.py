"""The conversation of a doctor with the agents of all hosts: has them looked at, and what is between them measured."""

from __future__ import annotations

import math
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hocket import __version__
from hocket.errors import UsageError
from hocket.lab.doctor import findings as found_out
from hocket.lab.doctor import host_links
from hocket.lab.doctor.findings import Finding, note, ok, wrong
from hocket.lab.doctor.host_links import HostPair, Trip
from hocket.launch import machine, preflight
from hocket.launch.agent_links import AgentLink, AgentLinks
from hocket.launch.host_list import Host, Wishes
from hocket.launch.interview import Answers, Talk
from hocket.launch.signals import Signals
from hocket.transport import routes

_CONNECT = 30.0  # seconds until an agent has to have said hello
_EXAMINE = 75.0
_ANSWER = 20.0
_TRIPS = 9
_STREAM, _STREAM_LEAST, _STREAM_ALL = 0.4, 0.1, 20.0  # seconds of one stream, at least, and of all together


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        findings: In the order in which they are shown.
        pairs: What was measured between the hosts.
        fit: The hosts that could run a job together.
    """

    findings: list[Finding] = field(default_factory=list)
    pairs: list[HostPair] = field(default_factory=list)
    fit: list[Host] = field(default_factory=list)

    @property
    def slowest(self) -> float:
        """Bytes per second of the slowest link; infinitely many where there is none."""
        return min((min(way.there, way.back) for way in self.pairs), default=math.inf)


def look(wishes: Wishes, signals: Signals, *, alone: bool) -> Diagnosis:
    """Look at the hosts of ``wishes``; with ``alone``, at this machine, which is the only one of them.

    Raises:
        SystemExit: a signal asked for the end meanwhile.
    """
    found = Diagnosis()
    started: list[AgentLink] = []
    try:
        for number, host in enumerate(wishes.hosts):
            try:
                started.append(wishes.engine.begin(host, number))
            except UsageError as error:
                found.findings.append(found_out.split("ssh", str(error)).at("" if alone else host.name))
    except BaseException:
        for link in started:
            link.close()
        raise
    links = AgentLinks(started, signals)
    try:
        _Visit(wishes, links, signals, found, alone).make()
    finally:
        links.close()
    return found


class _Visit:
    def __init__(self, wishes: Wishes, links: AgentLinks, signals: Signals, found: Diagnosis, alone: bool) -> None:
        self._wishes, self._links, self._signals, self._found, self._alone = wishes, links, signals, found, alone
        self._secret = secrets.token_bytes(32)
        self._unfit: set[AgentLink] = set()

    def make(self) -> None:
        """Look at all hosts at once, then at the clocks, then at one pair after the other."""
        links = self._connect()
        for link in links:
            link.channel.send("job", self._secret, number=link.number, environment=self._wishes.exported)
        links = self._examine(links)
        if not self._alone:
            for link in links:
                self._compare_clock(link)
            if len(links) > 1:
                self._explore(links)
        stop_if_asked(self._signals)
        self._found.fit = [link.host for link in links if link not in self._unfit and not link.trouble]

    def _connect(self) -> list[AgentLink]:
        """The hosts that can be talked with; an agent of another Hocket may not know what to answer."""
        self._links.ask({link: {} for link in self._links.all}, "", "hello", _CONNECT)
        stop_if_asked(self._signals)
        good = []
        for link in self._links.all:
            if not link.hello:
                problem = preflight.why_silent(self._links, link, self._wishes.engine)
                self._add(link, found_out.split("agent" if link.host.is_here else "ssh", problem))
                continue
            if not self._alone:
                problem = preflight.compare_versions(link.hello)
                self._add(link, found_out.split("versions", problem) if problem else ok("versions", "the same as here"))
            if link.hello.get("hocket") == __version__:
                good.append(link)
                self._check_slots(link)
        return good

    def _check_slots(self, link: AgentLink) -> None:
        """Whether there is memory for as many workers as the user has written."""
        slots, free = link.host.slots, link.hello["free memory"]
        most = machine.most_workers(free)
        if slots is not None and most is not None and slots > most:
            self._add(link, wrong("slots", machine.too_many(slots, free), f"write {link.host.name}:{most}"))

    def _examine(self, links: list[AgentLink]) -> list[AgentLink]:
        folder, interface = machine.working_folder(), self._wishes.interface
        questions = {
            link: {"folder": folder, "interface": interface, "where": "here" if link.host.is_here else "there"}
            for link in links
        }
        answers = self._ask("examine", "examined", questions, _EXAMINE)
        for link in (link for link in links if link in answers):  # as they were named, not as they answered
            said = answers[link]
            try:
                for entry in found_out.read(said["findings"]):
                    self._add(link, entry)
            except (ValueError, TypeError):
                reason = f"the checks there ended with status {said.get('status')}{link.said()}"
                remedy = "see what python -m hocket.lab.doctor.doctor_checks . '' here says"
                self._add(link, wrong("checks", reason, remedy))
        return [link for link in links if link in answers]

    def _compare_clock(self, link: AgentLink) -> None:
        trips: list[Trip] = []
        while len(trips) < _TRIPS and not link.trouble:
            asked = time.time()
            answer = self._links.ask({link: {}}, "time", "timed", 5.0)
            if link not in answer:
                break
            trips.append(Trip(asked, time.time(), float(answer[link]["time"])))
        if trips and not link.host.is_here:
            self._add(link, host_links.judge_clock(*host_links.clock_difference(trips)))

    def _explore(self, links: list[AgentLink]) -> None:
        """Who reaches whom, and how well."""
        explored = self._links.carry_out(preflight.explore(self._ask_all, links, self._wishes.interface))
        nodes = {link: explored[link][0] for link in links if link in explored}
        same = len({link.hello["network"] for link in links}) == 1
        before = len(self._found.findings)
        targets: list[tuple[AgentLink, AgentLink, str]] = []
        several = list(nodes)
        for place, first in enumerate(several):
            for second in several[place + 1 :]:
                address = self._address(first, nodes[second], same) or ""
                back = self._address(second, nodes[first], same) or ""
                if address:
                    targets.append((first, second, address))
                elif back:
                    targets.append((second, first, back))
        for link, node in nodes.items():
            self._judge_reach(link, node, same)
        if len(self._found.findings) == before and len(nodes) > 1:
            chosen = [f"{node.name} at {entry[1]}" for node in nodes.values()
                      if (entry := routes.choose(node, same_network=same))]  # fmt: skip
            self._found.findings.append(ok("reach", f"all hosts reach each other: {', '.join(chosen)}"))
        seconds = min(_STREAM, max(_STREAM_LEAST, _STREAM_ALL / max(1, 2 * len(targets))))
        for first, second, address in targets:
            self._measure(first, second, address, seconds)
        self._found.findings += host_links.judge(self._found.pairs)

    def _address(self, link: AgentLink, other: routes.Node, same: bool) -> str | None:
        """Where ``link`` reaches the other host, best where a job would."""
        reached = other.reached_by.get(link.host.name, set())
        chosen = routes.choose(other, same_network=same)
        return chosen[1] if chosen is not None and chosen[1] in reached else min(reached, default=None)

    def _judge_reach(self, link: AgentLink, node: routes.Node, same: bool) -> None:
        if routes.choose(node, same_network=same) is not None:
            return
        self._unfit.add(link)
        if node.addresses:  # else it has been said that there is no such interface
            self._add(link, found_out.split("reach", routes.explain(node, self._wishes.interface)))

    def _measure(self, first: AgentLink, second: AgentLink, address: str, seconds: float) -> None:
        pair = f"{first.host.name} and {second.host.name}"
        listening = self._ask("meter", "metering", {second: {"address": address}})
        if second not in listening:
            return
        question = {"address": address, "port": listening[second]["port"], "seconds": seconds}
        said = self._ask("measure", "measured", {first: question}).get(first)
        second.channel.send("unmeter")
        if said is None:
            return
        if "trouble" in said:
            seen = f"{pair} could not be measured at {address}: {said['trouble']}"
            self._found.findings.append(note("links", seen, "does a firewall close connections? try again"))
            return
        numbers = {key: float(said[key]) for key in ("median", "p90", "there", "back")}
        self._found.pairs.append(HostPair(first.host.name, second.host.name, address, **numbers))

    def _ask(
        self, kind: str, answer: str, questions: dict[AgentLink, dict[str, Any]], seconds: float = _ANSWER
    ) -> dict[AgentLink, dict[str, Any]]:
        """The answers of those that gave one; the others have a finding."""
        asked = {link: head for link, head in questions.items() if not link.trouble}
        answered = self._links.ask(asked, kind, answer, seconds)
        stop_if_asked(self._signals)
        for link in asked:
            if link not in answered:
                self._unfit.add(link)
                self._add(link, found_out.split("agent", preflight.why_silent(self._links, link, self._wishes.engine)))
        return answered

    def _ask_all(self, kind: str, answer: str, questions: Answers) -> Talk[Answers]:
        """The same for a talk, with nothing else to be done meanwhile."""
        yield from ()
        return self._ask(kind, answer, questions)

    def _add(self, link: AgentLink, entry: Finding) -> None:
        self._found.findings.append(entry.at("" if self._alone else link.host.name))
        if entry.state == "wrong" and entry.name in ("versions", "torch", "interfaces"):
            self._unfit.add(link)  # no job can start there


def stop_if_asked(signals: Signals) -> None:
    """SystemExit if a signal has asked for the end."""
    if signals.received:
        number = signals.received[0]
        fresh = "\r\x1b[K" if sys.stderr.isatty() else ""  # in place of what was being done
        print(f"{fresh}hocket: ended by {signal.Signals(number).name}", file=sys.stderr)
        raise SystemExit(128 + number)
