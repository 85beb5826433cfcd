"""Functions as JAX has traced them: what makes two of them the same."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from elche_jax.engine.traced import no_named_axis, trace

SHAPE = jax.ShapeDtypeStruct((4, 3), "float32")
X = jnp.arange(12.0).reshape(4, 3)


class BatchSpec:
    """What a function may read besides its arguments; it can be changed."""

    def __init__(self):
        self.number = 1.0
        self.array = np.ones(3, "float32")
        self.scalar = np.array(2.0, "float32")
        self.on_device = jnp.ones(3)
        self.net = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def change(self):
        self.number = -0.0 if self.number == 0 else self.number + 1
        self.array[0] += 1  # in place
        self.scalar[...] += 1
        self.on_device = self.on_device.at[0].add(1)
        self.net.kernel[...] = self.net.kernel[...] + 1


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))


@jax.custom_vjp
def halved(x, by):
    return x / by


halved.defvjp(lambda x, by: (x / by, by), lambda by, g: (g / by, None))

READERS = {
    "a number": lambda r: lambda x: x * r.number,
    "an array of NumPy": lambda r: lambda x: x + r.array,
    "a scalar of NumPy": lambda r: lambda x: x * r.scalar,
    "an array of JAX": lambda r: lambda x: x + r.on_device,
    "a module of nnx": lambda r: lambda x: r.net(x),
    "a key": lambda r: lambda x: x + jax.random.normal(jax.random.key(int(r.number)), (3,)),
    "a type": lambda r: lambda x: x.astype("float16" if r.number > 1 else "bfloat16"),
    "a name": lambda r: lambda x: {str(r.number): x},
    "in a scan": lambda r: lambda x: jax.lax.scan(lambda c, y: (c + y * r.array, c), x[0], x),
    "in a branch": lambda r: lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x + r.array, lambda: x),
    "in a loop": lambda r: lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + r.array, x),
    "in a gradient": lambda r: jax.grad(lambda x: (jax.nn.relu(x) * r.number).sum()),
    "in a checkpoint": lambda r: lambda x: jax.checkpoint(lambda x: jnp.sin(x) * r.number)(x),
    "in one with its own derivative": lambda r: lambda x: halved(doubled(x), r.number),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_function_that_reads_what_has_changed_is_another(name):
    reads = BatchSpec()
    fn = READERS[name](reads)
    one, same = trace("fn", fn, SHAPE), trace("fn", fn, SHAPE)
    assert one == same
    reads.change()
    other = trace("fn", fn, SHAPE)
    assert one != other
    jax.tree.map(np.testing.assert_array_equal, other(X), fn(X))


def test_what_was_traced_does_not_change_any_more():
    reads = BatchSpec()
    traced = trace("fn", READERS["an array of NumPy"](reads), SHAPE)
    reads.change()
    np.testing.assert_array_equal(traced(X), X + 1)


class Model(nn.Module):
    """What forward passes are made of."""

    @nn.compact
    def __call__(self, x):
        for layer in (nn.relu, nn.gelu, nn.silu, nn.softmax, nn.BatchNorm(True), nn.LayerNorm()):
            x = layer(nn.remat(nn.Dense)(4)(x))
        return nn.MultiHeadDotProductAttention(2)(x[None])[0].sort().argmax(-1)


def test_a_model_is_the_same_in_every_trace():
    """`model.apply` is a new object whenever it is asked for."""
    model = Model()
    shapes = jax.eval_shape(model.init, jax.random.key(0), SHAPE)
    assert trace("fn", model.apply, shapes, SHAPE) == trace("fn", model.apply, shapes, SHAPE)
    assert trace("fn", model.apply, shapes, SHAPE) == trace("fn", Model().apply, shapes, SHAPE)


def test_what_is_no_number_and_the_sign_of_zero():
    def of(number):
        return trace("fn", lambda x: jnp.where(x > 0, x, number), SHAPE)

    assert of(np.nan) == of(np.nan)
    assert of(0.0) != of(-0.0)


def test_a_callback_that_is_made_anew_cannot_be_compared():
    def anew(x):
        return jax.pure_callback(lambda y: np.asarray(y), SHAPE, x)

    def twice(y):
        return 2 * np.asarray(y)

    assert trace("fn", anew, SHAPE) != trace("fn", anew, SHAPE)
    kept = [trace("fn", lambda x: jax.pure_callback(twice, SHAPE, x), SHAPE) for _ in range(2)]
    assert kept[0] == kept[1]


def test_arguments_and_results_are_pytrees():
    def fn(params, rows):
        return {"sum": rows["x"] @ params["w"], "nothing": None}, [rows["x"]]

    params, rows = {"w": jnp.ones(3)}, {"x": X}
    traced = trace("fn", fn, params, rows)
    want, got = fn(params, rows), traced(params, rows)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert traced.outputs[0]["sum"].shape == (4,)


def test_another_name_error_is_the_users_own():
    with pytest.raises(NameError, match=r"^name 'x' is not defined$"), no_named_axis("fn"):
        raise NameError("name 'x' is not defined")
