"""Docs and examples are true."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_page_of_settings_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "settings.py"))
    assert made["PAGE"].read_text() == made["page"](), "run: python docs/settings.py"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "args", "result"),
    [
        ("digits", ["--epochs", "4"], r"accuracy ([\d.]+)%"),
        ("characters", ["--nbytes", "61441"], r"loss ([\d.]+)\n$"),
        ("characters", ["--nbytes", "61441", "--bfloat16"], r"loss ([\d.]+)\n$"),
        ("gan", ["--epochs", "20"], r"loss ([\d.]+)\n"),
    ],
)
def test_examples_in_pairs_give_the_same_result(name: str, args: list[str], result: str) -> None:
    plain = re.search(result, run(f"examples/{name}_plain.py", *args))
    many = re.search(result, run("-m", "hocket.launch.cli", "run", "-n", "2", f"examples/{name}.py", *args))
    assert plain is not None and many is not None
    if name == "digits":  # shuffled by a generator that the script does not fix, so not the same to the last digit
        assert abs(float(plain[1]) - float(many[1])) < 3
    elif name == "gan":  # other noise on every rank
        assert abs(float(plain[1]) - float(many[1])) < 1
    else:
        assert float(many[1]) == pytest.approx(float(plain[1]), abs=0.02 if "--bfloat16" in args else 0.0011)


def test_sparse_embeddings_on_servers_learn_as_well() -> None:
    result, args = r"loss ([\d.]+)", ["--files", "8", "--epochs", "3"]
    plain = re.search(result, run("examples/words_plain.py", *args))
    job = ["-m", "hocket.launch.cli", "run", "-n", "2", "--servers", "2", "--strategy", "bsp"]
    many = re.search(result, run(*job, "examples/words.py", *args))
    assert plain is not None and many is not None
    assert float(many[1]) < 1.3 and float(plain[1]) < 1.3  # nothing learned is 1.386


def test_the_benchmarks_run() -> None:
    table = run("-m", "hocket.launch.cli", "bench", "step", "--rounds", "1", "--models", "cnn", "--optimizers", "sgd")
    assert "mirrored" in table and "independent" in table
    assert '"size": "64 MiB"' in run("-m", "hocket.launch.cli", "bench", "allreduce", "--rounds", "1", "--json")
    memory = run("-m", "hocket.launch.cli", "bench", "memory", "--json")
    kept = [float(value) for value in re.findall(r'state_MB": ([\d.]+)', memory)]
    saving = run("-m", "hocket.launch.cli", "bench", "checkpoint", "--rounds", "1", "--models", "cnn", "--json")
    assert '"cost_%"' in saving
    assert kept[0] == pytest.approx(2 * kept[1], rel=0.01) and kept[1] == pytest.approx(kept[2], rel=0.01)
