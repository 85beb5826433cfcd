"""Two devices of different kinds in one process, against what they reach without an exchange.

    python benchmarks/kinds.py [--shared] [--model "1 MB"] [--repeats 5] [--out FILE]

A CPU device of JAX and one of the plugin `xla_cpu_pjrt` really compute, with one thread each.
These take turns in one run: a job on either device alone, a loop on each device at the same time
without an exchange (the control), and one job on both devices. All of them read shuffled examples
that are kept on the device. For comparison, there is what a user can do without this package: plain
pmap on the faster device, with the same examples in every step.

With `--shared` each device uses all processors, so two devices together are no faster than one: the
job should be as fast as the faster device alone.

Windows are long from the start: waiting for each other takes the devices about one percent of a
window, the length to which `ElChe(overhead_target=0.01)` would grow them.
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
"""Windows before the first turn, enough to know the speeds, and if both devices are worth using."""
BATCH = 64
MODELS = {
    "latency": (surrogate_params(), surrogate_loss, 100),
    "1 MB": (mlp_params(432, 2), mlp_loss, 1000),
    "20 MB": (mlp_params(2200, 2), mlp_loss, 100),
}
"""Parameters, loss, and an anchor that makes windows of 0.4, 1 and 5 seconds."""
RULES = {"mixed": None, "mixed, pending=1": elche.MeanGradient(delay=1)}


def measure(name: str, params, loss, anchor: int, repeats: int, shared: bool) -> list[Result]:
    """Measure a model: every device alone, the control, and the job on both devices."""
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
    """Run the benchmark."""
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
