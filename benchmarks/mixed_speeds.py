"""How near to the sum of the devices' speeds, and what the library itself costs.

    python benchmarks/mixed_speeds.py [--repeats 5] [--case a --case b ...] [--out FILE]

Every figure is a median over repeats; what is compared takes turns in one process.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import jax
import numpy as np
from baselines import (
    OPTIMIZER, PlainJit, PlainPmap, examples, mlp_loss, mlp_params, surrogate_loss,
    surrogate_params,
)  # fmt: skip
from measure import Loop, Result, interleave, ratios, result, show, steps_rate

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds, ExtraWork, constant, throttle

SMALL = mlp_params(width=32, depth=1)
FLEETS = ([5, 5, 10, 20], [5, 5], [5, 10], [5, 40])


def limit(ms) -> float:
    """Sum of the devices' solo speeds, microbatches per ms."""
    return sum(1 / each for each in ms)


def build(world: int, **options) -> elche.TrainStep:
    return elche.build_train_step(mlp_loss, OPTIMIZER, devices=jax.devices()[:world], **options)


def case_a(repeats: int) -> list[Result]:
    """Emulated fleets: plain pmap, ElChe, FixedTotal, as shares of the limit."""
    results = []
    data = examples(65536)
    for fleet in FLEETS:
        world, name = len(fleet), ":".join(str(ms) for ms in fleet)
        emulate = EmulatedSpeeds(fleet)
        plain = PlainPmap(SMALL, jax.devices()[:world], 1, 16, emulate)
        loops = {
            "ElChe": Loop(build(world, cadence=elche.ElChe(), emulate=emulate), SMALL, data, 16),
            "FixedTotal(64)": Loop(
                build(world, cadence=elche.FixedTotal(64), emulate=emulate), SMALL, data, 16
            ),
        }
        for loop in loops.values():
            loop.rate(0.0, warm=8)  # reach the steady state
        measures = {"plain pmap": lambda p=plain, w=world: steps_rate(p, w, 1.0)}
        measures |= {name: lambda x=loop: x.rate(2.0) for name, loop in loops.items()}
        rates = interleave(measures, repeats)
        least = {"ElChe": 0.95, "FixedTotal(64)": 0.93}
        for system, found in rates.items():
            shares = tuple(rate / limit(fleet) for rate in found)
            what = f"{name} ms, {system}: share of the limit"
            results.append(result("a", what, shares, least=least.get(system)))
    return results


def case_b(repeats: int) -> list[Result]:
    """Real compute, one of two devices does three times the work.

    The control is the machine's own: both devices at once, each in a loop of its own,
    without any exchange. More than that no scheduling can reach.
    """
    params, data = surrogate_params(), examples(65536)

    def loop(devices, times, cadence):
        train = elche.build_train_step(
            surrogate_loss, OPTIMIZER, devices=devices, emulate=ExtraWork(times), cadence=cadence
        )
        return Loop(train, params, data, 1, placement="resident")

    one, two = jax.devices()[:2]
    fast = loop([one], (1,), elche.FixedTotal(240))
    slow = loop([two], (3,), elche.FixedTotal(80))
    both = loop([one, two], (1, 3), elche.ElChe(anchor=80))
    for each in (fast, slow, both):
        each.rate(0.0, warm=6)

    def at_once() -> float:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda each: each.rate(1.0), (fast, slow)))

    measures = {
        "fast": lambda: fast.rate(1.0),
        "slow": lambda: slow.rate(1.0),
        "both": lambda: both.rate(1.0),
        "at once": at_once,
    }
    rates = interleave(measures, 3 * repeats)
    sums = tuple(a + b for a, b in zip(rates["fast"], rates["slow"], strict=True))
    ours, control = ratios(rates["both"], sums), ratios(rates["at once"], sums)
    return [
        result("b", "real compute 1:3, no exchange (control): of solo speeds", control),
        result("b", "real compute 1:3, ElChe: share of the sum of solo speeds", ours, least=0.95),
        result("b", "real compute 1:3, ElChe: of the control", ratios(ours, control), least=0.95),
    ]


def case_c(repeats: int) -> list[Result]:
    """Alike devices and one device against hand-written fused steps."""
    params = mlp_params(width=256, depth=3)
    batch, count = 64, _count_for_ms(params, 64, 100.0)
    held = {"placement": "resident"}  # the hand-written steps hold their data as well

    def loop(world: int, cadence) -> Loop:
        data = examples(world * count * batch)  # a window, as the hand-written steps have
        return Loop(build(world, cadence=cadence), params, data, batch, **held)

    fused = PlainPmap(params, jax.devices()[:2], count, batch)
    ours = loop(2, elche.Replay([(count, count)] * 100_000))
    plain = PlainJit(params, jax.devices()[0], count, batch)
    single = loop(1, elche.FixedTotal(count))
    rates = interleave(
        {
            "fused": lambda: steps_rate(fused, 2 * count, 0.8),
            "ours": lambda: ours.rate(0.8),
            "plain": lambda: steps_rate(plain, count, 0.8),
            "single": lambda: single.rate(0.8),
        },
        4 * repeats,  # shorter turns, more of them: the figure asked for is near the noise
    )
    two = ratios(rates["ours"], rates["fused"])
    one = ratios(rates["single"], rates["plain"])
    return [
        result("c", f"2 alike devices x {count}, of a fused pmap step", two, least=0.98),
        result("c", f"1 device x {count}, of a plain jit step", one, least=0.99),
    ]


def _count_for_ms(params, batch: int, ms: float) -> int:
    plain = PlainJit(params, jax.devices()[0], 8, batch)
    return max(1, round(ms * steps_rate(plain, 8, 1.0)))


def case_d(repeats: int) -> list[Result]:
    """A device slows down three times in mid-run."""
    at, fleet = 10, [5, 5, 10, 20]
    results = []
    for rank in (0, 3):
        windows, waited = [], []
        after = [ms * (3 if device == rank else 1) for device, ms in enumerate(fleet)]
        for _ in range(repeats):
            schedule = throttle(constant(fleet), rank=rank, factor=3, at=at)
            train = build(4, cadence=elche.ElChe(), emulate=EmulatedSpeeds(schedule))
            loop = Loop(train, SMALL, examples(65536), 16)
            loop.rate(0.0, warm=at + 20)
            records = [record for record in train.records if record.window >= at]
            shares = [sum(r.counts) / r.wall_ms / limit(after) for r in records]
            windows.append(float(_steady_from(shares)))
            waited.append(train.report().compile_misses - 2.0)
        what = f"device {rank} of 5:5:10:20 slows 3x: windows below 0.95"
        results.append(result("d", what, tuple(windows), most=3))
        what = f"device {rank} slows 3x: programs waited for after the start"
        results.append(result("d", what, tuple(waited), most=0))
    return results


def _steady_from(shares: list[float]) -> int:
    """First window that is at 0.95, as is the next one and the median of five from it on."""
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
    """Data: how busy alike devices with fixed counts are, by where the data comes from.

    The control is a hand-written fused pmap step that holds its data: what keeps it below
    1 is the machine, which emulates four devices with fewer processors.
    """
    arrays, fleet = examples(65536), [5, 5, 5, 5]
    fixed = elche.Replay([(20,) * 4] * 100_000)
    forms = {
        "stream, pytree": (arrays, "stream", 0.95),
        "stream, map-style": (Dataset(arrays), "stream", 0.95),
        "resident": (arrays, "resident", 0.98),
    }
    loops = {
        name: Loop(
            build(4, cadence=fixed, emulate=EmulatedSpeeds(fleet)),
            SMALL, data, 32, placement=placement,
        )
        for name, (data, placement, _) in forms.items()
    }  # fmt: skip

    rates = {name: [] for name in forms}

    def busy(name: str) -> float:
        loop = loops[name]
        rates[name].append(loop.rate(2.0) / limit(fleet))
        records = loop.train.records[-8:]
        return sum(sum(r.busy_ms) for r in records) / sum(4 * r.wall_ms for r in records)

    for loop in loops.values():
        loop.rate(0.0, warm=4)
    plain = PlainPmap(SMALL, jax.devices()[:4], 20, 32, EmulatedSpeeds(fleet))
    measures = {name: lambda name=name: busy(name) for name in loops}
    measures["control"] = lambda: steps_rate(plain, 80, 2.0) / limit(fleet)
    found = interleave(measures, repeats)
    return [
        result("e", "hand-written pmap step (control): share of the limit", found["control"]),
        *(
            result("e", f"{name}: busy share of 4 devices of 5 ms", found[name], least=least)
            for name, (_, _, least) in forms.items()
        ),
        *(result("e", f"{name}: share of the limit", tuple(rates[name])) for name in forms),
    ]


def case_f(repeats: int) -> list[Result]:
    """The main thread's processor time per window, 8 devices, 50 leaves.

    Beside it, what dispatching one hand-written pmap step over the same leaves costs on
    this machine at this moment.
    """
    params = {f"w{i:02}": np.zeros(64, "float32") for i in range(50)}

    def loss_fn(params, batch, rng):
        return ((batch["x"] @ sum(params.values()) - batch["y"]) ** 2).mean()

    train = elche.build_train_step(loss_fn, OPTIMIZER, cadence=elche.Replay([(4,) * 8] * 100_000))
    plain = PlainPmap(params, jax.devices(), 4, 16, loss=loss_fn)
    state = train.init(params)

    def spent(step, most: int = 40) -> float:
        times = []
        for number in range(most):
            begun = time.thread_time()
            metrics = step()
            if number > 5:
                times.append(1e3 * (time.thread_time() - begun))
            jax.block_until_ready(metrics)
        return median(times)

    def ours() -> float:
        with train.windows(examples(8192), 16, epochs=None) as windows:

            def step():
                nonlocal state
                state, metrics = train(state, next(windows))
                return metrics

            return spent(step)

    costs = interleave({"ours": ours, "plain": lambda: spent(plain)}, repeats)
    return [
        result("f", "main thread per window, 8 devices, 50 leaves", costs["ours"], "ms", most=2.0),
        result("f", "the same of a hand-written pmap step", costs["plain"], "ms"),
    ]


def case_g(repeats: int) -> list[Result]:
    """Emulation: busy time over the time asked for, 8 devices, the worst of them."""
    fleet, counts = [5, 5, 10, 20] * 2, (40, 40, 20, 10) * 2
    train = build(8, cadence=elche.Replay([counts] * 100_000), emulate=EmulatedSpeeds(fleet))
    loop = Loop(train, SMALL, examples(65536), 16)

    def error() -> float:
        loop.rate(1.5)
        records = [r for r in train.records[-6:] if r.counts == counts]
        asked = [count * ms for count, ms in zip(counts, fleet, strict=True)]
        return max(
            median(abs(r.busy_ms[rank] / asked[rank] - 1) for r in records) for rank in range(8)
        )

    errors = interleave({"error": error}, repeats)["error"]
    return [result("g", "emulated time, 8 devices: largest relative error", errors, most=0.05)]


CASES = {"a": case_a, "b": case_b, "c": case_c, "d": case_d, "e": case_e, "f": case_f, "g": case_g}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument("--out", type=Path, default=Path("out/mixed_speeds.json"))
    arguments = parser.parse_args()
    results = []
    for name in arguments.case or sorted(CASES):
        results += CASES[name](arguments.repeats)
    show(results, arguments.out)


if __name__ == "__main__":
    main()
