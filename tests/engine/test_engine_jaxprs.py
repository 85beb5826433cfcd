"""What a jaxpr tells: what its results depend on, the smallest float, what a repeat costs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from elche_jax.engine.bundles import Inlined
from elche_jax.engine.jaxprs import arguments_read, repeats_cheaply, smallest_float

X, Y = np.ones(3, "float32"), np.ones(3, "float32")


def read_by(fn, at):
    """Which arguments result `at` depends on."""
    read = arguments_read(jax.make_jaxpr(lambda *args: fn(*args)[at])(X, Y))
    return "".join(name for name, one in zip("xy", read, strict=True) if one)


def copied(fn):
    """Which argument each result is, unchanged."""
    return [
        "xy"[one] if one in (0, 1) else None for one in Inlined(jax.make_jaxpr(fn)(X, Y)).results
    ]


def printed(x):
    jax.debug.print("{}", x)
    return x


def prints(x, y):
    """What is only printed is in no result, wherever that is."""

    def body(carry, _):
        return (carry[0] * 2, printed(carry[1])), None

    jax.lax.cond(printed(y)[0] > 0, printed, lambda y: y, y)
    return jax.lax.scan(body, (x, y), None, 3)[0]


def both(x, y):
    return x, y * 2


def scanned(x, y):
    """The first carry reads `y` only after two iterations, the last one never."""

    def body(carry, _):
        a, b, c = carry
        return (a + b, b + y, c * 2), a

    carry, rows = jax.lax.scan(body, (x, x, x), None, 3)
    return *carry, rows


def looped(x, y):
    """How often the loop runs depends on both."""
    return jax.lax.while_loop(lambda c: c[0][0] < 9, lambda c: (c[0] + c[1], c[1] * 2), (x, y))


@jax.custom_vjp
def first(x, y):
    """Only its derivative reads the second argument."""
    return (x * 2,)


first.defvjp(lambda x, y: (first(x, y), y), lambda y, grads: (grads[0] * y, None))


@pytest.mark.parametrize(
    ("fn", "reads", "copies"),
    [
        (both, ["x", "y"], ["x", None]),
        (jax.jit(both), ["x", "y"], ["x", None]),
        (jax.checkpoint(both), ["x", "y"], ["x", None]),
        (lambda x, y: (x + 0 * y, jnp.zeros(3)), ["xy", ""], [None, None]),
        (lambda x, y: jax.lax.cond(x[0] > 0, lambda: (y * 2, x), lambda: (y, x * 2)), ["xy", "x"],
         [None, None]),
        (scanned, ["xy", "xy", "x", "xy"], [None] * 4),
        (looped, ["xy", "xy"], [None, None]),
        (first, ["xy"], [None]),
        (jax.jit(first), ["xy"], [None]),
        (prints, ["x", "y"], [None, "y"]),
        (jax.jit(prints), ["x", "y"], [None, "y"]),
    ],
)  # fmt: skip
def test_what_results_read_and_copy(fn, reads, copies):
    assert [read_by(fn, at) for at in range(len(copies))] == reads
    assert copied(fn) == copies


class Net(nn.Module):
    dropout: float

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(4)(x)))
        return nn.Dropout(self.dropout, deterministic=False)(x)


@pytest.mark.parametrize(("dropout", "uses"), [(0.0, False), (0.5, True)])
def test_a_key_that_a_flax_model_only_gets(dropout, uses):
    model, key = Net(dropout), jax.random.key(0)
    params = Net(0.0).init(key, X[None])

    @jax.jit
    def loss(key):
        return model.apply(params, X[None], rngs={"dropout": key}).mean()

    closed = jax.make_jaxpr(loss)(key)
    assert arguments_read(closed) == [uses]
    assert Inlined(closed).results != [0]


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (lambda x: x + 1, 4),
        (lambda x: x.astype(int), 4),
        (lambda x: x.astype("bfloat16").sum(), 2),
        (jax.jit(lambda x: jax.lax.map(lambda y: y.astype("float16"), x)), 2),
    ],
)
def test_smallest_float(fn, size):
    assert smallest_float(jax.make_jaxpr(fn)(X)) == size


@pytest.mark.parametrize(
    ("fn", "cheap"),
    [
        (lambda x: x * x.sum(), True),
        (jax.jit(lambda x: jax.lax.cond(x[0] > 0, jnp.exp, jnp.log, x)), True),
        (jax.nn.relu, True),
        (lambda x: jax.random.normal(jax.random.key(0), x.shape), False),
        (lambda x: jax.lax.top_k(x, 2)[0], False),
        (jnp.cumsum, False),
        (lambda x: x.astype("bfloat16") * 2, False),
        (lambda x: x.at[jnp.array([1, 0])].add(x[:2]), False),
        (lambda x: x @ x, False),
        (jax.jit(lambda x: jax.lax.map(lambda y: y + 1, x)), False),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sort, jnp.log, x), False),
        (lambda x: jnp.linalg.inv(jnp.diag(x)), False),
        (lambda x: jax.pure_callback(np.exp, x, x), False),
        (printed, False),
        (jax.jit(printed), False),
    ],
)
def test_what_may_be_computed_twice(fn, cheap):
    assert repeats_cheaply(fn, X) == cheap


OPTIMIZERS = {
    **{name: getattr(optax, name)(1e-3) for name in (
        "adabelief", "adafactor", "adam", "adamax", "adamw", "amsgrad", "lamb", "lars", "lion",
        "nadamw", "radam", "rmsprop", "sgd", "yogi",
    )},
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "finite": optax.apply_if_finite(optax.adam(1e-3), 5),
    "injected": optax.inject_hyperparams(optax.adam)(1e-3),
    "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "momentum": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "multi": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "schedule": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
}  # fmt: skip


def test_usual_optimizers_may_be_computed_twice():
    params = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}

    def cheap(tx):
        def update(grads, state, params):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return repeats_cheaply(update, params, tx.init(params), params)

    assert {name for name, tx in OPTIMIZERS.items() if not cheap(tx)} == set()
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    dear = [noisy, optax.contrib.muon(0.1), optax.adam(1e-3, mu_dtype="bfloat16")]
    assert not any(map(cheap, dear))
