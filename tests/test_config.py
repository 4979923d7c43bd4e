"""A setting is stated once: its field, variable, flag and error follow from the statement."""

import inspect

import pytest
import typer
from typer.testing import CliRunner

from hocket import config
from hocket.errors import UsageError
from hocket.launch import cli, flags

GIVEN = {
    "strategy": ("central", "central"),
    "timeout": ("2.5", 2.5),
    "on-nan": ("skip", "skip"),
    "on-loss": ("continue", "continue"),
    "spares": ("1", 1),
    "notice": ("5", 5.0),
    "secret-file": ("secret", "secret"),
    "start-timeout": ("60", 60.0),
    "min-workers": ("2", 2),
    "max-losses": ("0", 0),
    "batch": ("512", 512),
    "max-part": ("3", 3),
    "transport": ("gloo", "gloo"),
    "algorithm": ("ring", "ring"),
    "codec": ("int8", "int8"),
    "share-gpus": ("on", True),
    "checkpoint": ("saved", "saved"),
    "checkpoint-every": ("7", 7),
    "checkpoint-keep": ("2", 2),
    "check-replicas": ("0", 0),
    "servers": ("1", 1),
    "tls": ("off", "off"),
    "timeline": ("out.json", "out.json"),
    "verbose": ("on", True),
    "hide-torch-env": ("on", True),
    "as-horovod": ("on", True),
    "seed": ("5", 5),
    "run-dir": ("runs", "runs"),
    "ssh": ("ssh -p 22", "ssh -p 22"),
    "python": ("python3", "python3"),
    "interface": ("eth0", "eth0"),
}


def test_every_setting_has_a_field_that_its_variable_sets() -> None:
    read = config.read({config.SETTINGS[name].variable: text for name, (text, _) in GIVEN.items()})
    assert {name: getattr(read, name.replace("-", "_")) for name in config.SETTINGS} == {
        name: value for name, (_, value) in GIVEN.items()
    }
    assert config.read(dict.fromkeys((setting.variable for setting in config.SETTINGS.values()), "")) == config.Config()


def test_every_setting_is_a_flag_and_nothing_is_given_by_itself() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @flags.takes_settings(before={"tls": ["own"]})
    def command(*, settings: dict[str, str], own: int = 3) -> None:
        seen.append((settings, own))

    for name, setting in config.SETTINGS.items():
        arguments = [f"--{name}"] if setting.is_switch else [f"--{name}", GIVEN[name][0]]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        assert seen.pop() == ({name: GIVEN[name][0]}, 3)
    assert CliRunner().invoke(app, []).exit_code == 0 and seen == [({}, 3)]
    assert {name.replace("-", "_") for name in config.SETTINGS} < set(inspect.signature(cli.run).parameters)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("timeout", "soon", "--timeout soon: must be a positive number of seconds, for example --timeout 1800"),
        ("seed", "-1", "--seed -1: must be a whole number from 0, for example --seed 100"),
        ("batch", "half", "--batch half: must be a whole number from 1 or auto or fixed or per-worker, for example"),
        ("batch", "0", "--batch 0: must be a whole number from 1"),
        ("checkpoint-keep", "0", "--checkpoint-keep 0: must be a whole number from 1"),
        ("tls", "maybe", "--tls maybe: the choices are auto, on, off"),
        ("verbose", "yes", "--verbose yes: the choices are off, on"),
        ("run-dir", "", "--run-dir '': must be the name of a folder"),
    ],
)
def test_a_wrong_text_is_refused_with_the_flag_and_what_it_allows(name: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config.SETTINGS[name].read(text)
