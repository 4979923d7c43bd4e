"""Cells of a notebook for the tests of ``hocket.launch()``, and how to run them: in IPython, or as it keeps cells."""

import subprocess
import sys

import load

PLAIN = """
import linecache, sys, __main__
def run(number, text):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(__main__))
"""
IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell
def run(number, text, shell=InteractiveShell.instance()):
    shell.run_cell(text, store_history=True).raise_error()
"""

DEFINITIONS = """
import concurrent.futures
import dataclasses
import enum
import functools
import xml.etree.ElementTree
from math import sqrt
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, relu
from torch.utils.data import DataLoader, TensorDataset

import hocket

RATE = 0.5
TABLE = {"weights": torch.arange(3.0), 7: (1, "two")}
Alias = tuple[Tensor, int]


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Plan:
    rate: float = RATE
    colour: Colour = Colour.RED


PLAN = Plan(rate=0.25)


def logged(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return "logged", function(*args, **kwargs)

    return inner


def doubled(function):
    def inner(*args):
        return 2 * function(*args)

    return inner


class Base(nn.Module):
    kind: str = "base"

    def child(self) -> "Net":
        return Net()


class Net(Base):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, x: Alias) -> Tensor:
        return relu(self.layer(x))

    @staticmethod
    def half(x):
        return x / 2


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def factorial(n):
    return 1 if n == 0 else n * factorial(n - 1)


double, triple = (lambda x: 2 * x), (lambda x: 3 * x)


@logged
def train(x: Alias, rate: Optional[float] = RATE, *, act: Any = triple):
    out = Base().child()(torch.zeros(1, 2))
    assert xml.etree.ElementTree.fromstring("<a/>").tag == "a" and concurrent.futures.Future
    return {"x": x, "rate": rate, "act": act(2), "plan": PLAN.rate, "colour": PLAN.colour.name, "even": even(4),
            "sum": float(TABLE["weights"].sum() + F.relu(torch.ones(1))), "seven": TABLE[7], "shape": tuple(out.shape),
            "root": sqrt(4), "who": (hocket.rank(), hocket.size()), "array": np.ones(2).tolist(), "kind": Net.kind}


@doubled
def one(x):
    return x + 1


def adder(amount, model=None):
    def add(x):
        nonlocal amount
        amount += 1
        return amount + x

    def count(n):
        return amount if n == 0 else count(n - 1)

    def broken(x):
        return model(x)

    class Local:
        def get(self):
            return amount

    return add, count, broken, lambda: Local().get()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(i * i)


def spawned():
    return [int(x) for x in DataLoader(Squares(), None, num_workers=1, multiprocessing_context="spawn")]


def fail(x):
    raise ValueError(f"broken by {x}")  # as written here
"""

FEW_CALLS = """
RATE = 100  # defaults were evaluated before
assert hocket.launch(train, 3, n=2) == ("logged", {
    "x": 3, "rate": 0.5, "act": 6, "plan": 0.25, "colour": "RED", "even": True, "sum": 4.0, "seven": (1, "two"),
    "shape": (1, 1), "root": 2.0, "who": (0, 2), "array": [1.0, 1.0], "kind": "base"})
assert hocket.launch(spawned, n=1) == [0, 1, 4, 9]
try:
    hocket.launch(fail, "me", n=1)
except hocket.HocketError as error:
    assert str(error).endswith("ValueError: broken by me"), error
    assert '\\n    raise ValueError(f"broken by {x}")  # as written here\\n' in str(error), error
    assert "function.py" not in str(error) and "runpy" not in str(error), error
else:
    raise AssertionError
print("all well")
"""

CALLS = (
    """
RATE = 100
assert hocket.launch(one, 1, n=1) == 4
assert [hocket.launch(f, *args, n=1) for f, args in zip(adder(7)[:2], [(1,), (2,)])] == [9, 7]
assert hocket.launch(adder(7)[3], n=1) == 7
assert hocket.launch(lambda f, plan: (f(5), RATE, double(1), plan.rate), factorial, PLAN, n=1) == (120, 100, 2, 0.25)
assert hocket.launch(Net.half, 5, n=1) == 2.5
"""
    + FEW_CALLS
)

REFUSED = """
import os, threading
model, optimizer_of = nn.Linear(1, 1), torch.optim.SGD
opened, numbers, lock = open(os.devnull), (i for i in range(3)), threading.Lock()
nested = {"a": [model]}
optimizer = optimizer_of(model.parameters(), 0.1)
exec("def unseen(): return 1")

def refused(function, *args):
    try:
        hocket.launch(function, *args, n=1)
    except hocket.HocketError as error:
        print(error)

def uses_helper(): return inner_user()
def inner_user(): return model
refused(lambda: model)
refused(uses_helper)
refused(lambda: opened)
refused(lambda: numbers)
refused(lambda: lock)
refused(lambda: nested)
refused(lambda: unseen())
refused(lambda: optimizer)
refused(unseen)
refused(Net().forward, 1)
refused(adder(1, model)[2], 1)
refused(factorial, model)
refused(eval("lambda: 1"))
refused(functools.partial(one, 1))
"""

MESSAGES = [
    "the global 'model' that <lambda>() uses is a model (torch.nn.modules.linear.Linear), which cannot be sent to "
    "workers: build the model inside the function, or pass its state_dict() as an argument",
    "the global 'model' that inner_user() uses is a model",
    "the global 'opened' that <lambda>() uses is an open file (_io.TextIOWrapper), which cannot be sent to workers: "
    "open it inside the function, and pass its path as an argument",
    "the global 'numbers' that <lambda>() uses is a generator, which cannot be sent to workers: make it a list",
    "the global 'lock' that <lambda>() uses is a _thread.lock, which cannot be sent to workers: build it inside",
    "the global 'nested' that <lambda>() uses.a.0 is a torch.nn.modules.linear.Linear, which cannot be stored",
    "the global 'unseen' that <lambda>() uses is a function without source that can be found (made with exec",
    "the global 'optimizer' that <lambda>() uses is an optimizer (torch.optim.sgd.SGD), which cannot be sent",
    "unseen() is a function without source that can be found (made with exec, at a plain prompt, or changed since): "
    "put the function into a module and import it",
    "forward() is a bound method of a live Net, which cannot be sent to workers: write a function that makes",
    "the variable 'model' around broken() is a model",
    "argument 1 of factorial() is a model",
    "the lambda is a lambda without source that can be found",
    "partial() is a functools.partial, which cannot be sent to workers",
]


def run(shell: str, *cells: str) -> subprocess.CompletedProcess[str]:
    """Run ``cells``, one after the other, in a fresh process."""
    calls = "".join(f"run({number}, {text!r})\n" for number, text in enumerate(cells, 1))
    return subprocess.run(
        [sys.executable, "-c", shell + calls], capture_output=True, text=True, timeout=240 * load.share(), check=False
    )
