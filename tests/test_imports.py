"""The import graph is the architecture."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "hocket"
# Each may import those before it.
LAYERS = ["transport", "comm", "updates", "coordinator", "server", "capture", "strategies", "job", "launch"]
COMMON = {  # for everyone, and what of each other they may import
    "errors": set(),
    "setting": {"errors"},
    "config": {"errors", "setting"},
    "messages": {"errors"},
    "events": {"errors", "config", "messages"},
    "spans": {"events"},
    "specs": {"errors"},
    "clusters": {"errors"},
    "surroundings": {"errors", "clusters"},
}
FOR_EVERYONE = {"__init__", *COMMON}
PUBLIC = {"hooks": "job", "ray": "launch"}  # modules that users import, built on a layer
CALLER = ROOT / "launch" / "function.py"
OBSERVERS = {"rich", "tensorboard"}  # what observe may import beside the standard library
NO_TORCH = [
    "hocket.launch",
    "hocket.launch.agent",
    "hocket.launch.__main__",
    "hocket.launch.cli",
    "hocket.coordinator.__main__",
    "hocket.lab.doctor.doctor_checks",
    "hocket.lab.rig.rig_cli",
    "hocket.launch.supervisor",
    "hocket.observe.recorder",
    "hocket.observe.show",
    "hocket.lab.rig",
    "hocket.specs",
    "hocket.transport.interfaces",
    "hocket.transport.routes",
    "hocket.config",
    "hocket.surroundings",
    "hocket.events",
    "hocket.horovod.aliases",
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


def test_imports_go_down() -> None:
    for path in modules():
        check_imports(path)


def check_imports(path: Path) -> None:
    here, there = package(path), of_hocket(path)
    if here in COMMON:
        assert there - {here} <= COMMON[here], path
    elif here in LAYERS:
        allowed = {*LAYERS[: LAYERS.index(here) + 1], *FOR_EVERYONE}
        if here == "launch":  # it starts workers, and is none
            allowed = {"launch", "observe", *FOR_EVERYONE}
            if path.name in (
                "agent.py",
                "channel.py",
                "preflight.py",
                "recruits.py",
                "reception.py",
                "dialing.py",
                "meeting.py",
                "tasks.py",
                "ray_engine.py",
            ):  # messages, and addresses
                allowed.add("transport")
            if path.name in ("cli.py", "agent.py"):  # the command has the tools' commands; an agent answers a doctor
                allowed.add("lab")
            if path == CALLER:  # packs what workers of hocket.launch() need; nothing of the command line imports it
                allowed.add("job")
        assert there <= allowed, f"{path} must not import {there - allowed}"
    elif here == "observe":
        assert there <= {here, *FOR_EVERYONE}, path
        others = {name.split(".")[0] for name in imported(path)} - {"hocket", *sys.stdlib_module_names}
        assert others <= OBSERVERS, f"{path} must not import {others - OBSERVERS}"
    elif here in PUBLIC:
        assert there <= {here, PUBLIC[here], *FOR_EVERYONE}, path
    else:
        assert here in ("lab", "horovod", "__main__", "__init__"), f"{here} has no place among the layers"


def test_only_the_transport_knows_how_bytes_move() -> None:
    for path in modules():
        check_knowledge(path)


def check_knowledge(path: Path) -> None:
    if package(path) in ("transport",) or path.parent.name == "bench":
        return
    names = imported(path)
    assert not any(name.startswith(("torch.distributed", "mmap", "ctypes")) for name in names) or (
        path.name == "leftovers.py"  # asks the kernel to end workers with their launcher
        or path.name == "tensor_file.py"  # needs memory that begins at a page to write past the page cache
    ), path
    assert not any(name.startswith(("pickle", "cloudpickle", "marshal", "shelve")) for name in names) or (
        path.name == "pickled_objects.py"  # Horovod promises to send any object, between workers of one job
    ), path


def test_modules_have_one_idea() -> None:
    for path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is for"


def test_the_command_line_does_not_wait_for_torch() -> None:
    code = f"import sys, {', '.join(NO_TORCH)}; assert 'torch' not in sys.modules"
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
