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

from functools import partial
from statistics import median

import jax
from baselines import (
    PlainPmap,
    examples,
    mlp_loss,
    mlp_params,
    surrogate_loss,
    surrogate_params,
)
from both import Both
from loops import steps_rate
from measure import Result, against_control, options_of, show

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
    devices = {"first": jax.devices("cpu")[0], "second": jax.devices("twin")[0]}
    long = elche.ElChe(anchor=anchor, max_anchor=anchor)
    jobs = {what: {"cadence": long, "averaging": rule} for what, rule in RULES.items()}
    both = Both(params, loss, examples(2**19), BATCH, devices, jobs, WARM)
    most = max(both.counts)
    fast = list(devices.values())[both.counts.index(most)]
    plain = PlainPmap(params, [fast], (most,), BATCH, loss=loss)
    rates = both.rates(TURN_S, repeats, pmap=partial(steps_rate, plain, most, TURN_S))
    found = [
        against_control(name, what, rates, what, **asked)
        for what in (*devices, "pmap", *jobs)
        for asked in [{"least": 0.95} if what == "mixed" and not shared else {}]
    ]
    for what, job in both.jobs.items():
        found += both.results(name, what, rates, **({"least": 1.0} if what == "mixed" else {}))
        print(name, what, "counts", job.train.counts, "microbatches/s", median(rates[what]) * 1e3)
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = options_of(__doc__, "benchmarks/results/kinds.json", 5)
    parser.add_argument("--shared", action="store_true", help="all processors for each device")
    parser.add_argument("--model", choices=MODELS, action="append")
    arguments = parser.parse_args()
    found = []
    for name in arguments.model or MODELS:
        found += measure(name, *MODELS[name], arguments.repeats, arguments.shared)
    show(found, arguments.out)


if __name__ == "__main__":
    main()
