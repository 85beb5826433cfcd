"""Two devices of different kinds in one process, against what they reach without an exchange.

    python benchmarks/kinds.py [--shared] [--model "1 MB"] [--repeats 5] [--out FILE]

A CPU device of JAX and one of the plugin `xla_cpu_pjrt` compute for real, with one thread each.
In turn in one run: a job on either device alone, both at once in loops of their own without
exchange (the control), and one job on both. All of these read shuffled examples that lie on the
device. Beside these, what a user can do without this package: plain pmap on the faster device, on
the same examples in every step.

With `--shared` each device uses all processors, so that two together are no faster than one: the
job is to be as fast as the faster one alone.

Windows are so long from the start that what devices wait for each other is about one percent of
them, which is what `ElChe(overhead_target=0.01)` would grow them to.
"""

import setup_kinds  # noqa: I001,F401  (first: it sets the devices)

import argparse
from pathlib import Path
from statistics import median

import jax
from baselines import (
    OPTIMIZER,
    PlainPmap,
    examples,
    mlp_loss,
    mlp_params,
    surrogate_loss,
    surrogate_params,
)
from loops import Loop, apart, busiest, steps_rate
from measure import Result, against_control, interleave, ratios, result, show, with_control

import elche_jax as elche

TURN_S = 10.0
WARM = 40
"""Windows before the first turn: speeds are then known, and whether both devices are worth it."""
BATCH = 64
MODELS = {
    "latency": (surrogate_params(), surrogate_loss, 100),
    "1 MB": (mlp_params(432, 2), mlp_loss, 1000),
    "20 MB": (mlp_params(2200, 2), mlp_loss, 100),
}
"""Parameters, loss, and the anchor: windows of 0.4, 1 and 5 seconds."""
RULES = {"mixed": None, "mixed, pending=1": elche.MeanGradient(delay=1)}


def measure(name: str, params, loss, anchor: int, repeats: int, shared: bool) -> list[Result]:
    """Measures a model: every device alone, the control, and the job on both devices."""
    devices, data = [jax.devices("cpu")[0], jax.devices("twin")[0]], examples(2**19)

    def job(devices, **options) -> Loop:
        train = elche.build_train_step(loss, OPTIMIZER, devices=devices, **options)
        return Loop(train, params, data, BATCH)

    long = elche.ElChe(anchor=anchor, max_anchor=anchor)
    jobs = {what: job(devices, cadence=long, averaging=rule) for what, rule in RULES.items()}
    for one in jobs.values():
        one.warm(WARM)
    counts = busiest(jobs["mixed"].train)
    solo = {
        what: job([device], cadence=elche.FixedTotal(count))
        for what, device, count in zip(("first", "second"), devices, counts, strict=True)
    }
    for one in solo.values():
        one.warm(3)
    control = apart(params, devices, counts, BATCH, loss=loss, resident=data)
    fast = max(range(2), key=counts.__getitem__)
    plain = PlainPmap(params, [devices[fast]], (counts[fast],), BATCH, loss=loss)
    measures = {"pmap": lambda: steps_rate(plain, counts[fast], TURN_S)} | {
        what: (lambda one=one: one.rate(TURN_S)) for what, one in (solo | jobs).items()
    }
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    faster = max((rates[what] for what in solo), key=median)
    found = [
        against_control(name, what, rates, what, **asked)
        for what in (*solo, "pmap", *jobs)
        for asked in [{"least": 0.95} if what == "mixed" and not shared else {}]
    ]
    for what, one in jobs.items():
        asked = {"least": 1.0} if what == "mixed" else {}
        share = ratios(rates[what], faster)
        found.append(result(name, f"{what}, of the faster alone", share, **asked))
        records = [record for record in one.train.records if record.steady and all(record.counts)]
        found.append(result(name, f"{what}, sync", tuple(r.sync_ms for r in records), "ms"))
        print(name, what, "counts", one.train.counts, "microbatches/s", median(rates[what]) * 1e3)
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", action="store_true", help="all processors for each device")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kinds.json"))
    arguments = parser.parse_args()
    found = []
    for name in arguments.model or MODELS:
        found += measure(name, *MODELS[name], arguments.repeats, arguments.shared)
    show(found, arguments.out)


if __name__ == "__main__":
    main()
