"""Figures of systems that took turns, their noise, the table and JSON file, and the options."""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import jax

ROOT = Path(__file__).parents[1]

Rates = dict[str, tuple[float, ...]]
"""What was measured of each system, repeat by repeat."""


@dataclass(frozen=True)
class Result:
    """One figure: what was measured, the median over repeats, the required value.

    Attributes:
        case: The case it belongs to.
        what: What was measured.
        value: The median; relative to the control, if there is one.
        unit: Its unit.
        least: Smallest value required, or None.
        most: Largest value allowed, or None.
        repeats: The values of the repeats.
        noise: Possible error of the median.
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
        """`ok`, `FALLS SHORT`, or `noise?` if it falls short by less than the noise."""
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


def options_of(doc: str, out: str, repeats: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of the options that benchmarks share.

    Args:
        doc: The benchmark's docstring.
        out: Default path of the JSON file.
        repeats: Default number of repeats; None for a benchmark without repeats.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def run_cases(
    doc: str, out: str, repeats: int, cases: Iterable[str],
    measure: Callable[[str, int], list[Result]],
) -> None:  # fmt: skip
    """Measure the requested cases of a benchmark, and show their figures.

    Args:
        doc: The benchmark's docstring.
        out: Default path of the JSON file.
        repeats: Default number of repeats.
        cases: Names of all cases.
        measure: `measure(case, repeats)`; only its child processes use the devices.
    """
    parser = options_of(doc, out, repeats)
    parser.add_argument("--case", choices=[*cases], action="append")
    args = parser.parse_args()
    results = [row for case in args.case or cases for row in measure(case, args.repeats)]
    import setup_devices  # noqa: F401  (only now: no child may share a backend with it)

    show(results, args.out)


def in_a_process(module: str, function: str, *args: object, **environment: str) -> Any:
    """Call a function of a benchmark in a separate process; return its result, a JSON value."""
    call = f"import json, {module}; print(json.dumps({module}.{function}{args!r}))"
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {call}"],
        env={**os.environ, **environment}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def interleave(measures: dict[str, Callable[[], float]], repeats: int) -> Rates:
    """Call every measure once per repeat, so that drift affects all equally.

    The order changes between repeats, so that no measure always follows the same one.
    """
    order = random.Random(0)
    values: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name in order.sample(list(measures), len(measures)):
            values[name].append(measures[name]())
    return {name: tuple(found) for name, found in values.items()}


def ratios(a: Iterable[float], b: Iterable[float]) -> tuple[float, ...]:
    """Return the ratios of two systems, repeat by repeat."""
    return tuple(x / y for x, y in zip(a, b, strict=True))


def noise(values: Iterable[float], true: float | None = None) -> float:
    """Return the possible error of the median of repeats: twice its standard error.

    The standard error is `1.25 * sigma / sqrt(n)`, with sigma from the median absolute deviation,
    as a single disturbed repeat must not count.

    Args:
        values: The repeats.
        true: The true value of each, if known; otherwise their median is used.
    """
    values = tuple(values)
    true = median(values) if true is None else true
    off = [abs(value - true) for value in values]
    return 2 * 1.25 * 1.48 * median(off) / sqrt(len(off))


CONTROL = ("control", "control again")


def with_control(
    measures: dict[str, Callable[[], float]], control: Callable[[], float]
) -> dict[str, Callable[[], float]]:
    """Add the control, twice: a difference between the two is noise."""
    return measures | dict.fromkeys(CONTROL, control)


def against_control(
    case: str,
    what: str,
    rates: Rates,
    name: str,
    limit: float | None = None,
    bound: float | None = None,
    **asked: float,
) -> Result:
    """Return one system's rates as shares of the control's, which took turns with it.

    Args:
        case: The case the result belongs to.
        what: What was measured.
        rates: The result of `interleave` for measures `with_control`.
        name: The system.
        limit: Sum of the devices' speeds, in the unit of the rates.
        bound: What whole microbatches allow, as a share of the limit.
        asked: The requirement: `least` or `most`.
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
    """Return the median of some repeats as a result."""
    return Result(case, what, median(values), unit, repeats=values, noise=noise(values), **bounds)


def show(results: list[Result], path: Path) -> None:
    """Print the table and write the JSON file.

    If the columns on the right are filled, `median` is relative to the control. These columns are
    shares of the limit: this system's, the control's, and the most that whole microbatches allow.
    """
    print(f"\njax {jax.__version__}, {len(jax.devices())} x {jax.devices()[0].device_kind}")
    print(
        f"{'case':<8}{'what':<56}{'median':>8}{'min':>8}{'max':>8}{'noise':>8}  {'asked':<9}"
        f"{'':<12} |{'limit':>7}{'control':>9}{'bound':>7}"
    )
    for r in results:
        asked = f">= {r.least}" if r.least is not None else ""
        asked = f"<= {r.most}" if r.most is not None else asked
        low, high = min(r.repeats, default=r.value), max(r.repeats, default=r.value)
        print(
            f"{r.case:<8}{r.what:<56}{r.value:>8.3f}{low:>8.3f}{high:>8.3f}{r.noise:>8.3f}  "
            f"{asked:<9}{r.verdict or r.unit:<12} |"
            f"{_cell(r.of_limit):>7}{_cell(r.control):>9}{_cell(r.bound):>7}"
        )
    rows = [{**asdict(r), "verdict": r.verdict} for r in results]
    write({"jax": jax.__version__, "results": rows}, path)
    print(f"written to {path}")


def write(found: object, path: Path) -> None:
    """Write figures to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
