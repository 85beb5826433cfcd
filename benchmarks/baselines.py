"""What one would write by hand: a model, and plain pmap and jit loops over it."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

AXIS = "devices"
OPTIMIZER = optax.adam(1e-3)


def mlp_params(width: int, depth: int, features: int = 64, seed: int = 0) -> dict:
    """Float32 parameters of a perceptron with `depth` hidden layers."""
    rng = np.random.default_rng(seed)
    sizes = [features] + [width] * depth + [10]
    return {
        f"layer{i}": {
            "w": (rng.normal(size=(a, b)) / np.sqrt(a)).astype("float32"),
            "b": np.zeros(b, "float32"),
        }
        for i, (a, b) in enumerate(pairwise(sizes))
    }


def mlp_loss(params, batch, rng):
    """Mean cross-entropy of a microbatch."""
    x = batch["x"]
    for i in range(len(params)):
        x = x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"]
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


def surrogate_params(features: int = 64) -> dict:
    """Parameters of a linear surrogate, `w . x + b`."""
    return {"w": np.zeros(features, "float32"), "b": np.float32(0)}


def surrogate_loss(params, batch, rng):
    """Mean square error of a linear surrogate of a simulator that runs at training time.

    The simulation is one long trajectory of scalars: every step needs the one before it,
    so a core waits for its own results and leaves most of its units idle. That is what a
    question about two devices at once needs on processors whose cores share units: two
    independent processes that fill them (with matrix products) slow each other.
    """

    def steps(_, h):
        for _ in range(16):
            h = jnp.tanh(1.2 * h + 0.1)
        return h

    target = jax.lax.fori_loop(0, 2000, steps, batch["x"].mean(axis=1))
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - target) ** 2)


def examples(count: int, features: int = 64, seed: int = 1) -> dict:
    """Random examples with random labels; int32 labels, float32 features."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, features)).astype("float32"),
        "y": rng.integers(0, 10, size=count).astype("int32"),
    }


def microbatches(count: int, batch: int, world: int) -> dict:
    """Examples as stacked microbatches, leaves `(world, count, batch, ...)`."""
    flat = examples(world * count * batch)
    return jax.tree.map(lambda a: a.reshape(world, count, batch, *a.shape[1:]), flat)


def _accumulate(params, batches, count, loss=mlp_loss):
    def body(i, sums):
        loss_sum, grad_sum = sums
        batch = jax.tree.map(lambda a: a[i], batches)
        value, grads = jax.value_and_grad(loss)(params, batch, None)
        return loss_sum + value, jax.tree.map(jnp.add, grad_sum, grads)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.fori_loop(0, count, body, (jnp.float32(0), zeros))


def _apply(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


class PlainPmap:
    """Accumulation over `count` microbatches per device, fused with the exchange."""

    def __init__(self, params, devices, count: int, batch: int, emulate=None, loss=mlp_loss):
        world = len(devices)

        def step(params, opt_state, batches, number):
            if emulate is None:
                total, grads = _accumulate(params, batches, count, loss)
            else:
                rank = jax.lax.axis_index(AXIS)
                zero = emulate.begin(rank, number, True)
                start = jax.tree.map(lambda p: p + zero, params)
                total, grads = _accumulate(start, batches, count, loss)
                zero = emulate.end(rank, jnp.int32(count), grads)
                grads = jax.tree.map(lambda g: g + zero, grads)
            grads = jax.tree.map(lambda g: jax.lax.pmean(g / count, AXIS), grads)
            params, opt_state = _apply(params, opt_state, grads)
            return params, opt_state, jax.lax.pmean(total, AXIS)

        self._step = jax.pmap(step, axis_name=AXIS, devices=devices, donate_argnums=(0, 1))
        stack = jax.pmap(lambda a: a, devices=devices)
        copies = jax.tree.map(lambda a: np.stack([np.asarray(a)] * world), params)
        self._params = stack(copies)
        self._opt = stack(
            jax.tree.map(lambda a: np.stack([np.asarray(a)] * world), OPTIMIZER.init(params))
        )
        self._batches = stack(microbatches(count, batch, world))
        self._number = stack(np.zeros(world, np.int32))

    def __call__(self):
        self._params, self._opt, loss = self._step(
            self._params, self._opt, self._batches, self._number
        )
        return loss


class PlainJit:
    """Accumulation over `count` microbatches on one device."""

    def __init__(self, params, device, count: int, batch: int):
        def step(params, opt_state, batches):
            loss, grads = _accumulate(params, batches, count)
            grads = jax.tree.map(lambda g: g / count, grads)
            params, opt_state = _apply(params, opt_state, grads)
            return params, opt_state, loss / count

        self._step = jax.jit(step, donate_argnums=(0, 1))
        one = jax.tree.map(lambda a: a[0], microbatches(count, batch, 1))
        state = jax.device_put((params, OPTIMIZER.init(params)), device)
        self._params, self._opt = jax.tree.map(jnp.copy, state)  # the step donates them
        self._batches = jax.device_put(one, device)

    def __call__(self):
        self._params, self._opt, loss = self._step(self._params, self._opt, self._batches)
        return loss
