"""One GPU against a hand-written jit loop, and a GPU with its host's CPU against the faster alone.

    python benchmarks/gpu.py [--repeats 5] [--out FILE]

A step written by hand reads the same shuffled examples, on the GPU or from the host, and gives its
buffers up. `tiny` is a perceptron whose microbatch takes less time than its dispatch, `large` one
of some milliseconds. With the CPU, a model of many small steps, in which a GPU is not the faster
device, and `large`, for which the CPU is not worth its exchange.
"""

import argparse
from pathlib import Path
from statistics import median

import jax
from baselines import (
    OPTIMIZER,
    PlainJit,
    examples,
    mlp_loss,
    mlp_params,
    surrogate_loss,
    surrogate_params,
)
from loops import Apart, Loop, steps_rate
from measure import Result, against_control, interleave, ratios, result, show, with_control

import elche_jax as elche

TURN_S = 0.8
WARM = 100
"""Windows before the first turn of two kinds: it is then known which devices are worth it."""
MODELS = {"tiny": (mlp_params(256, 3), 64), "large": (mlp_params(4096, 4), 4096)}
"""Parameters and examples of a microbatch."""
COUNTS = (1, 8)


def one_device(gpu: jax.Device, repeats: int) -> list[Result]:
    """Measures windows of one GPU as a share of a jit loop that does the same."""
    found = []
    for name, (params, batch) in MODELS.items():
        data = examples(16 * batch)
        for count in COUNTS:
            hands = {
                "resident": PlainJit(params, gpu, count, batch, resident=data),
                "stream": PlainJit(params, gpu, count, batch, stream=data),
            }
            for placement, hand in hands.items():
                train = elche.build_train_step(
                    mlp_loss, OPTIMIZER, devices=[gpu], cadence=elche.FixedTotal(count)
                )
                ours = Loop(train, params, data, batch, placement=placement)
                ours.warm(10)
                rates = interleave(
                    {
                        "ours": lambda ours=ours: ours.rate(TURN_S),
                        "by hand": lambda hand=hand, count=count: steps_rate(hand, count, TURN_S),
                    },
                    repeats,
                )
                share = ratios(rates["ours"], rates["by hand"])
                found.append(result(name, f"1 x {count}, {placement}, of a jit loop", share))
                for what, rate in rates.items():
                    ms = tuple(count / each for each in rate)
                    found.append(result(name, f"1 x {count}, {placement}, {what}", ms, "ms"))
    return found


def two_kinds(gpu: jax.Device, repeats: int) -> list[Result]:
    """Measures a GPU and a CPU together, as a share of the faster one."""
    devices = [gpu, jax.devices("cpu")[0]]
    found = []
    for name, params, loss, batch, epoch in (
        ("steps", surrogate_params(), surrogate_loss, 1, 2048),
        ("large", MODELS["large"][0], mlp_loss, 512, 256),  # a window of the CPU's is longer
    ):
        data = examples(epoch * batch)

        def job(chosen, params=params, loss=loss, data=data, batch=batch, **options) -> Loop:
            train = elche.build_train_step(loss, OPTIMIZER, devices=chosen, **options)
            return Loop(train, params, data, batch)

        both = job(devices, cadence=elche.ElChe())
        both.warm(WARM)
        counts = next(one.counts for one in reversed(both.train.records) if all(one.counts))
        alone = {
            what: job([device], cadence=elche.FixedTotal(count))
            for what, device, count in zip(("gpu", "cpu"), devices, counts, strict=True)
        }
        for loop in alone.values():
            loop.warm(3)
        steps = [
            PlainJit(params, device, count, batch, loss=loss, resident=data)
            for device, count in zip(devices, counts, strict=True)
        ]
        control = Apart(steps, counts)
        measures = {
            what: lambda loop=loop: loop.rate(3 * TURN_S)
            for what, loop in (alone | {"both": both}).items()
        }
        apart = with_control(measures, lambda control=control: control.rate(3 * TURN_S))
        rates = interleave(apart, repeats)
        faster = max((rates[what] for what in alone), key=median)
        found += [against_control(name, what, rates, what) for what in measures]
        found.append(result(name, "both, of the faster alone", ratios(rates["both"], faster)))
        records = [one for one in both.train.records if one.steady and all(one.counts)]
        found.append(result(name, "sync", tuple(one.sync_ms for one in records), "ms"))
        print(name, counts, both.train.counts, both.train.report(), sep="\n")
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    arguments = parser.parse_args()
    gpu = jax.devices()[0]
    if gpu.platform != "gpu":
        parser.error("needs a GPU")
    show(one_device(gpu, arguments.repeats) + two_kinds(gpu, arguments.repeats), arguments.out)


if __name__ == "__main__":
    main()
