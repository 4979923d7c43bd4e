"""A worker of ``hocket.launch()``: reads the function from a folder, calls it, and leaves rank 0's result there.

Run as ``python -m hocket.job.function.function_worker FOLDER``.
"""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import traceback
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from hocket.errors import UsageError
from hocket.job import packing, worker
from hocket.job.checkpoint import tensor_file
from hocket.job.function import source
from hocket.job.function.references import Reference, indices
from hocket.job.function.source import SourcePlace

# What stands for the notebook in a process that a data loader spawns: it makes the same definitions there.
_MAIN = "from hocket.job.function import function_worker\nfunction_worker.Receiver(__file__).define(globals())\n"


def main() -> None:
    """Run the function as one worker of the job."""
    folder = Path(sys.argv[1])
    sys.excepthook = _show_without_own_frames
    worker.init()
    stand_in = ModuleType("__main__")
    stand_in.__file__ = str(folder / "main.py")
    sys.modules["__main__"] = stand_in
    receiver = Receiver(stand_in.__file__)
    receiver.define(vars(stand_in))
    function, args, kwargs = receiver.call()
    result = function(*args, **kwargs)
    if worker.rank() == 0:
        send_result(folder, result, getattr(function, "__name__", "the function"))


def send(folder: Path, call: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write what workers need to ``folder``."""
    (folder / "main.py").write_text(_MAIN)
    write_parcel(folder, "call", call, tensors)


def send_result(folder: Path, result: Any, name: str) -> None:
    """Write the result, or the one line that says why it cannot be brought back."""
    tensors: dict[str, torch.Tensor] = {}
    try:
        content = {"result": packing.pack(result, f"the result of {name}()", tensors)}
        write_parcel(folder, "result", content, tensors)
    except RecursionError:
        write_parcel(folder, "result", {"error": f"the result of {name}() holds itself: return plain data"}, {})
    except (UsageError, TypeError) as error:
        write_parcel(folder, "result", {"error": f"{error}; return these instead"}, {})


def receive_result(folder: Path) -> Any:
    """What rank 0 has returned.

    Raises:
        FileNotFoundError: rank 0 has not returned anything, not even None.
        UsageError: the result cannot be brought back.
    """
    content, tensors = read_parcel(folder, "result")
    if "error" in content:
        raise UsageError(content["error"])
    return packing.unpack(content["result"], tensors.__getitem__)


class Receiver:
    """Makes the values again that references lead to."""

    def __init__(self, main: str) -> None:
        self._call, self._tensors = read_parcel(Path(main).parent, "call")
        self._made: dict[int, Any] = {}
        if self._call["path"] is not None:
            sys.path[:] = self._call["path"]
        for name, text in self._call["files"].items():
            if not Path(name).exists():  # a cell of a notebook: tracebacks show its lines
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        for module in self._call["modules"]:
            import_module(module)

    def define(self, namespace: dict[str, Any]) -> None:
        """Give ``namespace``, which stands for ``__main__``, the definitions and values that the function uses."""
        waiting = dict(self._call["names"])
        self._bind(waiting, namespace)
        fills = []
        for index in self._call["order"]:
            fills.append(self._make(index, self._call["definitions"][index], namespace))
            self._bind(waiting, namespace)
        for entry, value, fill in fills:
            if fill is not None:
                fill(*map(self._value, entry["free"].values()))
            self._set_defaults(value, entry["defaults"])

    def call(self) -> tuple[Any, list[Any], dict[str, Any]]:
        """The function, and what it is called with."""
        args = [self._value(ref) for ref in self._call["args"]]
        kwargs = {name: self._value(ref) for name, ref in self._call["kwargs"].items()}
        return self._value(self._call["function"]), args, kwargs

    def _bind(self, waiting: dict[str, Reference], namespace: dict[str, Any]) -> None:
        for name in [name for name, ref in waiting.items() if self._is_ready(ref)]:
            namespace[name] = self._value(waiting.pop(name))

    def _is_ready(self, reference: Reference) -> bool:
        return all(index in self._made for index in indices(reference))

    def _make(self, index: int, entry: dict[str, Any], main: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
        place = SourcePlace(*entry["place"])
        text, free = self._call["files"][place.file], entry["free"]
        given = frozenset(entry["defaults"])
        code = source.compiled(text, place, list(free), decorated=entry["decorated"], given=given)
        namespace = main if entry["module"] == "__main__" else vars(import_module(entry["module"]))
        made: dict[str, Any] = {}
        exec(code, namespace, made)
        fill = None
        if free:
            early = [self._value(ref) if self._is_ready(ref) else None for ref in free.values()]
            value, fill = made[source.MAKE](*early)
        else:
            (value,) = made.values()
        inner = inspect.unwrap(value)
        if isinstance(inner, (FunctionType, type)):
            inner.__qualname__ = entry["qualname"]
        self._made[index] = value
        return entry, value, fill

    def _set_defaults(self, value: Any, defaults: dict[str, Reference]) -> None:
        function = inspect.unwrap(value)
        if not defaults or not isinstance(function, FunctionType):
            return
        code, before = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(before) :]
        values = {name: self._value(ref) for name, ref in defaults.items()}
        function.__defaults__ = tuple(values.get(name, old) for name, old in zip(positional, before, strict=True))
        if function.__kwdefaults__:
            function.__kwdefaults__ = {name: values.get(name, old) for name, old in function.__kwdefaults__.items()}

    def _value(self, reference: Reference) -> Any:
        ((kind, content),) = reference.items()
        if kind == "data":
            return packing.unpack(content, self._tensors.__getitem__)
        if kind == "module":
            return import_module(content)
        if kind == "import":
            return attrgetter(content[1])(import_module(content[0]))
        if kind == "define":
            return self._made[content]
        if kind == "attribute":
            return getattr(self._value(content[0]), content[1])
        assert kind == "dataclass", kind
        instance = object.__new__(self._value(content[0]))
        for name, inner in content[1].items():
            object.__setattr__(instance, name, self._value(inner))
        return instance


def _show_without_own_frames(_: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show the traceback from the user's first line on; where there is none, whole."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        inner = inner.tb_next
    traceback.print_exception(error.with_traceback(inner or trace))  # unlike sys.__excepthook__, it knows cells


if __name__ == "__main__":
    # This very module is the one that runs; as __main__ it would stand where the notebook's definitions belong.
    import_module("hocket.job.function.function_worker").main()


def write_parcel(folder: Path, name: str, content: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``content`` (see ``hocket.job.packing``) to ``folder``; the JSON appears last, and whole or not at all."""
    if tensors:
        whole = _whole(tensors)
        image = tensor_file.Image(tensor_file.describe(tensors))
        image.fill(whole)
        image.write(folder / f"{name}.safetensors", "null")
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(content))
    unfinished.replace(folder / f"{name}.json")


def read_parcel(folder: Path, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """What ``write_parcel`` was given; tensors are on the CPU, and belong to the reader."""
    content = json.loads((folder / f"{name}.json").read_text())
    path = folder / f"{name}.safetensors"
    if not path.exists():
        return content, {}
    from safetensors.torch import load_file

    return content, load_file(path)


def _whole(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(f"{name} is a sparse, quantized or meta tensor, which cannot be sent: make it a dense one")
    tensor_file.check(tensors)
    return [tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in tensors.values()]
