"""An update that is applied only if it is good: what it gives, and what memory it takes."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr

from elche_jax.engine import choice
from elche_jax.engine.choice import TentativeUpdate, computed_once
from elche_jax.engine.finite import all_finite

ADAM = optax.adam(0.1)
SIZES = {"small": 8, "large": 1024}


def adam(then=lambda updates: updates):
    """A step that is taken only if its updates are finite, and the state before the first."""

    def step(state, grads):
        def update(state):
            params, opt_state = state
            updates, opt_state = ADAM.update(grads, opt_state, params)
            updates = then(updates)
            return (optax.apply_updates(params, updates), opt_state), updates

        update = TentativeUpdate(update, state)
        return update.applied_if(computed_once(all_finite(update.seen)))

    return step


def begin(width):
    rng = np.random.default_rng(0)
    params = {name: jnp.array(rng.normal(size=(width, width)), "float32") for name in "ab"}
    return (params, ADAM.init(params)), jax.tree.map(lambda x: x + 1, params)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("good", [True, False])
def test_it_is_applied_as_a_whole_or_not_at_all(size, good):
    state, grads = begin(SIZES[size])
    assert (sum(x.nbytes for x in jax.tree.leaves(state)) >= choice.IN_PLACE) == (size == "large")
    # the second array only: the first one's update is finite, and must not be applied either
    spoilt = grads if good else grads | {"b": grads["b"].at[3, 3].set(jnp.inf)}
    found = jax.jit(adam())(state, spoilt)
    updates, opt_state = jax.jit(ADAM.update)(grads, state[1], state[0])
    expected = (optax.apply_updates(state[0], updates), opt_state) if good else state
    for mine, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if good:
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(mine, theirs)


def lowered(step, platform="cpu"):
    traced = jax.jit(step, donate_argnums=0).trace(*begin(SIZES["large"]))
    return traced.lower(lowering_platforms=(platform,))


def selections(step, platform="cpu"):
    """Number of arrays that are selected."""
    return len(re.findall("stablehlo.select .*1024x1024xf32", lowered(step, platform).as_text()))


def test_a_large_state_is_updated_in_place(monkeypatch):
    (params, _), _ = begin(SIZES["large"])
    size = sum(x.nbytes for x in jax.tree.leaves(params))

    def taken():
        return lowered(adam()).compile().memory_analysis().temp_size_in_bytes / size

    assert taken() < 1.1  # the updates
    monkeypatch.setattr(choice, "IN_PLACE", 1 << 40)
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

    jax.jit(adam(then=told)).lower(*begin(SIZES[size]))
    assert len(traced) == 1


@pytest.mark.parametrize("size", SIZES)
def test_side_effects_happen_once(size):
    seen = []

    def told(updates):
        jax.debug.callback(seen.append, updates["a"][0, 0])
        return updates

    jax.block_until_ready(jax.jit(adam(then=told))(*begin(SIZES[size])))
    jax.effects_barrier()
    assert len(seen) == 1


def test_nothing_that_was_traced_is_kept():
    def kept():
        gc.collect()
        return sum(isinstance(one, ClosedJaxpr) for one in gc.get_objects())

    lowered(adam())
    before = kept()
    lowered(adam())
    assert kept() <= before
