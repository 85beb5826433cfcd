"""Milliseconds and memory of a step whose optimizer takes longer than its gradients.

    python benchmarks/large_models.py [--repeats 5] [--case adam] [--out FILE]

A perceptron with 67 MB of parameters, and microbatches of 8: the time depends mainly on how often a
step reads and writes its state. Every repeat is a separate process; a hand-written step with
donated arguments and ours take turns. Memory is the rise of the process's peak once parameters and
data are loaded, in sizes of the parameters: Adam's state takes three, gradients one.
"""

import resource
import time
from functools import partial
from itertools import pairwise
from statistics import median

from measure import Result, in_a_process, interleave, ratios, result, run_cases

WIDTH, DEPTH, BATCH, STEPS = 2048, 4, 8, 40
WAYS = ("plain", "ours")
CASES = {"adam": 1, "clip": 1, "sgd": 1, "two": 2}
"""Number of devices of each case. `clip`: AdamW, gradients clipped by global norm; `two`: Adam."""
MOST = {"ms": 1.5, "memory": 1.75}
"""Required: at most this many times a plain step's."""


def step_of(case: str, way: str) -> dict[str, float]:
    """Return the milliseconds per step and the rise of the peak memory, in a fresh process."""
    import jax
    import numpy as np
    import optax
    import setup_devices  # noqa: F401  (before the backend starts)

    import elche_jax as elche

    rng, world = np.random.default_rng(0), CASES[case]
    optimizer = {
        "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        "sgd": optax.sgd(1e-3, momentum=0.9),
    }.get(case, optax.adam(1e-3))
    params = {
        f"layer{i}": (rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype("float32")
        for i in range(DEPTH)
    }
    size = sum(x.nbytes for x in params.values())
    rows = rng.normal(size=(2, STEPS * world * BATCH, WIDTH)).astype("float32")
    data, devices = {"x": rows[0], "y": rows[1]}, jax.devices()[:world]

    def loss_fn(params, batch, rng):
        x = batch["x"]
        for layer in params.values():
            x = jax.numpy.tanh(x @ layer)
        return ((x - batch["y"]) ** 2).mean()

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        if world > 1:
            loss, grads = jax.lax.pmean((loss, grads), "devices")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def plain():
        if world > 1:
            run = jax.pmap(step, axis_name="devices", devices=devices, donate_argnums=(0, 1))
            mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
            state = jax.tree.map(
                lambda x: jax.make_array_from_single_device_arrays(
                    (world, *x.shape), sharding, [jax.device_put(x[None], d) for d in devices]
                ),
                (params, optimizer.init(params)),
            )
        else:
            run = jax.jit(step, donate_argnums=(0, 1))
            state = jax.tree.map(jax.numpy.array, (params, optimizer.init(params)))
        for at in range(STEPS):
            batch = {k: v[at * world * BATCH :][: world * BATCH] for k, v in data.items()}
            if world > 1:
                batch = {k: v.reshape(world, BATCH, WIDTH) for k, v in batch.items()}
            *state, loss = run(*state, batch)
            yield state, loss

    def ours():
        train = elche.build_train_step(loss_fn, optimizer, devices=devices)
        state = train.init(params)
        with train.windows(data, BATCH, placement="stream") as windows:
            for window in windows:
                state, metrics = train(state, window)
                yield state, metrics

    before, times = _peak(), [time.perf_counter()]
    for reached in {"plain": plain, "ours": ours}[way]():
        jax.block_until_ready(reached)
        times.append(time.perf_counter())
    spent = [b - a for a, b in pairwise(times)]
    return {"ms": 1e3 * median(spent[5:]), "memory": (_peak() - before) / size}


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(case: str, repeats: int) -> list[Result]:
    """Return the time and the memory of both, and their ratios with the requirements."""
    steps = {way: partial(in_a_process, "large_models", "step_of", case, way) for way in WAYS}
    found = interleave(steps, repeats)
    rows = []
    for what, unit in (("ms", "ms"), ("memory", "x")):
        of = {way: tuple(one[what] for one in found[way]) for way in WAYS}
        rows += [result(case, f"{what}, {way}", of[way], unit) for way in WAYS]
        rows.append(
            result(case, f"{what}, over plain", ratios(of["ours"], of["plain"]), most=MOST[what])
        )
    return rows


if __name__ == "__main__":
    run_cases(__doc__, "benchmarks/out/large_models.json", 5, CASES, measure)
