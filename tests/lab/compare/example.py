"""A comparison that somebody could have made: five strategies, three repeats, one to four workers."""

import math
import random
from typing import Any

from hocket.lab.compare.results import Comparison, Contender, Goal, Point, Result

PASS = 40_000
TARGET = Goal("accuracy", 0.95, rises=True)
# name: seconds a pass of one worker becomes with σ and κ; passes to the target times this; shares; bytes a sample
KINDS: dict[str, dict[str, Any]] = {
    "mirrored": {"serial": 0.07, "settling": 0.004, "passes": 1.0, "waiting": 0.08, "talking": 0.16, "sent": 4200.0},
    "central": {"serial": 0.05, "settling": 0.002, "passes": 1.0, "waiting": 0.07, "talking": 0.09, "sent": 2100.0},
    "local_sgd(period=16)": {
        "serial": 0.02,
        "settling": 0.001,
        "passes": 1.12,
        "waiting": 0.03,
        "talking": 0.02,
        "sent": 262.0,
    },
    "asynchronous": {
        "serial": 0.03,
        "settling": 0.02,
        "passes": 1.35,
        "waiting": 0.02,
        "talking": 0.3,
        "sent": 8400.0,
        "servers": 1,
    },
    "gossip(topology='ring')": {
        "serial": 0.04,
        "settling": 0.003,
        "passes": 1.25,
        "waiting": 0.05,
        "talking": 0.1,
        "sent": 4200.0,
    },
}


def made(
    repeats: int = 3, workers: tuple[int, ...] = (2, 4), target: Goal | None = TARGET, **changes: Any
) -> Comparison:
    entries = [entry("mirrored", 1, repeats)]
    entries += [entry(name, count, repeats) for name in KINDS for count in workers]
    facts = {
        "cpu": "AMD EPYC 7B13 (4 cores)",
        "memory": "16 GB",
        "torch": "2.13.0",
        "hocket": "0.7.0",
        "date": "2026-11-18 14:02",
    }
    return Comparison(
        **{
            "script": "digits.py",
            "arguments": ("--epochs", "12"),
            "command": "hocket compare digits.py -n 4 --workers 1,2,4 --until accuracy=0.95 --repeat 3",
            "about": facts,
            "target": target,
            "repeats": repeats,
            "entries": tuple(entries),
            "notes": ("4 workers on 4 cores: nothing else should run.",),
            **changes,
        }
    )


def entry(name: str, workers: int, repeats: int) -> Contender:
    return Contender(name, workers, tuple(result(name, workers, repeat) for repeat in range(repeats)))


def result(name: str, workers: int, repeat: int) -> Result:
    kind, chance = KINDS[name], random.Random(f"{name} {workers} {repeat}")
    many = workers > 1
    growth = workers / (1 + kind["serial"] * (workers - 1) + kind["settling"] * workers * (workers - 1))
    speed = 14_000 * growth * chance.uniform(0.95, 1.05)
    slower = (kind["passes"] if many else 1.0) * (1 + 0.05 * (workers - 1)) * chance.uniform(0.94, 1.06)
    accuracy, loss = [], []
    for number in range(1, 49):
        passes = number / 4
        value = 0.1 + 0.88 * (1 - math.exp(-passes / (2.1 * slower))) + chance.gauss(0, 0.004)
        samples = int(passes * PASS)
        accuracy.append(Point(samples / speed, samples, min(0.995, value)))
        loss.append(
            Point(samples / speed, samples, 2.3 * math.exp(-passes / (2.4 * slower)) * chance.uniform(0.96, 1.04))
        )
    waiting, talking = (kind["waiting"] * workers / 4, kind["talking"] * workers / 4) if many else (0.0, 0.0)
    servers = kind.get("servers", 0) if many else 0
    staleness = {0: 120, 1: 900 * workers, 2: 500 * workers, 3: 240, 4: 60, 5: 14} if servers else {}
    return Result(
        strategy=name,
        workers=workers,
        servers=servers,
        repeat=repeat,
        seconds=accuracy[-1].seconds,
        start_up=2.4,
        samples=accuracy[-1].samples,
        speed=speed,
        pass_samples=PASS,
        shares={"compute": 1 - waiting - talking, "communication": talking, "waiting": waiting},
        sent=int(kind["sent"] * accuracy[-1].samples) if many else 0,
        staleness=staleness,
        curves={"loss": loss, "accuracy": accuracy},
        reached=next((point for point in accuracy if TARGET.is_reached(point.value)), None),
        gradients={
            "noise scale": 380.0 * chance.uniform(0.8, 1.2),
            "diversity": 3.1,
            "says": "more workers help up to a batch of about 380 samples; now it is 256",
        }
        if name in ("mirrored", "central") and many
        else {},
    )
