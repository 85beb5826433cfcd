"""Timelines that are made up line by line, without the classes that write them."""

import json
import random

import pytest


def window(number, at, counts=(4, 2, 1), wall_ms=80.0, busy_ms=(70.0, 75.0, 60.0), **other):
    base = {
        "event": "window", "window": number, "epoch": number // 10, "counts": list(counts),
        "examples": 10 * sum(counts), "busy_ms": list(busy_ms), "wall_ms": wall_ms,
        "sync_ms": 2.0, "skew_ms": 1.0, "steady": True, "at": at,
    }  # fmt: skip
    return base | other


def begin(at, first=0, names=("a", "b", "c"), target=0.1):
    return {
        "event": "run", "devices": list(names), "cadence": "ElChe()",
        "overhead_target": target, "windows": first, "exchange_bytes": 4_000_000,
        "frozen_bytes": 1_000_000, "at": at,
    }  # fmt: skip


def metrics(kind, number, at, **values):
    shared = {"event": kind, "window": number, "epoch": number // 10, "seconds": 0.25}
    more = {"windows": 10, "examples": 700} if kind == "epoch" else {}
    return shared | more | {"names": [*values], "values": [*values.values()], "at": at}


def process(first, last, seed, names=("a", "b", "c")):
    """What one process reports: windows of random lengths, and an event of every kind."""
    rng = random.Random(seed)
    lines, at = [begin(0.01, first, names)], 0.5
    lines.append(
        {
            "event": "compile",
            "seconds": 0.4,
            "ahead": False,
            "program": "accumulate",
            "at": at - 0.05,
        }
    )
    for number in range(first, last):
        wall = rng.uniform(50, 120)
        at += wall / 1e3 + rng.uniform(0, 0.02)
        counts = [rng.randint(1, 9) for _ in names]
        busy = [rng.uniform(0.3, 0.97) * wall for _ in names]
        sync, steady = 0.02 * wall, number > first
        record = {"wall_ms": wall, "busy_ms": busy, "sync_ms": sync, "steady": steady}
        lines.append(window(number, at, counts, **record))
        at += 1e-4
        loss = {"window": number, "epoch": number // 10, "loss": 3 / (1 + number), "at": at}
        lines.append({"event": "loss"} | loss)
        if number % 10 == 9:
            lines.append(metrics("epoch", number, at, loss=2.0 / number))
            lines.append(metrics("evaluation", number, at + 0.001, accuracy=0.1, loss=2.5 / number))
            saved = {"seconds": 0.1, "size": 1000, "path": "c/9", "at": at + 0.002}
            lines.append({"event": "checkpoint", "window": number, "epoch": number // 10} | saved)
            at += 0.003
    where = {"window": last - 1, "epoch": 0, "at": at}
    lines.append({"event": "anchor", "before": 2, "anchor": 5} | where)
    lines.append({"event": "skip", "reason": "not finite"} | where)
    lines.append({"event": "verdict", "action": "nudge_down", "factor": 0.5} | where)
    return lines


NASTY = "<!--<script </script><b>\"&'{{title}}"
"""Text that must not become markup."""


def nasty():
    """A run whose names are markup."""
    evaluation = metrics("evaluation", 1, 1.2, **{NASTY: 0.5})
    lines = [
        begin(0.0, names=(NASTY, "b", "c")) | {"cadence": NASTY},
        window(0, 1.0), window(1, 1.1), evaluation, metrics("epoch", 1, 1.3, loss=1),
        {"event": "skip", "window": 1, "epoch": 0, "reason": NASTY, "at": 1.3},
        {"event": "checkpoint", "window": 1, "epoch": 0, "seconds": 1, "size": 9, "path": NASTY,
         "at": 1.4},
    ]  # fmt: skip
    return lines


def long_run(windows, devices=8):
    """A run of many windows, every 20th dropped, which is an epoch's end, too."""
    names = [f"cuda:{rank}" for rank in range(devices)]
    lines, at = [begin(0.0, names=names)], 1.0
    for number in range(windows):
        counts = [1 + (number * 7 + rank) % 5 for rank in range(devices)]
        busy = [50 + 0.12345 * ((number + rank) % 300) for rank in range(devices)]
        at += 0.1
        record = {"wall_ms": 100.0, "busy_ms": busy, "sync_ms": (number % 100) / 10}
        lines.append(window(number, at, counts, **record))
        loss = {"window": number, "epoch": 0, "loss": 1 / (1 + number), "at": at}
        lines.append({"event": "loss"} | loss)
        if number % 20 == 0:
            lines.append({"event": "skip", "window": number, "epoch": 0, "reason": "x", "at": at})
            lines.append(metrics("epoch", number, at, loss=1.0))
    return lines


class Made:
    """Makes lines, and files of them."""

    NASTY = NASTY
    window, begin, metrics, process = map(staticmethod, (window, begin, metrics, process))
    nasty, long_run = map(staticmethod, (nasty, long_run))

    @staticmethod
    def write(path, lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    @classmethod
    def resumed(cls, path):
        """A run of 16 windows that was killed after 12 and went on from window 10."""
        lines = cls.process(0, 12, 1) + cls.process(10, 16, 2)
        cls.write(path, lines)
        return lines


@pytest.fixture
def made():
    """Timelines made by hand: `made.write(path, lines)` and what makes lines."""
    return Made
