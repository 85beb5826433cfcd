"""An update that is wanted only if it is good: what it gives, and what memory it takes."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr
from marks import slow

from elche_jax.engine import tentative
from elche_jax.engine.bundles import FEWEST
from elche_jax.engine.choice import computed_once
from elche_jax.engine.exchange import Packed, Packing
from elche_jax.engine.finite import all_finite
from elche_jax.engine.mapped import Mapped
from elche_jax.engine.tentative import TentativeUpdate, plan_of

ADAM = optax.adam(0.1)
SIZES = {"small": (8, "ab"), "alike": (8, "abcdef"), "large": (1024, "ab")}


def adam(then=lambda updates: updates, below=1 << 10):
    """A step that is taken only if its updates are finite; with equations joined of more arrays.

    Args:
        then: What becomes of the updates.
        below: Bytes below which gradients share a buffer.
    """

    def update(grads, state):
        params, opt_state = state
        updates, opt_state = ADAM.update(grads, opt_state, params)
        updates = then(updates)
        return (optax.apply_updates(params, updates), opt_state), updates

    def step(state, grads, ready=True):
        def judge(updates):
            good = computed_once(all_finite(updates) & ready)
            return good, good

        packing = Packing.of(grads, below)
        packed = Packed(packing, packing.pack(grads), state[1][0].count)
        found = TentativeUpdate(update, packed, state)
        plan = plan_of(update, grads, state) if len(grads) >= FEWEST else None
        if plan is None:
            return found.applied_if(judge)
        return found.joined_if(judge, plan, jnp.asarray(ready))

    return step


def mapped(step):
    """Runs a step with an axis of devices, of which there is one."""

    def stacked(*args):
        (state, said), _ = Mapped(lambda *own: (step(*own), None), jax.devices()[:1])(
            *jax.tree.map(lambda x: jnp.asarray(x)[None], args)
        )
        return jax.tree.map(lambda x: x[0], state), said[0]

    return stacked


def begin(width, names):
    rng = np.random.default_rng(0)
    params = {name: jnp.array(rng.normal(size=(width, width)), "float32") for name in names}
    return (params, ADAM.init(params)), jax.tree.map(lambda x: x + 1, params)


@pytest.mark.parametrize(
    ("size", "below", "run"),  # each gradient in a buffer of its own, or all in one
    [
        ("small", 0, jax.jit),
        ("alike", 0, jax.jit),
        slow("alike", 1 << 10, jax.jit),
        ("alike", 1 << 10, mapped),
        ("large", 0, jax.jit),
    ],
)
@pytest.mark.parametrize("good", [True, False])
def test_it_is_applied_as_a_whole_or_not_at_all(size, below, run, good):
    state, grads = begin(*SIZES[size])
    taken = sum(x.nbytes for x in jax.tree.leaves(state))
    assert (taken >= tentative.IN_PLACE) == (size == "large")
    # the second array only: the first one's update is finite, and must not be applied either
    spoilt = grads if good else grads | {"b": grads["b"].at[3, 3].set(jnp.inf)}
    found, said = run(adam(below=below))(state, spoilt)
    assert bool(said) == good
    updates, opt_state = jax.jit(ADAM.update)(grads, state[1], state[0])
    expected = (optax.apply_updates(state[0], updates), opt_state) if good else state
    for mine, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if good:
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("size", SIZES)
def test_without_its_precondition_nothing_happens(size):
    state, grads = begin(*SIZES[size])
    found, said = jax.jit(adam())(state, grads, ready=False)
    assert not said
    for mine, theirs in zip(*map(jax.tree.leaves, (found, state)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_equations_that_are_alike_are_one_in_the_program():
    def roots(names):
        step = jax.jit(adam()).lower(*begin(8, names), ready=jnp.bool_(True))
        return len(re.findall(r"stablehlo\.sqrt", step.as_text()))

    assert [roots("ab"), roots("abcd"), roots("abcdefgh")] == [2, 1, 1]


def test_there_is_no_plan_of_few_arrays_of_large_ones_and_of_side_effects():
    def update(grads, state):
        updates, opt_state = ADAM.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), updates

    def told(grads, state):
        jax.debug.callback(lambda x: None, grads["a"][0, 0])
        return update(grads, state)

    def planned(update, width, names):
        state, grads = begin(width, names)
        return plan_of(update, grads, state) is not None

    assert planned(update, 8, "abcd")
    assert not planned(update, 8, "a")
    assert not planned(update, 1024, "abcd")
    assert not planned(told, 8, "abcd")


@pytest.mark.parametrize("run", [jax.jit, mapped])
def test_results_keep_their_places(run):
    """Arrays of two shapes; results in another order than what they are made of, some of them
    arguments or constants; other dtypes."""

    def update(grads, state):
        def moved(x, g, n):
            return x - 0.1 * jnp.tanh(jnp.sin(g) * jnp.exp(-x)) / (1.0 + n) + jnp.where(x > 0, g, x)

        old, count, extra = state["x"], state["count"], state["extra"]
        new = [moved(x, g, count) for x, g in zip(old, grads, strict=True)]
        new = [*new[:5][::-1], *new[5:9], old[9]]
        extra = [extra[1] + 1, extra[0] + 1, jnp.float32(2), ~extra[3], extra[4]]
        return {"x": new, "count": count + 1, "extra": extra}, [new[2], new[7], count]

    rng = np.random.default_rng(0)
    shapes = [(3,)] * 5 + [(2, 2)] * 5
    old, grads = ([jnp.array(rng.normal(size=s), "float32") for s in shapes] for _ in range(2))
    extra = [
        jnp.int16(3),
        jnp.int16(4),
        jnp.float32(0),
        jnp.array([True, False]),
        jnp.zeros((0, 2)),
    ]
    state = {"x": old, "count": jnp.int32(3), "extra": extra}
    plan = plan_of(update, grads, state)
    packing = Packing.of(grads, 1 << 10)

    def step(state, grads, wanted):
        packed = Packed(packing, packing.pack(grads), state["count"])
        found = TentativeUpdate(update, packed, state)
        return found.joined_if(
            lambda seen: (
                wanted,
                jnp.stack([x.sum() for x in seen]).sum() if seen else jnp.float32(0),
            ),
            plan,
            wanted,
        )

    want, seen = jax.jit(update)(grads, state)
    found, told = run(step)(state, grads, True)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for mine, theirs in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        assert mine.dtype == theirs.dtype
    np.testing.assert_allclose(told, sum(x.sum() for x in seen), rtol=1e-5)
    kept, _ = run(step)(state, grads, False)
    for mine, theirs in zip(*map(jax.tree.leaves, (kept, state)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def lowered(step, platform="cpu", size="large"):
    traced = jax.jit(step, donate_argnums=0).trace(*begin(*SIZES[size]))
    return traced.lower(lowering_platforms=(platform,))


def selections(step, platform="cpu"):
    """Number of arrays that are selected."""
    return len(re.findall("stablehlo.select .*1024x1024xf32", lowered(step, platform).as_text()))


def test_a_large_state_is_updated_in_place(monkeypatch):
    (params, _), _ = begin(*SIZES["large"])
    size = sum(x.nbytes for x in jax.tree.leaves(params))

    def taken():
        return lowered(adam()).compile().memory_analysis().temp_size_in_bytes / size

    assert taken() < 1.1  # the updates
    monkeypatch.setattr(tentative, "IN_PLACE", 1 << 40)
    assert taken() > 3  # a new state


@pytest.mark.parametrize(("platform", "number"), [("cpu", 0), ("cuda", 6), ("tpu", 6)])
def test_an_accelerator_selects(platform, number):
    assert selections(adam(), platform) == number


def test_what_is_dear_is_computed_once():
    def dear(updates):
        return jax.tree.map(lambda u: u @ jnp.eye(*u.shape), updates)

    assert selections(adam(then=dear)) == 6  # of what was computed, not computed again


@pytest.mark.parametrize("size", SIZES)
def test_it_is_traced_once(size):
    traced = []

    def told(updates):
        traced.append(1)
        return updates

    jax.jit(adam(then=told)).lower(*begin(*SIZES[size]))
    assert len(traced) == 1


@pytest.mark.parametrize("size", SIZES)
def test_side_effects_happen_once(size):
    seen = []

    def told(updates):
        jax.debug.callback(seen.append, updates["a"][0, 0])
        return updates

    jax.block_until_ready(jax.jit(adam(then=told))(*begin(*SIZES[size])))
    jax.effects_barrier()
    assert len(seen) == 1


@pytest.mark.parametrize("size", SIZES)
def test_nothing_that_was_traced_is_kept(size):
    def kept():
        gc.collect()
        return sum(isinstance(one, ClosedJaxpr) for one in gc.get_objects())

    lowered(adam(), size=size)
    before = kept()
    lowered(adam(), size=size)
    assert kept() <= before
