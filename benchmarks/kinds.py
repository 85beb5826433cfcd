"""Two devices of different kinds in one process, against what they reach without an exchange.

    python benchmarks/kinds.py [--repeats 5] [--out FILE]

A CPU device of JAX and one of the plugin `xla_cpu_pjrt` compute for real, with one thread each.
In turn in one run: either device alone, both at once in loops of their own without exchange (the
control), and one job on both. Two processors of a shared core do not add up where both multiply
matrices; they do in the case `latency`, whose steps wait for their own results.
"""

import setup_kinds  # noqa: I001,F401  (first: it sets the devices)

import argparse
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
BATCH = 64
MODELS = {
    "latency": (surrogate_params(), surrogate_loss),
    "1 MB": (mlp_params(432, 2), mlp_loss),
    "20 MB": (mlp_params(2200, 2), mlp_loss),
}
RULES = {
    "mixed": {"cadence": elche.ElChe(overhead_target=0.03)},
    "mixed, pending=1": {
        "cadence": elche.ElChe(overhead_target=0.03),
        "averaging": elche.MeanGradient(delay=1),
    },
}


def both() -> list[jax.Device]:
    """Returns one device of each kind."""
    return [jax.devices("cpu")[0], jax.devices("twin")[0]]


def measure(name: str, params, loss, repeats: int) -> list[Result]:
    """Measures a model: every device alone, the control, and the job on both devices."""
    devices, data = both(), examples(2**16)
    jobs = {
        what: Loop(
            elche.build_train_step(loss, OPTIMIZER, devices=devices, **options),
            params, data, BATCH,
        )
        for what, options in RULES.items()
    }  # fmt: skip
    for job in jobs.values():
        job.warm(24)  # the plan settles after 8 reports of steady times
    counts = jobs["mixed"].train.counts
    steps = [PlainJit(params, d, n, BATCH, loss=loss) for d, n in zip(devices, counts, strict=True)]
    control = Apart(steps, counts)
    alone = [PlainJit(params, d, n, BATCH, loss=loss) for d, n in zip(devices, counts, strict=True)]
    fast = max(range(2), key=counts.__getitem__)
    plain = PlainPmap(params, [devices[fast]], (counts[fast],), BATCH, loss=loss)
    measures = {
        "cpu": lambda: steps_rate(alone[0], counts[0], TURN_S),
        "twin": lambda: steps_rate(alone[1], counts[1], TURN_S),
        "pmap": lambda: steps_rate(plain, counts[fast], TURN_S),
    } | {what: (lambda job=job: job.rate(TURN_S)) for what, job in jobs.items()}
    rates = interleave(with_control(measures, lambda: control.rate(TURN_S)), repeats)
    faster = tuple(max(pair) for pair in zip(rates["cpu"], rates["twin"], strict=True))
    found = [against_control(name, what, rates, what) for what in ("cpu", "twin", "pmap")] + [
        against_control(name, what, rates, what, least=0.95) for what in jobs
    ]
    for what in jobs:
        found.append(
            result(name, f"{what}, of the faster alone", ratios(rates[what], faster), least=1.0)
        )
        records = [record for record in jobs[what].train.records if record.steady]
        found.append(result(name, f"{what}, sync", tuple(r.sync_ms for r in records), "ms"))
    for what, job in jobs.items():
        print(name, what, "counts", job.train.counts, "microbatches/s", median(rates[what]) * 1e3)
    return found


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
