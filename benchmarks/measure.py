"""Timing side by side, and the table and JSON file of the results."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import jax

import elche_jax as elche


@dataclass(frozen=True)
class Result:
    """One figure: what was measured, the median over repeats, what it must reach."""

    case: str
    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    repeats: tuple[float, ...] = ()

    @property
    def holds(self) -> bool | None:
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most


def interleave(
    measures: dict[str, Callable[[], float]], repeats: int
) -> dict[str, tuple[float, ...]]:
    """Calls every measure once per repeat, in turn, so that drift hits all alike."""
    values: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            values[name].append(measure())
    return {name: tuple(found) for name, found in values.items()}


def ratios(a: Iterable[float], b: Iterable[float]) -> tuple[float, ...]:
    """Ratios pair by pair: of one repeat with the other system's in the same repeat."""
    return tuple(x / y for x, y in zip(a, b, strict=True))


class Loop:
    """A user's loop over one training step, measured over whole windows."""

    def __init__(self, train: elche.TrainStep, params, data, batch_size: int, **windows):
        self.train, self.data = train, data
        self.options = {"batch_size": batch_size, "epochs": None, **windows}
        self.state = train.init(params)

    def rate(self, seconds: float, warm: int = 3) -> float:
        """Microbatches per ms over about this long, after `warm` windows."""
        done, metrics = 0, None
        with self.train.windows(self.data, **self.options) as windows:
            for number, window in enumerate(windows):
                self.state, metrics = self.train(self.state, window)
                if number + 1 < warm:
                    continue
                if number + 1 == warm:
                    jax.block_until_ready(metrics)
                    begun = time.perf_counter()
                    continue
                done += sum(window.counts)
                if time.perf_counter() - begun > seconds:
                    break
            jax.block_until_ready(metrics)
            return done / (1e3 * (time.perf_counter() - begun))


def steps_rate(step: Callable[[], object], microbatches: int, seconds: float) -> float:
    """Microbatches per ms of a hand-written step, at most two in flight."""
    for _ in range(3):  # the second call may compile once more
        jax.block_until_ready(step())
    begun, done, before = time.perf_counter(), 0, None
    while time.perf_counter() - begun < seconds:
        out = step()
        done += microbatches
        jax.block_until_ready(before)
        before = out
    jax.block_until_ready(before)
    return done / (1e3 * (time.perf_counter() - begun))


def result(case: str, what: str, values: tuple[float, ...], unit: str = "", **bounds) -> Result:
    """The median of some repeats as a result."""
    return Result(case, what, median(values), unit, repeats=values, **bounds)


def show(results: list[Result], path: Path) -> None:
    """Prints the table and writes the JSON file."""
    print(f"\njax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    print(f"{'case':<5}{'what':<56}{'median':>9}{'min':>9}{'max':>9}  asked")
    for r in results:
        asked = f">= {r.least}" if r.least is not None else ""
        asked = f"<= {r.most}" if r.most is not None else asked
        verdict = {True: "ok", False: "FALLS SHORT", None: ""}[r.holds]
        low, high = min(r.repeats, default=r.value), max(r.repeats, default=r.value)
        print(
            f"{r.case:<5}{r.what:<56}{r.value:>9.3f}{low:>9.3f}{high:>9.3f}  "
            f"{asked:<9} {r.unit:<4}{verdict}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(r), "holds": r.holds} for r in results]
    path.write_text(json.dumps({"jax": jax.__version__, "results": rows}, indent=1))
    print(f"written to {path}")
