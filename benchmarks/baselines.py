"""Hand-written baselines: a model, and plain pmap and jit loops over it."""

from itertools import pairwise, repeat

import jax
import jax.numpy as jnp
import numpy as np
import optax

AXIS = "devices"
FEATURES = 64
OPTIMIZER = optax.adam(1e-3)


def mlp_params(width: int, depth: int, seed: int = 0, gain: float = 1.0) -> dict:
    """Return float32 parameters of a perceptron with `depth` hidden layers."""
    rng = np.random.default_rng(seed)
    sizes = [FEATURES] + [width] * depth + [10]
    return {
        f"layer{i}": {
            "w": (rng.normal(size=(a, b)) * np.sqrt(gain / a)).astype("float32"),
            "b": np.zeros(b, "float32"),
        }
        for i, (a, b) in enumerate(pairwise(sizes))
    }


def outputs(params, batch):
    """Return the logits of the perceptron."""
    x = batch["x"]
    for i in range(len(params)):
        x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    return x


def mlp_losses(params, batch, rng):
    """Return the cross-entropy per example."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs(params, batch), batch["y"])


def mlp_loss(params, batch, rng):
    """Return the mean cross-entropy of a microbatch."""
    return mlp_losses(params, batch, rng).mean()


def surrogate_params() -> dict:
    """Return the parameters of a linear surrogate, `w . x + b`."""
    return {"w": np.zeros(FEATURES, "float32"), "b": np.float32(0)}


def surrogate_loss(params, batch, rng):
    """Return the mean squared error of a linear surrogate of a simulator run during training.

    The simulation is one long trajectory of scalars: every step needs the previous one, so
    a core waits for its own results and leaves most of its units idle. This is necessary to
    measure two devices at once on processors whose cores share units: two independent
    processes that saturate them (with matrix products) slow each other down.
    """

    def steps(_, h):
        for _ in range(16):
            h = jnp.tanh(1.2 * h + 0.1)
        return h

    target = jax.lax.fori_loop(0, 2000, steps, batch["x"].mean(axis=1))
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - target) ** 2)


def examples(count: int) -> dict:
    """Return random examples: float32 features, random int32 labels."""
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(count, FEATURES)).astype("float32"),
        "y": rng.integers(0, 10, size=count).astype("int32"),
    }


def microbatches(count: int, batch: int, world: int) -> dict:
    """Return examples as stacked microbatches, leaves `(world, count, batch, ...)`."""
    flat = examples(world * count * batch)
    return jax.tree.map(lambda a: a.reshape(world, count, batch, *a.shape[1:]), flat)


def _accumulate(params, batches, count, loss=mlp_loss, hook=None, rank=0, number=0, rows=None):
    """Sum loss and gradients; `hook` is the emulation, `number` the index of the step.

    With `rows`, indices of shape `(count, batch)`, `batches` holds the examples themselves.
    """

    def body(i, sums):
        loss_sum, grad_sum = sums
        batch = jax.tree.map(lambda a: a[i if rows is None else rows[i]], batches)
        value, grads = jax.value_and_grad(loss)(params, batch, None)
        return loss_sum + value, jax.tree.map(jnp.add, grad_sum, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    if hook is None:
        return jax.lax.fori_loop(0, count, body, (jnp.float32(0), zeros))
    start = hook.begin(jnp.int32(rank), number, True), zeros
    total, grads = jax.lax.fori_loop(
        0, count, lambda i, sums: hook.around(body, jnp.int32(rank), i, sums), start
    )
    zero = hook.end(jnp.int32(rank), jnp.int32(count), grads)
    return total + zero, jax.tree.map(lambda g: g + zero, grads)


def _apply(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class PlainPmap:
    """Accumulation over `counts` microbatches per device, fused with the exchange.

    Args:
        params: Initial parameters.
        devices: The devices, including those of other processes.
        counts: Microbatches of each device per step.
        batch: Examples per microbatch.
        emulate: Slows the devices down, or None.
        loss: Loss function of a microbatch.
    """

    def __init__(self, params, devices, counts, batch: int, emulate=None, loss=mlp_loss):
        total = sum(counts)

        def step(params, opt_state, batches, number):
            rank = jax.lax.axis_index(AXIS)
            count = counts[0] if len(set(counts)) == 1 else jnp.array(counts)[rank]
            value, grads = _accumulate(params, batches, count, loss, emulate, rank, number)
            grads = jax.tree.map(lambda g: jax.lax.psum(g, AXIS) / total, grads)
            params, opt_state = _apply(params, opt_state, grads)
            return params, opt_state, jax.lax.psum(value, AXIS) / total

        self._step = jax.pmap(step, axis_name=AXIS, devices=devices, donate_argnums=(0, 1))
        here = sum(device.process_index == jax.process_index() for device in devices)
        stack = jax.pmap(lambda a: a, devices=devices)
        self._params, self._opt = stack(
            jax.tree.map(
                lambda a: np.stack([np.asarray(a)] * here), (params, OPTIMIZER.init(params))
            )
        )
        self._batches = stack(microbatches(max(counts), batch, here))
        self._number = stack(np.zeros(here, np.int32))

    def __call__(self):
        self._params, self._opt, loss = self._step(
            self._params, self._opt, self._batches, self._number
        )
        return loss


class PlainJit:
    """Accumulation over `count` microbatches on one device, which is `rank` in an emulation.

    Args:
        params: Initial parameters.
        device: The device.
        count: Microbatches per step.
        batch: Examples per microbatch.
        emulate: Slows the device down, or None.
        rank: Rank of the emulated device.
        loss: Loss function of a microbatch.
        updates: Steps per call, in a loop on the device.
        stream: Examples that a step reads from the host, in a shuffled order, instead of
            reusing the same ones on the device.
        resident: Examples that a step reads on the device, in a shuffled order.
    """

    def __init__(
        self, params, device, count: int, batch: int, emulate=None, rank: int = 0, loss=mlp_loss,
        updates: int = 1, stream=None, resident=None,
    ):  # fmt: skip
        def update(number, params, opt_state, batches):
            rows, batches = (None, batches) if resident is None else batches
            total, grads = _accumulate(params, batches, count, loss, emulate, rank, number, rows)
            grads = jax.tree.map(lambda g: g / count, grads)
            return *_apply(params, opt_state, grads), total / count

        def step(params, opt_state, batches):
            if updates == 1:
                return update(0, params, opt_state, batches)
            start = params, opt_state, jnp.float32(0)
            return jax.lax.fori_loop(
                0, updates, lambda number, state: update(number, *state[:2], batches), start
            )

        self._step = jax.jit(step, donate_argnums=(0, 1))
        state = jax.device_put((params, OPTIMIZER.init(params)), device)
        self._params, self._opt = jax.tree.map(jnp.copy, state)  # the step donates them
        if resident is not None:
            held = jax.device_put(resident, device)
            rows = shuffled(np.arange(len(held["y"]), dtype=np.int32), count, batch)
            self._batches = ((each, held) for each in rows)
        elif stream is None:
            one = jax.tree.map(lambda a: a[0], microbatches(count, batch, 1))
            self._batches = repeat(jax.device_put(one, device))
        else:
            self._batches = shuffled(stream, count, batch)

    def __call__(self):
        self._params, self._opt, loss = self._step(self._params, self._opt, next(self._batches))
        return loss


def shuffled(data, count: int, batch: int):
    """Yield the examples of a step, leaves `(count, batch, ...)`, in a new order every epoch."""
    rng, size = np.random.default_rng(0), len(jax.tree.leaves(data)[0])
    each = count * batch
    while True:
        order = rng.permutation(size)
        for at in range(0, size - each + 1, each):
            rows = order[at : at + each].reshape(count, batch)
            yield jax.tree.map(lambda a, rows=rows: np.take(a, rows, axis=0), data)
