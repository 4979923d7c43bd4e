"""The import graph is the architecture."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "hocket"
LAYERS = ["transport", "comm", "updates", "server", "strategies", "job", "launch"]  # each may import those before it
COMMON = {"errors": set(), "config": {"errors"}, "events": {"errors", "config"}, "spans": {"events"}}
FOR_EVERYONE = {"__init__", *COMMON}
CALLER = ROOT / "launch" / "function.py"
BESIDE = {  # seen by launch alone, and what else they may import
    "observe": {"rich", "tensorboard", "matplotlib"},
    "rig": set(),
    "compare": {"rich", "matplotlib"},
}
BENEATH = {"compare": {"observe"}}  # what of the others they may use
NO_TORCH = [
    "hocket.launch",
    "hocket.launch.agent",
    "hocket.launch.called",
    "hocket.launch.cli",
    "hocket.launch.doctor.here",
    "hocket.launch.rig_cli",
    "hocket.launch.supervisor",
    "hocket.observe.recorder",
    "hocket.observe.show",
    "hocket.rig",
    "hocket.strategies.choices",
    "hocket.transport.interfaces",
    "hocket.transport.routes",
    "hocket.config",
    "hocket.events",
]


@cache
def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> set[str]:
    """The packages of Hocket, and the libraries, that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_hocket(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("hocket.")} & {
        package(p) for p in modules()
    }


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here, there = package(path), of_hocket(path)
    if here in COMMON:
        assert there - {here} <= COMMON[here]
    elif here in LAYERS:
        allowed = {*LAYERS[: LAYERS.index(here) + 1], *FOR_EVERYONE}
        if here == "launch":  # it starts workers, and is none: of the other layers it knows the names of strategies
            allowed = {"launch", "strategies", *BESIDE, *FOR_EVERYONE}
            if path.name in ("answers.py", "preflight.py"):  # which of a host's addresses others reach is found out
                allowed.add("transport")
            if path.parent.name == "doctor":  # whether a host's memory and interfaces are fit for it is tried out
                allowed.add("transport")
            if path == CALLER:  # packs what workers of hocket.launch() need; nothing of the command line imports it
                allowed.add("job")
        assert there <= allowed, f"{here} must not import {there - allowed}"
    elif here in BESIDE:
        assert there <= {here, *FOR_EVERYONE, *BENEATH.get(here, ())}
        others = {name.split(".")[0] for name in imported(path)} - {"hocket", *sys.stdlib_module_names}
        assert others <= BESIDE[here], f"{here} must not import {others - BESIDE[here]}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_transport_knows_how_bytes_move(path: Path) -> None:
    if package(path) in ("transport", "bench"):
        return
    names = imported(path)
    assert not any(name.startswith(("torch.distributed", "mmap", "ctypes")) for name in names) or (
        path.name == "leftovers.py"  # asks the kernel to end workers with their launcher
        or path.name == "tensor_file.py"  # needs memory that begins at a page to write past the page cache
    )
    assert not any(name.startswith(("pickle", "cloudpickle", "marshal", "shelve")) for name in names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_have_one_idea(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text)), "says what it is for"


@pytest.mark.parametrize("name", NO_TORCH)
def test_the_command_line_does_not_wait_for_torch(name: str) -> None:
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_worker_imports_torch_and_the_standard_library_only() -> None:
    code = (
        "import sys, torch; before = {name.split('.')[0] for name in sys.modules}\n"
        "import hocket\n"
        "for name in hocket.__all__: getattr(hocket, name)\n"
        "after = {name.split('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names) - {'hocket'}\n"
        "assert not after, after"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
