"""Evaluation and inference on unequal devices, as shares of the sum of their speeds.

    python benchmarks/evaluation.py [--repeats 7] [--batches 600] [--out FILE]

Times are of whole calls: reading the data, computing on all devices, getting the results to the
host. Two others take turns with these calls: windows of one microbatch per device, and the control,
hand-written loops over the same devices at the same time, each device with its own data and sums
(docs/benchmarks.md).
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import time
from itertools import cycle

import jax
import jax.numpy as jnp
from baselines import examples, mlp_params, outputs
from loops import Apart
from measure import Result, against_control, interleave, options_of, result, show, with_control

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

FLEET = [5, 5, 10, 20]
BATCH = 16
SMALL = mlp_params(width=32, depth=1)


def metric_fn(params, batch):
    return {"accuracy": outputs(params, batch).argmax(axis=-1) == batch["y"]}


def rate(call, batches: int) -> float:
    """Return the microbatches per ms of a call that processes `batches` of them."""
    begun = time.perf_counter()
    call()
    return batches / (1e3 * (time.perf_counter() - begun))


class PlainEvaluation:
    """A hand-written step that sums over the next microbatches of the data on one device."""

    def __init__(self, device, rank: int, count: int, data, emulate: EmulatedSpeeds):
        def step(params, batches, total):
            def body(i, total):
                batch = jax.tree.map(lambda a: a[i], batches)
                return total + metric_fn(params, batch)["accuracy"].sum()

            total += emulate.begin(jnp.int32(rank), jnp.int32(0), True)
            total = jax.lax.fori_loop(0, count, body, total)
            return total + emulate.end(jnp.int32(rank), jnp.int32(count), total)

        self._step = jax.jit(step)
        self._params = jax.device_put(SMALL, device)
        self._total = jax.device_put(jnp.float32(0), device)
        self._shape = (count, BATCH)
        each = count * BATCH
        rows = len(data["y"]) // each * each
        self._parts = cycle(
            [{k: a[at : at + each] for k, a in data.items()} for at in range(0, rows, each)]
        )

    def __call__(self):
        batches = jax.tree.map(lambda a: a.reshape(*self._shape, *a.shape[1:]), next(self._parts))
        self._total = self._step(self._params, batches, self._total)
        return self._total


def measure(batches: int, repeats: int) -> list[Result]:
    devices = jax.devices()[: len(FLEET)]
    data, emulate = examples(BATCH * batches - 5), EmulatedSpeeds(FLEET)
    options = {"devices": devices, "emulate": emulate}
    evaluate = elche.build_eval_step(metric_fn, **options)
    in_equal_shares = elche.build_eval_step(metric_fn, cadence=elche.EveryBatch(), **options)
    counts = tuple(round(100 / ms) for ms in FLEET)  # calls of a tenth of a second, like ours
    control = Apart(
        [
            PlainEvaluation(device, rank, counts[rank], data, emulate)
            for rank, device in enumerate(devices)
        ],
        counts,
    )

    calls = {
        "evaluation": lambda: evaluate(SMALL, data, BATCH),
        "predict": lambda: elche.predict(outputs, SMALL, data, BATCH, **options),
        "equal shares": lambda: in_equal_shares(SMALL, data, BATCH),
    }
    of = sum(1 / ms for ms in FLEET)
    first = {name: rate(call, batches) / of for name, call in calls.items()}
    measures = {name: lambda call=call: rate(call, batches) for name, call in calls.items()}
    seconds = batches / of / 1e3
    rates = interleave(with_control(measures, lambda: control.rate(seconds)), repeats)
    results = [
        against_control("eval", name, rates, name, of, 1.0,
                        **({"least": 0.90} if name != "equal shares" else {}))
        for name in calls
    ]  # fmt: skip
    for name in ("evaluation", "predict"):
        what = f"{name}: the first call, compiling, speeds unknown: share of the limit"
        results.append(result("eval", what, (first[name],)))
    return results


def main() -> None:
    parser = options_of(__doc__, "benchmarks/out/evaluation.json", 7)
    parser.add_argument("--batches", type=int, default=600)
    args = parser.parse_args()
    show(measure(args.batches, args.repeats), args.out)


if __name__ == "__main__":
    main()
