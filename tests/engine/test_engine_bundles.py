"""Equations that are alike are joined: fewer of them, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from marks import slow

from elche_jax.engine.bundles import FEWEST, JOIN_BELOW, Plan, bundled, row_length, rows_of

SHAPES = {"w": (3, 2), "b": (2,)}


def params(layers, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"{name}{i:02d}": jnp.array(rng.normal(size=shape), "float32")
        for i in range(layers)
        for name, shape in SHAPES.items()
    }


def weights(tree):
    return {name: "w" in name for name in tree}


def evens(tree):
    return {name: int(name[1:]) % 2 == 0 for name in tree}


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "decay of weights": optax.adamw(0.1, mask=weights),
    "decay of every other layer": optax.adamw(0.1, mask=evens),
    "clipped by the global norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9)),
    "a norm of each array": optax.lamb(0.1),
    "schedule": optax.rmsprop(optax.exponential_decay(0.1, 10, 0.5)),
    "two optimizers": optax.partition(
        {True: optax.adam(0.1), False: optax.sgd(0.1)}, param_labels=weights
    ),
}


def update_of(optimizer):
    def update(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    return update


def run(plan, args):
    """Run a plan with its bundles filled from the arguments."""
    bundles = {members: jnp.stack([args[i] for i in members]) for members in plan.bundled}
    singles = {i: args[i] for i in plan.reads(())}
    results = plan.run(singles, bundles)
    return [x[0][x[1]] if isinstance(x, tuple) else x for x in results]


def arguments(optimizer, layers):
    start = params(layers)
    args = params(layers, seed=1), optimizer.init(start), start
    # a state as after some steps, not zeros
    return jax.tree.map(lambda x: x + jnp.asarray(0.5, x.dtype), args)


@pytest.mark.parametrize(
    "name",
    [
        "decay of every other layer", "clipped by the global norm", "a norm of each array",
        *map(slow, ("adam", "decay of weights", "schedule", "two optimizers")),
    ],
)  # fmt: skip
def test_an_optimizer_computes_the_same(name):
    update, args = update_of(OPTIMIZERS[name]), arguments(OPTIMIZERS[name], 6)
    plan = Plan(jax.make_jaxpr(update)(*args))
    found = jax.jit(lambda *leaves: run(plan, leaves))(*jax.tree.leaves(args))
    want = jax.tree.leaves(jax.jit(update)(*args))
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=3e-6, atol=1e-7)
        assert mine.dtype == theirs.dtype


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_number_of_steps_does_not_grow_with_the_number_of_arrays(name):
    def steps(layers):
        closed = jax.make_jaxpr(update_of(OPTIMIZERS[name]))(*arguments(OPTIMIZERS[name], layers))
        return len(Plan(closed).steps)

    few, many = steps(8), steps(16)
    # the norms of all arrays are summed one by one
    assert many - few == (16 if name == "clipped by the global norm" else 0)


@pytest.mark.parametrize(
    ("optimizer", "worth"),
    [
        (optax.adam(0.1), True),
        (optax.lamb(0.1), True),
        (optax.sgd(0.1), False),  # two equations for each array
        (optax.contrib.muon(0.1), False),  # products of matrices, which read rows on their own
        (optax.MultiSteps(optax.adam(0.1), 2), False),  # a branch
    ],
)
def test_it_is_worth_it_if_much_is_joined(optimizer, worth):
    args = arguments(optimizer, 6)
    plan = Plan(jax.make_jaxpr(update_of(optimizer))(*args))
    assert plan.worthwhile(len(jax.tree.leaves(args[1:]))) == worth


OPERATIONS = (
    jnp.sin,
    lambda x: x * 2.0,
    lambda x: x * -0.0,
    lambda x: x * 0.0,
    lambda x: x + x.sum(),
    lambda x: jnp.where(x > 0, x, -x),
    lambda x: x.astype(jnp.int32).astype(jnp.float32),
    lambda x: x.T @ x if x.ndim == 2 else x[::-1],
)


@given(st.lists(st.lists(st.integers(0, len(OPERATIONS) - 1), max_size=3), max_size=12))
def test_any_programs_side_by_side_give_what_each_gives(programs):
    shapes = [(2, 2), (3,)]
    args = [
        jnp.array(np.random.default_rng(i).normal(size=shapes[i % 2]), "float32")
        for i in range(len(programs))
    ]

    def all_of(shared, *args):
        results = []
        for x, program in zip(args, programs, strict=True):
            for number in program:
                x = OPERATIONS[number](x) + shared
            results.append(x)
        return results

    closed = jax.make_jaxpr(all_of)(1.0, *args)
    with jax.disable_jit():
        want = all_of(jnp.float32(1.0), *args)
    found = run(Plan(closed), [jnp.float32(1.0), *args])
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(np.signbit(mine), np.signbit(theirs))


def joined(fn, *args):
    """Number of equations that are joined."""
    return sum(step.joined for step in Plan(jax.make_jaxpr(fn)(*args)).steps)


def same(count, size=4):
    return [jnp.arange(size, dtype="float32") + i for i in range(count)]


def test_few_arrays_and_large_ones_are_left_alone():
    def doubled(*args):
        return [2 * x for x in args]

    assert joined(doubled, *same(FEWEST - 1)) == 0
    assert joined(doubled, *same(FEWEST)) == 1
    most = JOIN_BELOW // 4
    assert joined(doubled, *same(FEWEST, most - 1)) == 1
    assert joined(doubled, *same(FEWEST, most)) == 0


def test_constants_that_are_not_the_same_are_told_apart():
    def signed(*args):
        return [x * (0.0 if i % 2 else -0.0) for i, x in enumerate(args)]

    args = [jnp.ones(4)] * 8
    found = run(Plan(jax.make_jaxpr(signed)(*args)), args)
    assert [bool(jnp.signbit(x).all()) for x in found] == [True, False] * 4


def test_what_is_computed_of_the_same_is_computed_once():
    def decayed(count, *args):
        return [x * jnp.power(0.9, count) for x in args]

    closed = jax.make_jaxpr(decayed)(jnp.int32(3), *same(8))
    names = [step.eqn.primitive.name for step in Plan(closed).steps]
    assert names.count("pow") == names.count("mul") == 1
    assert [step.joined for step in Plan(closed).steps if step.eqn.primitive.name == "mul"] == [
        True
    ]


def test_rows_may_be_read_in_any_order_and_more_than_once():
    def mixed(*args):
        twice = [2 * x for x in args]
        return [a + b for a, b in zip(twice, twice[::-1], strict=True)] + [twice[0]] * 2

    args = same(6)
    plan = Plan(jax.make_jaxpr(mixed)(*args))
    for mine, theirs in zip(run(plan, args), mixed(*args), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert sum(step.joined for step in plan.steps) == 2


@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (3,), (2, 3), (0, 2), (2, 0), (2, 3, 4)], ids=str
)
def test_arrays_fill_a_bundle_and_are_taken_out_of_it(shape):
    arrays = [row.astype("float32") for row in np.random.default_rng(0).normal(size=(5, *shape))]
    bundle = jax.jit(bundled)(arrays)
    np.testing.assert_array_equal(bundle, np.stack(arrays), strict=True)

    starts = [np.int32(row_length(bundle) * at) for at in (3, 0, 4)]
    for row, at in zip(jax.jit(rows_of)(bundle, starts), (3, 0, 4), strict=True):
        np.testing.assert_array_equal(row, arrays[at], strict=True)


def test_rows_take_no_constants():
    """Of a program with hundreds of rows every second operation would be one."""
    bundle, starts = np.ones((4, 2, 3, 5), "float32"), [np.int32(2 * at) for at in range(4)]
    text = jax.jit(rows_of).lower(bundle, starts).as_text()
    assert text.count("stablehlo.dynamic_slice") == 4 and "stablehlo.constant" not in text


def test_an_argument_may_be_a_result_and_a_constant_an_operand():
    table = jnp.arange(4, dtype="float32")

    def moved(*args):
        return [*(x + table for x in args), args[0], 1.0]

    args = same(5)
    found = run(Plan(jax.make_jaxpr(moved)(*args)), args)
    for mine, theirs in zip(found, moved(*args), strict=True):
        np.testing.assert_array_equal(mine, theirs)
