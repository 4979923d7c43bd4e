"""``hocket.toml``: what ``hocket run`` in a folder uses where neither flag, variable nor script says anything else."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hocket import config, specs
from hocket.errors import HocketError, UsageError
from hocket.launch import host_list, machine

NAME = "hocket.toml"
KEYS = ("hosts", "workers", *config.SETTINGS)


@dataclass(frozen=True)
class ConfigFile:
    """What is in the file; nothing if there is none.

    Attributes:
        hosts: As ``-H`` has them.
        workers: As ``-n`` has them.
        settings: All else, by the name of the setting, as texts.
    """

    hosts: str | None = None
    workers: str | None = None
    settings: dict[str, str] = field(default_factory=dict)

    def values(self) -> dict[str, str]:
        """Everything that the file says, by key."""
        said = {"hosts": self.hosts, "workers": self.workers, **self.settings}
        return {key: text for key, text in said.items() if text is not None}


def read(path: Path | None = None) -> ConfigFile:
    """Read the file, by default that of the working folder.

    Raises:
        UsageError: something in it is wrong: the key, what is there, and what it may be.
    """
    path = path or Path(NAME)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ConfigFile()
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): mend or remove it") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f'{path} is no TOML: {error}; write lines such as strategy = "mirrored"') from None
    return check({key: _text(path, key, value) for key, value in found.items()}, str(path))


def check(values: Mapping[str, str], where: str) -> ConfigFile:
    """What ``values`` say, by key, after a look at each; ``where`` they stand is for messages."""
    for key, text in values.items():
        try:
            _check(key, text)
        except HocketError as error:
            words = str(error)
            for flag in (f"--{key} {text}: ", f"-n {text}: ", f"-n {text}, "):
                words = words.removeprefix(flag)
            raise UsageError(f"{where}: {key} = {_toml(key, text)}: {words}") from None
    settings = {key: text for key, text in values.items() if key in config.SETTINGS}
    return ConfigFile(values.get("hosts"), values.get("workers"), settings)


def write(path: Path, values: Mapping[str, str]) -> None:
    """Set keys in the file, and take away those whose text is empty; all other lines stay as they are.

    Raises:
        UsageError: a value makes no sense, the file has lines that only its user can change, or cannot be written.
    """
    before = read(path).values()
    wanted = {key: text for key, text in {**before, **values}.items() if text}
    check(wanted, str(path))
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else [
        f"# What hocket run in this folder uses where no flag, variable or script says anything else: {NAME}."
    ]  # fmt: skip
    for key, text in values.items():
        place = next((number for number, line in enumerate(lines) if re.match(rf'"?{key}"?\s*=', line)), len(lines))
        lines[place : place + 1] = [f"{key} = {_toml(key, text)}"] if text else []
    told = "\n".join(lines) + "\n"
    try:
        made = tomllib.loads(told)
        if {key: _text(path, key, value) for key, value in made.items()} != wanted:
            raise ValueError
    except ValueError:
        raise UsageError(f"{path} has lines that cannot be changed one by one: change it by hand") from None
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(told, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error.strerror}): choose another folder") from None


def _text(path: Path, key: str, value: Any) -> str:
    """A value of TOML as the text that a flag would have."""
    if key == "hosts" and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ",".join(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise UsageError(f'{path}: {key} is no text and no number: write it as the flag has it, {key} = "…"')


def _toml(key: str, text: str) -> str:
    """A text as TOML writes it: numbers and switches as such."""
    setting = config.SETTINGS.get(key)
    if setting is not None and setting.is_switch and text in setting.choices:
        return "true" if text == "on" else "false"
    if re.fullmatch(r"0|[1-9]\d*(\.\d+)?", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped) + '"'


def _check(key: str, text: str) -> None:
    if key not in KEYS:
        close = get_close_matches(key, KEYS, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"there is no such key; {meant}The keys are {', '.join(KEYS)}")
    if key == "hosts":
        host_list.parse(text, "hosts")
    elif key == "workers":
        if text != "auto" and machine.worker_bounds(text) is None and (not text.isdecimal() or int(text) < 1):
            raise UsageError("must be a number of workers from 1, auto, or a range such as 2..8")
    else:
        config.SETTINGS[key].read(text)
        if key == "strategy":
            specs.parse(text)
