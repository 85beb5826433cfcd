"""Two devices of different kinds in one process, against what they reach without an exchange.

    python benchmarks/kinds.py [--repeats 5] [--out FILE]

A CPU device of JAX and one of the plugin `xla_cpu_pjrt` compute for real, with one thread each.
In turn in one run: a job on either device alone, both at once in loops of their own without
exchange (the control), and one job on both. Two processors of a shared core do not add up where
both multiply matrices: the job then goes on without one of them. They do in the case `latency`,
whose steps wait for their own results. Beside these, what a user can do without this package:
plain pmap on the faster device.

Windows are long (`overhead_target=0.01`), so that what devices wait for each other is a small
share of them.
"""

import setup_kinds  # noqa: I001,F401  (first: it sets the devices)

import argparse
from functools import partial
from pathlib import Path
from statistics import median

import jax
from baselines import (
    OPTIMIZER,
    PlainJit,
    PlainPmap,
    examples,
    mlp_loss,
    mlp_params,
    surrogate_loss,
    surrogate_params,
)
from loops import Apart, Loop, steps_rate
from measure import Result, against_control, interleave, ratios, result, show, with_control

import elche_jax as elche

TURN_S = 2.0
WARM = 80
"""Windows before the first turn."""
BATCH = 64
MODELS = {
    "latency": (surrogate_params(), surrogate_loss),
    "1 MB": (mlp_params(432, 2), mlp_loss),
    "20 MB": (mlp_params(2200, 2), mlp_loss),
}
RULES = {
    "mixed": {"cadence": elche.ElChe(overhead_target=0.01)},
    "mixed, pending=1": {
        "cadence": elche.ElChe(overhead_target=0.01),
        "averaging": elche.MeanGradient(delay=1),
    },
}


def both(params, loss) -> list[jax.Device]:
    """Returns one device of each kind, the faster one first: it leads, and never rests."""

    def rate(device: jax.Device) -> float:
        return steps_rate(PlainJit(params, device, 50, BATCH, loss=loss), 50, TURN_S)

    devices = [jax.devices("cpu")[0], jax.devices("twin")[0]]
    rates = interleave({device: partial(rate, device) for device in devices}, 3)
    return sorted(devices, key=lambda device: -median(rates[device]))


def measure(name: str, params, loss, repeats: int) -> list[Result]:
    """Measures a model: every device alone, the control, and the job on both devices."""
    devices, data = both(params, loss), examples(2**17)

    def job(devices, **options) -> Loop:
        train = elche.build_train_step(loss, OPTIMIZER, devices=devices, **options)
        return Loop(train, params, data, BATCH)

    jobs = {what: job(devices, **options) for what, options in RULES.items()}
    for one in jobs.values():
        one.warm(WARM)  # speeds are known, and whether both devices are worth it
    counts = busiest(jobs["mixed"].train)
    solo = {
        what: job([device], cadence=elche.FixedTotal(count))
        for what, device, count in zip(("first", "second"), devices, counts, strict=True)
    }
    for one in solo.values():
        one.warm(3)
    steps = [PlainJit(params, d, n, BATCH, loss=loss) for d, n in zip(devices, counts, strict=True)]
    control, fast = Apart(steps, counts), max(range(2), key=counts.__getitem__)
    plain = PlainPmap(params, [devices[fast]], (counts[fast],), BATCH, loss=loss)
    measures = {"pmap": lambda: steps_rate(plain, counts[fast], TURN_S)} | {
        what: (lambda one=one: one.rate(TURN_S)) for what, one in (solo | jobs).items()
    }
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    faster = max((rates[what] for what in solo), key=median)
    found = [against_control(name, what, rates, what) for what in (*solo, "pmap")] + [
        against_control(name, what, rates, what, **({"least": 0.95} if what == "mixed" else {}))
        for what in jobs
    ]
    for what, one in jobs.items():
        asked = {"least": 1.0} if what == "mixed" else {}
        share = ratios(rates[what], faster)
        found.append(result(name, f"{what}, of the faster alone", share, **asked))
        records = [record for record in one.train.records if record.steady and all(record.counts)]
        found.append(result(name, f"{what}, sync", tuple(r.sync_ms for r in records), "ms"))
        print(name, what, "counts", one.train.counts, "microbatches/s", median(rates[what]) * 1e3)
    return found


def busiest(train: elche.TrainStep) -> tuple[int, ...]:
    """Returns the counts of the last window in which both devices worked."""
    return next(one.counts for one in reversed(train.records) if all(one.counts))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kinds.json"))
    arguments = parser.parse_args()
    found = []
    for name in arguments.model or MODELS:
        found += measure(name, *MODELS[name], arguments.repeats)
    show(found, arguments.out)


if __name__ == "__main__":
    main()
