"""One process of a job that trains in turns, as `processes.py` asks on standard input.

It answers every line, `[SECONDS, STEPS]`, with the seconds and the steps that a turn took, and the
microbatches of the whole job in these steps. In a job all processes take `STEPS` steps; a separate
process takes as many as fit into `SECONDS`, and at least `STEPS`.
"""

import json
import sys
import time
from typing import NamedTuple

import jax

import elche_jax as elche

BATCH, EXAMPLES = 64, 2**20


class Sizes(NamedTuple):
    """Width of a model's two layers; microbatches per step, and per window of FixedTotal."""

    width: int
    each: int
    total: int


MODELS = {"1 MB": Sizes(432, 100, 4000), "20 MB": Sizes(2200, 40, 400)}


def solo(sizes):
    """Make a hand-written jit loop on this process's device alone."""

    def make(params, loss, data):
        from baselines import PlainJit

        device = jax.local_devices()[0]
        step = PlainJit(params, device, sizes.each, BATCH, loss=loss, resident=data)
        return step, lambda: sizes.each

    return make


def pmap(each):
    """Make plain pmap over all processes; every device has the same share of a step."""

    def make(params, loss, data):
        from baselines import PlainPmap

        world = jax.device_count()
        step = PlainPmap(params, jax.devices(), (each,) * world, BATCH, loss=loss)
        return step, lambda: each * world

    return make


def elche_job(cadence):
    """Make a job of this library over all processes."""

    def make(params, loss, data):
        from baselines import OPTIMIZER

        train = elche.build_train_step(loss, OPTIMIZER, cadence=cadence)
        held = [train.init(params)]
        windows = train.windows(data, BATCH, epochs=None, placement="resident")

        def run():
            window = next(windows)
            held[0], metrics = train(held[0], window)
            run.microbatches = sum(window.counts)
            return metrics["loss"]

        return run, lambda: run.microbatches

    return make


MODES = {
    "solo": solo,
    "pmap": lambda sizes: pmap(1),
    "pmap, accumulating": lambda sizes: pmap(sizes.each),
    "ElChe": lambda sizes: elche_job(
        elche.ElChe(anchor=sizes.each, max_anchor=10 * sizes.each, overhead_target=0.02)
    ),
    "FixedTotal": lambda sizes: elche_job(elche.FixedTotal(sizes.total)),
}


def main(mode: str, model: str) -> None:
    """Answer requests until standard input ends."""
    if mode != "solo":
        elche.distributed.initialize()
    from baselines import examples, mlp_loss, mlp_params

    sizes = MODELS[model]
    make = MODES[mode](sizes)
    run, microbatches = make(mlp_params(sizes.width, 2), mlp_loss, examples(EXAMPLES))
    for line in sys.stdin:
        seconds, steps = json.loads(line)
        begun, done, taken, before = time.perf_counter(), 0, 0, None
        while taken < steps or (mode == "solo" and time.perf_counter() - begun < seconds):
            out = run()
            done += microbatches()
            taken += 1
            jax.block_until_ready(before)
            before = out
        jax.block_until_ready(before)
        print(json.dumps([time.perf_counter() - begun, taken, done]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
