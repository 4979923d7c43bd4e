"""Talks with agents: questions to several of them at once, one after the other, as far as answers have come."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from hocket.launch.message_pipe import Frame

if TYPE_CHECKING:
    from hocket.launch.agent_links import AgentLink

T = TypeVar("T")


class Question(NamedTuple):
    """What several agents are asked at once.

    Attributes:
        kind: The kind of the question; empty if nothing is sent, and agents say by themselves what is waited for.
        answer: The kind of the answer.
        heads: What to ask each of them.
        seconds: How long to wait.
        body: Bytes that go with the question.
    """

    kind: str
    answer: str
    heads: dict[AgentLink, dict[str, Any]]
    seconds: float
    body: bytes = b""


Answers: TypeAlias = "dict[AgentLink, dict[str, Any]]"
"""The answers of those that gave one."""

Talk = Generator[Question, "Answers", T]
"""A talk with agents: yields its questions, one after the other, is sent the answers, and returns what it has found."""


class Interview:
    """Carries on a talk with agents, as far as answers have come; waits for nobody.

    Attributes:
        is_over: Whether the talk has come to its end.
        found: What it has returned then.
    """

    def __init__(self, talk: Talk[Any]) -> None:
        self._talk = talk
        self._answers: Answers = {}
        self.is_over = False
        self.found: Any = None
        self._ask(lambda: next(talk))

    def take(self, link: AgentLink, frame: Frame) -> None:
        """An agent has said something."""
        if not self.is_over and frame.kind == self._question.answer and link in self._question.heads:
            self._answers[link] = frame.head

    def tick(self, *, hurries: bool = False) -> None:
        """Go on if nobody is to answer any more, or at once if it ``hurries``; raises what the talk raises."""
        if self.is_over:
            return
        missing = any(link not in self._answers and not link.trouble for link in self._question.heads)
        if hurries or not missing or time.monotonic() > self._deadline:
            answers, self._answers = self._answers, {}
            self._ask(lambda: self._talk.send(answers))

    def _ask(self, step: Callable[[], Question]) -> None:
        try:
            self._question = question = step()
        except StopIteration as end:
            self.is_over, self.found = True, end.value
            return
        self._deadline = time.monotonic() + question.seconds
        for link, head in question.heads.items() if question.kind else ():
            link.channel.send(question.kind, question.body, **head)
