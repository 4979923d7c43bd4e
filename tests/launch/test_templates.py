"""``hocket template``: what is printed fits the schemas of JobSet and SkyPilot, and what it runs is told its place."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hocket.errors import UsageError
from hocket.launch import templates
from hocket.launch.template_cli import app
from hocket.launch.templates import Wanted

SCHEMAS = Path(__file__).parent / "schemas"
BASE = ["train.py", "-n", "3", "--image", "ghcr.io/me/train:1"]


def make(kind: str, *more: str) -> tuple[dict[str, Any], str]:
    done = CliRunner().invoke(app, [kind, *BASE, *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = yaml.safe_load(done.stdout)
    jsonschema.validate(found, json.loads((SCHEMAS / {"k8s": "jobset.json"}.get(kind, "skypilot.json")).read_text()))
    return found, done.stdout


def test_a_jobset_has_pods_that_know_their_job() -> None:
    found, text = make("k8s", "--gpus", "1", "--cpus", "8", "--set", "strategy=central", "--", "--epochs", "3")
    (job,) = found["spec"]["replicatedJobs"]
    assert (job["template"]["spec"]["parallelism"], job["template"]["spec"]["completions"]) == (3, 3)
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["hocket", "run", "--strategy", "central", "train.py", "--epochs", "3"]
    told = {each["name"]: each["value"] for each in container["env"]}
    assert told["JOBSET_NAME"] == found["metadata"]["name"] == "train" and told["HOCKET_PODS"] == "3"
    assert told["REPLICATED_JOB_NAME"] == job["name"]
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "secret"]
    assert Path(told["HOCKET_SECRET_FILE"]).parent == Path(mount["mountPath"])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1, "cpu": 8}
    assert pod["volumes"][0]["secret"] == {"secretName": "train", "defaultMode": 0o400}
    assert "kubectl create secret generic train --from-literal=secret=" in text
    plain, _ = make("k8s")
    assert (
        "resources" not in plain["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    )


def test_the_schema_of_a_jobset_is_one() -> None:
    found, _ = make("k8s")
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 3
    with pytest.raises(jsonschema.ValidationError, match="paralelism"):
        jsonschema.validate(found, json.loads((SCHEMAS / "jobset.json").read_text()))


def test_each_node_of_skypilot_tells_hocket_its_place(tmp_path: Path) -> None:
    found, _ = make("skypilot", "--gpus", "A100:1", "--set", "strategy=local_sgd(period=16)", "--", "it's", "here")
    assert found["num_nodes"] == 3 and found["resources"]["accelerators"] == "A100:1"
    fake = tmp_path / "hocket"
    fake.write_text(
        "#!/bin/sh\nstat -c %a $HOCKET_SECRET_FILE; cat $HOCKET_SECRET_FILE; echo; echo $HOCKET_SECRET_FILE\n"
        'echo "$TF_CONFIG"\nfor word in "$@"; do echo "$word"; done\n'
    )
    fake.chmod(0o755)
    told = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NODE_RANK": "2", "HOCKET_JOB_SECRET": "s3"}
    env = {**os.environ, **told, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", found["run"]], env=env, capture_output=True, text=True, check=True, timeout=60
    )  # fmt: skip
    mode, secret, path, config, *words = done.stdout.splitlines()
    assert (mode, secret) == ("600", "s3") and not Path(path).exists()
    assert json.loads(config) == {
        "cluster": {"worker": ["10.0.0.1:29400", "10.0.0.2:29400", "10.0.0.3:29400"]},
        "task": {"type": "worker", "index": 2},
    }
    assert words == ["run", "--strategy", "local_sgd(period=16)", "train.py", "it's", "here"]


@pytest.mark.parametrize(
    ("kind", "more", "words"),
    [
        ("k8s", ["-n", "0"], "-n 0: a job needs at least one machine"),
        ("k8s", ["--name", "My Job"], "--name My Job: must be at most 40 letters a-z, digits and dashes"),
        ("skypilot", ["--gpus", "8"], "--gpus 8: SkyPilot wants its kind"),
        ("k8s", ["--gpus", "4"], "uses one GPU: use -n 12 --gpus 1"),
        ("skypilot", ["--gpus", "A100:2"], "use -n 6 --gpus A100:1"),
        ("k8s", ["--set", "colour=red"], "--set colour=red: must be a flag of hocket run and its value"),
        ("k8s", ["--set", "timeout=soon"], "--timeout soon: must be a positive number of seconds"),
    ],
)
def test_words_that_make_no_sense_are_refused(kind: str, more: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, [kind, *BASE, *more], catch_exceptions=False)
    assert words in str(caught.value)


def test_a_script_of_any_name_gets_a_name() -> None:
    for script, name in (("Train_GPT 2.py", "train-gpt-2"), ("x" * 60 + ".py", "x" * 40)):
        done = CliRunner().invoke(app, ["k8s", script, "--image", "i"], catch_exceptions=False)
        assert yaml.safe_load(done.stdout)["metadata"]["name"] == name


PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), PRINTABLE),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.from_regex(r"[a-z]{2,5}x", fullmatch=True), inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z]{2,5}x", fullmatch=True), DATA, min_size=1, max_size=3))
def test_what_is_written_is_read_as_it_was(data: dict[str, Any]) -> None:
    assert yaml.safe_load(templates.write(data)) == data


def test_lines_of_a_text_stay() -> None:
    assert yaml.safe_load(templates.write({"run": "a: b\n  c\n", "next": [{"x": 1}]})) == {
        "run": "a: b\n  c\n", "next": [{"x": 1}]
    }  # fmt: skip
    assert Wanted(["-m", "mine"], 1, "i", "a").run == ["hocket", "run", "-m", "mine"]
