"""Evaluation and inference on unequal devices, as shares of the sum of their speeds.

    python benchmarks/evaluation.py [--repeats 5] [--batches 600] [--out FILE]

The time is that of the whole call: reading the data, all devices, results on the host. An
evaluator of one's own in plain `pmap`, one microbatch per device and step, takes its turns.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import argparse
import time
from pathlib import Path

import jax
from baselines import examples, mlp_params
from measure import Result, interleave, result, show

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

FLEET = [5, 5, 10, 20]
BATCH = 16
SMALL = mlp_params(width=32, depth=1)


def outputs(params, batch):
    """The logits of the perceptron of `baselines`."""
    x = batch["x"]
    for i in range(len(params)):
        x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    return x


def metric_fn(params, batch):
    return {"accuracy": outputs(params, batch).argmax(axis=-1) == batch["y"]}


def share(call, batches: int) -> float:
    """Share of the limit that a call reaches which works through so many microbatches."""
    begun = time.perf_counter()
    call()
    ms = 1e3 * (time.perf_counter() - begun)
    return batches / sum(1 / each for each in FLEET) / ms


class PlainPmap:
    """Equal shares: a window of one microbatch per device at a time."""

    def __init__(self, devices, data):
        self._evaluate = elche.build_eval_step(
            metric_fn, devices=devices, cadence=elche.EveryBatch(), emulate=EmulatedSpeeds(FLEET)
        )
        self._data = data

    def __call__(self):
        return self._evaluate(SMALL, self._data, BATCH)


def measure(batches: int, repeats: int) -> list[Result]:
    devices = jax.devices()[: len(FLEET)]
    data = examples(BATCH * batches - 5)
    evaluate = elche.build_eval_step(metric_fn, devices=devices, emulate=EmulatedSpeeds(FLEET))
    emulate = EmulatedSpeeds(FLEET)
    plain = PlainPmap(devices, data)

    def predict():
        return elche.predict(outputs, SMALL, data, BATCH, devices=devices, emulate=emulate)

    calls = {
        "evaluation": lambda: evaluate(SMALL, data, BATCH),
        "predict": predict,
        "equal shares": plain,
    }
    first = {name: share(call, batches) for name, call in calls.items()}
    found = interleave(
        {name: lambda call=call: share(call, batches) for name, call in calls.items()}, repeats
    )
    results = [
        result("eval", f"{name}: share of the limit", values,
               **({"least": 0.90} if name != "equal shares" else {}))
        for name, values in found.items()
    ]  # fmt: skip
    for name in ("evaluation", "predict"):
        results.append(
            result("eval", f"{name}: the first call, compiling, speeds unknown", (first[name],))
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/evaluation.json"))
    args = parser.parse_args()
    show(measure(args.batches, args.repeats), args.out)


if __name__ == "__main__":
    main()
