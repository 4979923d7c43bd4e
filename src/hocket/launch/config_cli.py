"""The command ``hocket config``: asks what a job needs, once, and writes ``hocket.toml``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hocket import config as configuration
from hocket import specs
from hocket.errors import HocketError, UsageError
from hocket.launch import config_file
from hocket.launch.config_file import NAME

_HELP = {
    "hosts": "Other machines over SSH, with this one if it is to work, too: node1:4,node2:4. [default: this machine]",
    "workers": "How many workers: a number, auto, or 2..8, never fewer or more.",
}
_NONE = "-"  # the answer that takes a value away


def config(
    values: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE: set this and ask nothing; KEY= takes it away.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what hocket.toml says, and change nothing.")] = False,
) -> None:
    """Ask for hosts, workers, strategy … once, and write hocket.toml, which hocket run in this folder reads."""
    path = Path(NAME)
    if show:
        for key, text in config_file.read().values().items():
            print(f"{key} = {text}")
        return
    if values:
        answers = dict(_pair(text) for text in values)
    elif sys.stdin is not None and sys.stdin.isatty():
        answers = _interview(config_file.read().values())
    else:
        raise UsageError(
            "hocket config asks questions, and there is no terminal: name the values, as in "
            "hocket config hosts=node1:4,node2:4 strategy=mirrored"
        )
    config_file.write(path, answers)
    print(f"hocket: {path.absolute()} is written; flags, HOCKET_ variables and the script go before it")


def _pair(text: str) -> tuple[str, str]:
    key, given, value = text.partition("=")
    if not given:
        keys = ", ".join(config_file.KEYS)
        raise UsageError(f"{text!r} is no KEY=VALUE: write for example strategy=mirrored; keys: {keys}")
    return key.strip(), value.strip()


def _interview(known: dict[str, str]) -> dict[str, str]:
    """What the user answers; ``known`` is what the file says."""
    answers: dict[str, str] = {}

    def ask(key: str, default: str = "") -> str:
        setting = configuration.SETTINGS.get(key)
        default = known.get(key, default or (setting.default if setting is not None else ""))
        print(f"\n{_HELP[key] if setting is None else setting.help}")
        answer = _ask(f"{key} [{default or 'none'}]: ", lambda text: config_file.check({key: text}, NAME))
        answer = answer or default
        answers[key] = "" if answer == _NONE else answer
        return answers[key]

    print(f"The answer in brackets holds if you give none; {_NONE} takes it away.")
    if ask("hosts"):
        ask("python")
        ask("interface")
    ask("workers", "auto")
    strategy = ask("strategy")
    if strategy and specs.parse(strategy).servers != "none":
        ask("servers", "1")
    elif "servers" in known:
        answers["servers"] = ""
    return answers


def _ask(question: str, check: Callable[[str], object]) -> str:
    """An answer that makes sense; what is wrong with one that does not is said, and it is asked again."""
    while True:
        try:
            answer = input(question).strip()
        except EOFError:
            raise UsageError(f"the input has ended: nothing was written to {NAME}") from None
        try:
            if answer and answer != _NONE:
                check(answer)
            return answer
        except HocketError as error:
            print(error)
