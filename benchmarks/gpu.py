"""One GPU against a hand-written jit loop, and a GPU with its host's CPU against the faster alone.

    python benchmarks/gpu.py [--repeats 5] [--out FILE]

The hand-written step reads the same shuffled examples, on the GPU or from the host, and donates its
buffers. `tiny` is a perceptron whose microbatch takes less time than its dispatch; a microbatch of
`large` takes some milliseconds. With the CPU, the models are one of many small steps, for which the
GPU is not the faster device, and `large`, for which the CPU is not worth its exchange.
"""

from functools import partial
from itertools import product

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
from both import Both
from loops import Loop, steps_rate
from measure import Result, against_control, interleave, options_of, ratios, result, show

import elche_jax as elche

TURN_S = 0.8
WARM = 100
"""Windows before the first turn with two kinds, enough to know which devices are worth using."""
MODELS = {"tiny": (mlp_params(256, 3), 64), "large": (mlp_params(4096, 4), 4096)}
"""Parameters and examples of a microbatch."""
COUNTS = (1, 8)


def one_device(gpu: jax.Device, name: str, count: int, repeats: int) -> list[Result]:
    """Measure windows of `count` microbatches on one GPU, relative to a jit loop by hand."""
    params, batch = MODELS[name]
    data, found = examples(16 * batch), []
    for placement, source in (("resident", {"resident": data}), ("stream", {"stream": data})):
        hand = PlainJit(params, gpu, count, batch, **source)
        train = elche.build_train_step(
            mlp_loss, OPTIMIZER, devices=[gpu], cadence=elche.FixedTotal(count)
        )
        ours = Loop(train, params, data, batch, placement=placement)
        ours.warm(10)
        rates = interleave(
            {
                "ours": partial(ours.rate, TURN_S),
                "by hand": partial(steps_rate, hand, count, TURN_S),
            },
            repeats,
        )
        what = f"1 x {count}, {placement}"
        share = ratios(rates["ours"], rates["by hand"])
        found.append(result(name, f"{what}, of a jit loop", share))
        for who, rate in rates.items():
            found.append(result(name, f"{what}, {who}", tuple(count / r for r in rate), "ms"))
    return found


def two_kinds(
    gpu: jax.Device, name: str, params, loss, batch: int, epoch: int, repeats: int
) -> list[Result]:
    """Measure a GPU and a CPU together, in epochs of `epoch` microbatches."""
    devices, jobs = {"gpu": gpu, "cpu": jax.devices("cpu")[0]}, {"both": {"cadence": elche.ElChe()}}
    both = Both(params, loss, examples(epoch * batch), batch, devices, jobs, WARM)
    rates = both.rates(3 * TURN_S, repeats)
    train = both.jobs["both"].train
    print(name, both.counts, train.counts, train.report(), sep="\n")
    shares = [against_control(name, what, rates, what) for what in (*devices, *jobs)]
    return shares + both.results(name, "both", rates)


def main() -> None:
    """Run the benchmark."""
    parser = options_of(__doc__, "benchmarks/results/gpu.json", 5)
    arguments = parser.parse_args()
    gpu = jax.devices()[0]
    if gpu.platform != "gpu":
        parser.error("needs a GPU")
    repeats, found = arguments.repeats, []
    for name, count in product(MODELS, COUNTS):
        found += one_device(gpu, name, count, repeats)
    found += two_kinds(gpu, "steps", surrogate_params(), surrogate_loss, 1, 2048, repeats)
    # one microbatch on the CPU takes as long as an epoch on the GPU
    found += two_kinds(gpu, "large", MODELS["large"][0], mlp_loss, 512, 256, repeats)
    show(found, arguments.out)


if __name__ == "__main__":
    main()
