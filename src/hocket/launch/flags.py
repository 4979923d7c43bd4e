"""Flags of commands that come from the one statement of a setting in ``config``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from hocket import config


def flag(name: str) -> typer.models.OptionInfo:
    """The flag of a setting, for the annotation of a command's parameter."""
    setting = config.SETTINGS[name]
    if setting.is_switch:
        text = f"{setting.help} Also {setting.variable}=on."
    else:
        allowed = f" [{'|'.join(setting.choices)}]" if setting.choices else ""
        text = f"{setting.help}{allowed} Also {setting.variable}. [default: {setting.default or 'none'}]"
    option: typer.models.OptionInfo = typer.Option(f"--{name}", help=text, show_default=setting.is_switch)
    return option


def takes_settings(before: Mapping[str, Sequence[str]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of all settings, in the place of its parameter ``settings``.

    That parameter is a dictionary of the settings that the user has given, by name, as texts.

    Args:
        before: Parameters of the command that stand among the flags in its help, by the setting that follows them.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        own = dict(inspect.signature(command, eval_str=True).parameters)
        moved = {name: own.pop(name) for names in before.values() for name in names}
        parameters: list[inspect.Parameter] = []
        for name, parameter in own.items():
            parameters += _flags(before, moved) if name == "settings" else [parameter]

        def run(**given: Any) -> None:
            settings = {}
            for name, setting in config.SETTINGS.items():
                value = given.pop(_parameter(name))
                if setting.is_switch:
                    value = "on" if value else None
                if value is not None:
                    settings[name] = value
            command(settings=settings, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return wrap


def _flags(before: Mapping[str, Sequence[str]], moved: Mapping[str, inspect.Parameter]) -> list[inspect.Parameter]:
    """The parameters of all settings, with those of the command that stand among them."""
    found = []
    for name, setting in config.SETTINGS.items():
        found += [moved[other] for other in before.get(name, ())]
        kind, default = (bool, False) if setting.is_switch else (str | None, None)
        found.append(
            inspect.Parameter(
                _parameter(name),
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=Annotated[kind, flag(name)],
            )
        )
    return found


def _parameter(setting: str) -> str:
    return setting.replace("-", "_")
