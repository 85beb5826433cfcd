"""One process of a job that trains in turns, as `processes.py` asks on standard input.

It answers every line, `SECONDS STEPS`, by the seconds that a turn took, its steps, and the
microbatches of the whole job in them. In a job all take as many steps; a process by itself takes
as many as there is time for.
"""

import json
import sys
import time

import jax

import elche_jax as elche

BATCH, EACH, TOTAL = 64, 100, 800
"""Examples of a microbatch; microbatches of a hand-written step, and of a window of FixedTotal."""


def solo(params, loss, data):
    """A hand-written jit loop on this process's device alone."""
    from baselines import PlainJit

    step = PlainJit(params, jax.local_devices()[0], EACH, BATCH, loss=loss, resident=data)
    return step, lambda: EACH


def pmap(params, loss, data):
    """Plain pmap over all processes: every device has the same share."""
    import optax
    from baselines import AXIS, OPTIMIZER, _accumulate, _apply, microbatches

    def step(params, opt_state, batches):
        value, grads = _accumulate(params, batches, EACH, loss)
        grads = jax.tree.map(lambda g: jax.lax.pmean(g, AXIS) / EACH, grads)
        params, opt_state = _apply(params, opt_state, grads)
        return params, opt_state, jax.lax.pmean(value, AXIS)

    mapped = jax.pmap(step, axis_name=AXIS, donate_argnums=(0, 1))
    state = jax.tree.map(lambda x: jax.numpy.asarray(x)[None], (params, OPTIMIZER.init(params)))
    batches = microbatches(EACH, BATCH, 1)
    assert isinstance(OPTIMIZER, optax.GradientTransformation)
    held = [state]

    def run():
        *new, value = mapped(*held[0], batches)
        held[0] = new
        return value

    return run, lambda: EACH * jax.device_count()


def elche_job(cadence):
    """This library over all processes."""

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
    "pmap": pmap,
    "ElChe": elche_job(elche.ElChe(anchor=100, max_anchor=1000, overhead_target=0.02)),
    "FixedTotal": elche_job(elche.FixedTotal(TOTAL)),
}


def main(mode: str, model: str) -> None:
    """Answers until standard input ends."""
    if mode != "solo":
        elche.distributed.initialize()
    from baselines import examples, mlp_loss, mlp_params

    params = {"1 MB": mlp_params(432, 2), "20 MB": mlp_params(2200, 2)}[model]
    run, microbatches = MODES[mode](params, mlp_loss, examples(2**17))
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
