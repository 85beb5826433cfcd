"""Figures of systems that took turns, what of them is noise, and the table and JSON file."""

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import median

import jax


@dataclass(frozen=True)
class Result:
    """One figure: what was measured, the median over repeats, what it must reach.

    Attributes:
        case: Where it belongs.
        what: What was measured.
        value: The median; of a share it is that of the control, where there is one.
        unit: Its unit.
        least: What it must reach, or None.
        most: What it must not exceed, or None.
        repeats: The figures whose median it is.
        noise: How far the median may be off.
        of_limit: The same speed as a share of the sum of the devices' speeds.
        control: The control as a share of that sum.
        bound: What whole microbatches allow, as a share of that sum.
    """

    case: str
    what: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    repeats: tuple[float, ...] = ()
    noise: float = 0.0
    of_limit: float | None = None
    control: float | None = None
    bound: float | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `FALLS SHORT`, or `noise?` where it falls short by less than the noise."""
        short = 0.0
        if self.least is not None:
            short = self.least - self.value
        elif self.most is not None:
            short = self.value - self.most
        else:
            return ""
        if short <= 0:
            return "ok"
        return "FALLS SHORT" if short > self.noise else "noise?"


def interleave(
    measures: dict[str, Callable[[], float]], repeats: int, seed: int = 0
) -> dict[str, tuple[float, ...]]:
    """Calls every measure once per repeat, so that drift hits all alike.

    The order changes from repeat to repeat, so that nobody always comes after the same one.
    """
    order = random.Random(seed)
    values: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name in order.sample(list(measures), len(measures)):
            values[name].append(measures[name]())
    return {name: tuple(found) for name, found in values.items()}


def ratios(a: Iterable[float], b: Iterable[float]) -> tuple[float, ...]:
    """Ratios pair by pair: of one repeat with the other system's in the same repeat."""
    return tuple(x / y for x, y in zip(a, b, strict=True))


def noise(values: Iterable[float], true: float | None = None) -> float:
    """How far the median of some repeats may be off: twice its standard error.

    That is `1.25 * sigma / sqrt(n)`; sigma from the median absolute deviation, as one repeat in
    which the machine did something else must not count.

    Args:
        values: The repeats.
        true: What each of them should be, where that is known; else their median.
    """
    values = tuple(values)
    true = median(values) if true is None else true
    off = [abs(value - true) for value in values]
    return 2 * 1.25 * 1.48 * median(off) / sqrt(len(off))


CONTROL = ("control", "control again")


def with_control(
    measures: dict[str, Callable[[], float]], control: Callable[[], float]
) -> dict[str, Callable[[], float]]:
    """Adds the control, twice: what it differs from itself is no difference."""
    return measures | dict.fromkeys(CONTROL, control)


def against_control(
    case: str,
    what: str,
    rates: dict[str, tuple[float, ...]],
    name: str,
    limit: float | None = None,
    bound: float | None = None,
    **asked: float,
) -> Result:
    """One system's rates as shares of the control's, which took turns with it.

    Args:
        case: Where the result belongs.
        what: What was measured.
        rates: What `interleave` gave for measures `with_control`.
        name: Whose rates.
        limit: Sum of the devices' speeds, in the unit of the rates.
        bound: What whole microbatches allow, as a share of the limit.
        asked: `least` or `most`.
    """
    once, again = (rates[each] for each in CONTROL)
    control = tuple((a + b) / 2 for a, b in zip(once, again, strict=True))
    shares = ratios(rates[name], control)
    of_limit = None if limit is None else median(rates[name]) / limit
    own = None if limit is None else median(control) / limit
    off = max(noise(shares), noise(ratios(once, again), true=1.0))
    return Result(
        case, what, median(shares), repeats=shares, noise=off,
        of_limit=of_limit, control=own, bound=bound, **asked,
    )  # fmt: skip


def result(case: str, what: str, values: tuple[float, ...], unit: str = "", **bounds) -> Result:
    """The median of some repeats as a result."""
    return Result(case, what, median(values), unit, repeats=values, noise=noise(values), **bounds)


def show(results: list[Result], path: Path) -> None:
    """Prints the table and writes the JSON file.

    `median` is of the control where the columns on the right are filled; they are shares of the
    limit: this system's, the control's, and the most that whole microbatches allow.
    """
    print(f"\njax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    print(
        f"{'case':<5}{'what':<56}{'median':>8}{'min':>8}{'max':>8}{'noise':>8}  {'asked':<9}"
        f"{'':<12} |{'limit':>7}{'control':>9}{'bound':>7}"
    )
    for r in results:
        asked = f">= {r.least}" if r.least is not None else ""
        asked = f"<= {r.most}" if r.most is not None else asked
        low, high = min(r.repeats, default=r.value), max(r.repeats, default=r.value)
        print(
            f"{r.case:<5}{r.what:<56}{r.value:>8.3f}{low:>8.3f}{high:>8.3f}{r.noise:>8.3f}  "
            f"{asked:<9}{r.verdict or r.unit:<12} |"
            f"{_cell(r.of_limit):>7}{_cell(r.control):>9}{_cell(r.bound):>7}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(r), "verdict": r.verdict} for r in results]
    path.write_text(json.dumps({"jax": jax.__version__, "results": rows}, indent=1))
    print(f"written to {path}")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
