"""What a setting is, which a user may give by flag or variable, and how its text is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """One value that a user may set by flag or environment variable.

    Attributes:
        default: What holds when nobody sets it, as a text.
        help: What it does, in one sentence.
        reads: Gives the value that a text means, or raises UsageError.
        choices: The texts allowed; empty means any.
        for_launcher: Whether only the launcher knows the setting, and no worker.
        for_hosts: Whether the setting is for several hosts only; it is for the launcher then.
        name: The flag without its dashes.
    """

    default: str
    help: str
    reads: Callable[[Setting, str], Any]
    choices: tuple[str, ...] = ()
    for_launcher: bool = False
    for_hosts: bool = False
    name: str = ""

    @property
    def variable(self) -> str:
        return "HOCKET_" + self.name.replace("-", "_").upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.choices == ("off", "on")

    def read(self, text: str) -> Any:
        """The value that ``text`` means; a UsageError names the flag and what it allows."""
        return self.reads(self, text)


def any_text(_: Setting, text: str) -> str:
    """Any text."""
    return text


def text_or_none(_: Setting, text: str) -> str | None:
    """Any text; an empty one is none."""
    return text or None


def folder(setting: Setting, text: str) -> str:
    """The name of a folder."""
    if not text:
        raise UsageError(f"--{setting.name} '': must be the name of a folder")
    return text


def choice(setting: Setting, text: str) -> str:
    """One of the setting's choices."""
    if text not in setting.choices:
        raise UsageError(f"--{setting.name} {text}: the choices are {', '.join(setting.choices)}")
    return text


def switch(setting: Setting, text: str) -> bool:
    """``on`` or ``off``."""
    return choice(setting, text) == "on"


def seconds(setting: Setting, text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        example = f"--{setting.name} {setting.default}"
        raise UsageError(f"--{setting.name} {text}: must be a positive number of seconds, for example {example}")
    return value


def count(least: int, **words: Any) -> Callable[[Setting, str], Any]:
    """Reads whole numbers from ``least``, and ``words`` as their values; ``_`` stands for ``-``, alone for no text."""
    known = {word.strip("_").replace("_", "-"): value for word, value in words.items()}

    def read(setting: Setting, text: str) -> Any:
        if text in known:
            return known[text]
        if not text.isdecimal() or int(text) < least:
            name, also = setting.name, "".join(f" or {word}" for word in known if word)
            raise UsageError(f"--{name} {text}: must be a whole number from {least}{also}, for example --{name} 100")
        return int(text)

    return read
