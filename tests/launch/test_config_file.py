"""``hocket.toml``: what goes before what, what is refused and how, and the questions of ``hocket config``."""

import os
import pty
import subprocess
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import nn

import hocket
from hocket import config
from hocket.errors import UsageError
from hocket.lab.doctor import doctor_cli
from hocket.launch import config_file
from hocket.launch.config_file import ConfigFile
from launch.test_run import HOCKET

SHOW = """
import os
print(*(os.environ.get(name) for name in ("WORLD_SIZE", "HOCKET_STRATEGY", "HOCKET_TIMEOUT", "HOCKET_FROM_FILE")))
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script that shows its environment."""
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, stdin: int | None = subprocess.DEVNULL, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*HOCKET, *args], env={**os.environ, **variables}, stdin=stdin, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "variables", "shown"),
    [
        ([], {}, "2 local_sgd(period=4) 60 strategy,timeout"),
        (["-n", "1"], {"HOCKET_TIMEOUT": "50"}, "1 local_sgd(period=4) 50 strategy"),
        (["--timeout", "40", "--strategy", "central"], {"HOCKET_TIMEOUT": "50"}, "2 central 40 None"),
        (["-H", "localhost:1"], {}, "1 local_sgd(period=4) 60 strategy,timeout"),
    ],
)
def test_flags_and_variables_go_before_the_file(
    there: Path, flags: list[str], variables: dict[str, str], shown: str
) -> None:
    (there / "hocket.toml").write_text('workers = 2\nstrategy = "local_sgd(period=4)"\ntimeout = 60\n')
    done = run("run", "--no-record", *flags, "show.py", **variables)
    assert done.returncode == 0, done.stderr
    assert f"[0] {shown}" in done.stdout.splitlines()


def chosen(strategy: str | None, on_nan: str | None) -> tuple[str, str]:
    model = nn.Linear(2, 1)
    hocket.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, on_nan=on_nan)
    from hocket.job.worker import current

    strategies = current().training.strategies
    return strategies[0].spec.name, str(current().config.prefer("on_nan", on_nan))


def test_the_script_goes_before_the_file_and_after_all_else(pool: Pool) -> None:
    told = {"strategy": "central", "on_nan": "skip"}
    of_file = ("strategy", "on-nan")
    for script, from_file, expected in [
        ((None, None), of_file, ("central", "skip")),
        (("mirrored", "ignore"), of_file, ("mirrored", "ignore")),
        (("mirrored", "ignore"), (), ("central", "skip")),
    ]:
        assert pool.run(2, chosen, *script, from_file=from_file, **told) == [expected] * 2


def test_a_worker_reads_which_settings_are_of_the_file() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "1", "HOCKET_FROM_FILE": "strategy,on-nan"}
    assert config.read(told).from_file == ("strategy", "on-nan")
    assert config.read({**told, "HOCKET_FROM_FILE": ""}).from_file == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stratgy = 'mirrored'", "there is no such key; did you mean strategy? The keys are hosts, workers"),
        ("strategy = 'miroired'", 'strategy = "miroired": '),
        ("tls = 'maybe'", 'tls = "maybe": the choices are auto, on, off'),
        ("timeout = -1", 'timeout = "-1": must be a positive number of seconds'),
        ("workers = 0", "workers = 0: must be a number of workers from 1, auto, or a range such as 2..8"),
        ("workers = '8..2'", 'workers = "8..2": the fewest workers come first'),
        ("hosts = 'node1:none'", "hosts node1:none: 'node1:none': 'none' is no number of workers"),
        ("[table]\na = 1", 'table is no text and no number: write it as the flag has it, table = "…"'),
        ("strategy mirrored", "is no TOML: Expected '=' after a key in a key/value pair (at line 1, column 10)"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_is_one_line(there: Path, text: str, words: str) -> None:
    (there / "hocket.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        config_file.read()
    assert words in str(caught.value) and str(caught.value).startswith("hocket.toml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_run_in_that_folder_says_so(there: Path) -> None:
    (there / "hocket.toml").write_text("tls = 'maybe'")
    done = run("run", "show.py")
    assert (done.returncode, done.stderr) == (2, 'hocket: hocket.toml: tls = "maybe": the choices are auto, on, off\n')


def test_values_that_are_named_are_written_and_other_lines_stay(there: Path) -> None:
    path = there / "hocket.toml"
    path.write_text("# ours\ntimeout = 60  # seconds\n")
    assert (
        run("config", "hosts=node1:4,node2:4", "strategy=ssp(staleness=3)", "servers=2", "verbose=on").returncode == 0
    )
    assert path.read_text() == (
        '# ours\ntimeout = 60  # seconds\nhosts = "node1:4,node2:4"\nstrategy = "ssp(staleness=3)"\nservers = 2\n'
        "verbose = true\n"
    )
    assert run("config", "hosts=", "timeout=90").returncode == 0
    assert config_file.read() == ConfigFile(
        None, None, {"timeout": "90", "strategy": "ssp(staleness=3)", "servers": "2", "verbose": "on"}
    )
    shown = run("config", "--show").stdout
    assert shown == "timeout = 90\nstrategy = ssp(staleness=3)\nservers = 2\nverbose = on\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            [],
            "asks questions, and there is no terminal: name the values, as in hocket config hosts=node1:4",
        ),
        (
            ["strategy"],
            "'strategy' is no KEY=VALUE: write for example strategy=mirrored; keys: hosts, workers, strategy",
        ),
        (["color=red"], 'hocket.toml: color = "red": there is no such key; '),
        (["timeout=soon"], 'hocket.toml: timeout = "soon": must be a positive number of seconds'),
    ],
)
def test_without_a_terminal_or_with_words_that_make_no_sense(there: Path, args: list[str], words: str) -> None:
    done = run("config", *args)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (there / "hocket.toml").exists()


def test_a_file_that_cannot_be_changed_line_by_line_is_left_alone(there: Path) -> None:
    text = 'hosts = [\n  "node1:4",\n  "node2:4",\n]\n'
    (there / "hocket.toml").write_text(text)
    assert config_file.read().hosts == "node1:4,node2:4"
    assert "change it by hand" in run("config", "hosts=node3").stderr
    assert (there / "hocket.toml").read_text() == text
    assert {path.name for path in there.iterdir()} == {"show.py", "hocket.toml"}


def interview(answers: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    with subprocess.Popen([*HOCKET, "config"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        os.close(theirs)
        os.write(ours, answers.encode())
        said = child.communicate(timeout=60)[0].decode()
    os.close(ours)
    return child.returncode, said


def test_questions_are_asked_until_answers_make_sense(there: Path) -> None:
    status, said = interview("node1:4,node2\n\n\n\nbest\nssp(staleness=2)\n3\n")
    assert status == 0, said
    assert 'strategy = "best"' in said and "servers [1]: " in said
    assert config_file.read() == ConfigFile("node1:4,node2", "auto", {"strategy": "ssp(staleness=2)", "servers": "3"})
    status, said = interview("-\n2\nmirrored\n")  # what was known is in brackets; servers are not needed any more
    assert "hosts [node1:4,node2]: " in said
    assert config_file.read() == ConfigFile(None, "2", {"strategy": "mirrored"})


def test_an_end_of_the_input_writes_nothing(there: Path) -> None:
    status, said = interview("node1\n\x04")
    assert status == 2 and "the input has ended: nothing was written to hocket.toml" in said
    assert not (there / "hocket.toml").exists()


def test_a_doctor_looks_at_the_file(there: Path) -> None:
    assert doctor_cli._read_file() == (ConfigFile(), [])
    (there / "hocket.toml").write_text("hosts = ['node1:4']\ntimeout = 60\n")
    file, (finding,) = doctor_cli._read_file()
    assert file.hosts == "node1:4" and (finding.state, finding.seen) == ("ok", "hosts = node1:4, timeout = 60")
    (there / "hocket.toml").write_text("timeout = 0\n")
    file, (finding,) = doctor_cli._read_file()
    assert file == ConfigFile() and finding.state == "wrong" and finding.seen.startswith("timeout = 0: must be a pos")
