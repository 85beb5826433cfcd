"""How close training comes to the sum of the devices' speeds, and the library's own cost.

    python benchmarks/mixed_speeds.py [--repeats 7] [--case a --case b ...] [--out FILE]

The systems take turns in one process, as does the control: the same devices at the same time,
each in its own hand-written loop, without any exchange (`loops.Apart`). Rates with a required
value are shares of the control, or of the hand-written loop that the row names;
docs/benchmarks.md explains how to read them.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import math
from dataclasses import MISSING, fields
from functools import partial
from statistics import median

import jax
from baselines import OPTIMIZER, PlainPmap, examples, mlp_loss, mlp_params
from loops import Apart, Loop, apart, steps_rate
from measure import Result, against_control, interleave, options_of, result, show, with_control
from overhead import case_b, case_c, case_f

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds, constant, throttle

SMALL = mlp_params(width=32, depth=1)
BATCH = 16
FLEETS = ([5, 5, 10, 20], [5, 5], [5, 10], [5, 40])
TURN_S = 1.0
CALL_MS = 200  # length of a call of the control, see `loops.apart`


def limit(ms) -> float:
    """Return the sum of the devices' solo speeds, microbatches per ms."""
    return sum(1 / each for each in ms)


def bound(total: int, ms) -> float:
    """Return the share of the limit that the best split of whole microbatches allows."""
    ends = sorted(count * each for each in ms for count in range(1, total + 1))
    return total / ends[total - 1] / limit(ms)


def build(world: int, **options) -> elche.TrainStep:
    return elche.build_train_step(mlp_loss, OPTIMIZER, devices=jax.devices()[:world], **options)


def by_hand(fleet, counts) -> tuple[PlainPmap, Apart]:
    """Return a hand-written pmap step with these counts, and the control."""
    devices, emulate = jax.devices()[: len(fleet)], EmulatedSpeeds(fleet)
    plain = PlainPmap(SMALL, devices, counts, BATCH, emulate)
    return plain, control_of(fleet, counts)


def control_of(fleet, counts, batch: int = BATCH) -> Apart:
    """Return the control of emulated devices."""
    longest = max(count * ms for count, ms in zip(counts, fleet, strict=True))
    devices, updates = jax.devices()[: len(fleet)], math.ceil(CALL_MS / longest)
    return apart(SMALL, devices, counts, batch, EmulatedSpeeds(fleet), updates)


def named(fleet) -> str:
    return ":".join(f"{ms:g}" for ms in fleet) + " ms"


def emulated(case: str, fleet, cadence, repeats: int, least: float | None = None) -> list[Result]:
    """Measure a cadence on emulated devices, and a hand-written step with the same counts."""
    emulate, data = EmulatedSpeeds(fleet), examples(65536)
    ours = Loop(build(len(fleet), cadence=cadence, emulate=emulate), SMALL, data, BATCH)
    ours.warm(24)  # the plan settles after 8 reports of steady times
    counts = ours.train.counts
    plain, control = by_hand(fleet, counts)
    measures = {
        "ours": lambda: ours.rate(TURN_S),
        "plain": lambda: steps_rate(plain, sum(counts), TURN_S),
    }
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    of = limit(fleet), bound(sum(counts), fleet)
    asked = {} if least is None else {"least": least}
    hand = f"{named(fleet)}, {':'.join(map(str, counts))} in pmap by hand"
    return [
        against_control(case, f"{named(fleet)}, {brief(cadence)}", rates, "ours", *of, **asked),
        against_control(case, hand, rates, "plain", *of),
    ]


def brief(cadence) -> str:
    """Return a cadence as text, without default arguments."""
    told = [
        f"{each.name}={value!r}" if each.default is not MISSING else repr(value)
        for each in fields(cadence)
        if (value := getattr(cadence, each.name)) != each.default
    ]
    return f"{type(cadence).__name__}({', '.join(told)})"


def equal_shares(fleet, repeats: int) -> Result:
    """Measure plain pmap, as written for equal devices."""
    world, of = len(fleet), limit(fleet)
    plain, control = by_hand(fleet, (1,) * world)
    measures = {"plain": lambda: steps_rate(plain, world, TURN_S)}
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    what = f"{named(fleet)}, plain pmap, equal shares"
    return against_control("a", what, rates, "plain", of, bound(world, fleet))


def case_a(repeats: int) -> list[Result]:
    """Measure emulated fleets with ElChe, FixedTotal and plain pmap."""
    results = []
    for fleet in FLEETS:
        for cadence, least in ((elche.ElChe(), 0.95), (elche.FixedTotal(64), 0.93)):
            results += emulated("a", fleet, cadence, repeats, least)
        results.append(equal_shares(fleet, repeats))
    return results


def case_d(repeats: int) -> list[Result]:
    """Measure a run in which a device becomes three times slower, and one in which it always is."""
    at, fleet = 10, [5, 5, 10, 20]
    results = []
    for rank in (0, 3):
        after = [ms * (3 if device == rank else 1) for device, ms in enumerate(fleet)]
        control = control_of(after, tuple(round(10 * max(after) / ms) for ms in after))
        schedules = {
            "slows": throttle(constant(fleet), rank=rank, factor=3, at=at),
            "was slow": constant(after),
        }
        waited = []

        def below(name: str, control=control, schedules=schedules, waited=waited) -> float:
            train = build(4, cadence=elche.ElChe(), emulate=EmulatedSpeeds(schedules[name]))
            reachable = control.rate(TURN_S)
            Loop(train, SMALL, examples(65536), BATCH).warm(at + 20)
            reachable = (reachable + control.rate(TURN_S)) / 2
            waited.append(train.report().compile_misses - 2.0)
            records = [record for record in train.records if record.window >= at]
            return float(_steady_from([sum(r.counts) / r.wall_ms / reachable for r in records]))

        found = interleave({name: partial(below, name) for name in schedules}, repeats)
        what = f"device {rank} of 5:5:10:20 slows 3x: windows below 0.95"
        results.append(result("d", what, found["slows"], most=3))
        what = f"device {rank} is 3x as slow all along: windows below 0.95"
        results.append(result("d", what, found["was slow"]))
        what = f"device {rank} slows 3x: programs waited for after the start"
        results.append(result("d", what, tuple(waited), most=0))
    return results


def _steady_from(shares: list[float]) -> int:
    """Return the first `n` with windows `n`, `n + 1` and the median of `n` to `n + 4` at 0.95."""
    for n in range(len(shares) - 4):
        if min(shares[n : n + 2]) >= 0.95 and median(shares[n : n + 5]) >= 0.95:
            return n
    return len(shares)


class Dataset:
    """A map-style dataset over arrays."""

    def __init__(self, arrays):
        self._arrays = arrays

    def __len__(self):
        return len(self._arrays["y"])

    def __getitem__(self, i):
        return {name: array[i] for name, array in self._arrays.items()}


def case_e(repeats: int) -> list[Result]:
    """Measure the throughput of equal devices with fixed counts, by source of the data."""
    arrays, fleet, counts, batch = examples(65536), [5] * 4, (20,) * 4, 32
    devices, emulate = jax.devices()[:4], EmulatedSpeeds(fleet)
    forms = {
        "stream, pytree": (arrays, "stream"),
        "stream, map-style": (Dataset(arrays), "stream"),
        "resident": (arrays, "resident"),
    }
    loops = {
        name: Loop(
            build(4, cadence=elche.Replay([counts] * 100_000), emulate=emulate),
            SMALL, data, batch, placement=placement,
        )
        for name, (data, placement) in forms.items()
    }  # fmt: skip
    for loop in loops.values():
        loop.warm(4)
    plain = PlainPmap(SMALL, devices, counts, batch, emulate)
    control = control_of(fleet, counts, batch)
    measures = {name: lambda loop=loop: loop.rate(TURN_S) for name, loop in loops.items()}
    measures["pmap by hand"] = lambda: steps_rate(plain, sum(counts), TURN_S)
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    return [
        against_control(
            "e", f"4 devices of 5 ms x 20, {name}", rates, name, limit(fleet), 1.0,
            **({"least": 0.95} if name in forms else {}),
        )
        for name in measures
    ]  # fmt: skip


def case_g(repeats: int) -> list[Result]:
    """Measure the emulation: the relative error of a window's time on the worst of 8 devices."""
    fleet, counts = [5, 5, 10, 20] * 2, (40, 40, 20, 10) * 2
    train = build(8, cadence=elche.Replay([counts] * 100_000), emulate=EmulatedSpeeds(fleet))
    loop = Loop(train, SMALL, examples(65536), BATCH)
    loop.warm(3)
    control = control_of(fleet, counts)

    def error() -> float:
        loop.rate(1.5)
        records = [r for r in train.records[-6:] if r.counts == counts]
        asked = [count * ms for count, ms in zip(counts, fleet, strict=True)]
        return max(
            median(abs(r.busy_ms[rank] / asked[rank] - 1) for r in records) for rank in range(8)
        )

    def alone() -> float:
        rates = control.rates(1.5)
        return max(abs(1 / (rate * ms) - 1) for rate, ms in zip(rates, fleet, strict=True))

    errors = interleave({"error": error, "alone": alone}, repeats)
    return [
        result("g", "emulated time, 8 devices: largest relative error", errors["error"], most=0.05),
        result("g", "the same of the control's steps", errors["alone"]),
    ]


def case_h(repeats: int) -> list[Result]:
    """Measure short steps, in windows hardly longer than their synchronisation."""
    results = []
    for fleet, cadence in (
        ([1, 2.4], elche.ElChe()),
        ([1, 2.4], elche.ElChe(overhead_target=0.02)),
        ([0.3, 0.72], elche.FixedTotal(32)),
        ([0.3, 0.72], elche.FixedTotal(512)),
    ):
        results += emulated("h", fleet, cadence, repeats)
    return results


CASES = {
    "a": case_a, "b": case_b, "c": case_c, "d": case_d, "e": case_e, "f": case_f, "g": case_g,
    "h": case_h,
}  # fmt: skip


def main() -> None:
    parser = options_of(__doc__, "out/mixed_speeds.json", 7)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    arguments = parser.parse_args()
    results = []
    for name in arguments.case or sorted(CASES):
        results += CASES[name](arguments.repeats)
    show(results, arguments.out)


if __name__ == "__main__":
    main()
