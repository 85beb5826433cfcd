"""Models with many arrays of one shape, whose updates are computed together."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.engine.bundles import Plan

LAYERS, WIDTH, BATCH = 6, 3, 4
OPTIMIZERS = {
    "adamw": optax.adamw(0.05, weight_decay=0.1, mask=lambda p: jax.tree.map(np.ndim, p)),
    "lamb": optax.lamb(0.05),
    "sgd": optax.sgd(0.1),
}


def loss_fn(params, batch, rng):
    x = batch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def initial():
    rng = np.random.default_rng(0)
    layers = [{"w": rng.normal(size=(WIDTH, WIDTH)), "b": np.zeros(WIDTH)} for _ in range(LAYERS)]
    tree = {"layers": layers, "head": rng.normal(size=WIDTH)}
    return jax.tree.map(lambda x: x.astype("float32"), tree)


def data(microbatches, bad=None):
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(microbatches * BATCH, *s)).astype("float32") for s in [(WIDTH,), ()])
    if bad is not None:
        x[bad * BATCH, 0] = np.inf
    return {"x": x, "y": y}


def build(name, counts):
    return elche.build_train_step(
        loss_fn, OPTIMIZERS[name], devices=jax.devices()[: len(counts)],
        cadence=elche.Replay([counts] * 4), nonfinite="skip",
    )  # fmt: skip


shared = cache(build)
"""The same, once for all tests with these options: each of them begins with `init`."""


def trained(train, examples):
    state = train.init(initial())
    with train.windows(examples, BATCH, shuffle=False) as windows:
        for window in windows:
            state, _ = train(state, window)
    elche.check_replicas(state)
    return jax.tree.map(lambda x: np.asarray(x)[0], (state.params, state.opt_state))


def expected(optimizer, examples, total):
    """One device, one step per window, every array on its own, as by hand."""
    params = initial()
    opt_state = optimizer.init(params)
    for at in range(0, len(examples["y"]), total * BATCH):
        window = jax.tree.map(lambda x, at=at: x[at : at + total * BATCH], examples)
        grads = jax.grad(loss_fn)(params, window, None)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, opt_state


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("adamw", (3,)), slow("adamw", (1,)), slow("adamw", (3, 0)), ("adamw", (1, 0, 2, 1)),
        ("lamb", (2, 1)),
    ],
)  # fmt: skip
def test_they_are_trained_as_on_one_device(name, counts):
    examples = data(4 * sum(counts))
    found = trained(shared(name, counts), examples)
    want = expected(OPTIMIZERS[name], examples, sum(counts))
    for mine, theirs in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("counts", [(1,), slow((3,)), (2, 1)])
def test_a_window_that_is_not_finite_changes_none_of_them(counts):
    train, total = shared("adamw", counts), sum(counts)
    spoilt = data(3 * total, bad=total)
    kept = np.ones(len(spoilt["y"]), bool)
    kept[total * BATCH : 2 * total * BATCH] = False
    found = trained(train, spoilt)
    assert train.skipped == 1
    want = trained(train, jax.tree.map(lambda x: x[kept], spoilt))
    for mine, theirs in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "counts", "joined"),
    [slow("adamw", (1,), True), ("lamb", (1, 1), True), ("sgd", (1,), False)],
)
def test_they_are_updated_together_if_it_is_worth_it(name, counts, joined, monkeypatch):
    ran, run = [], Plan.run

    def recorded(self, *args):
        ran.append(self)
        return run(self, *args)

    monkeypatch.setattr(Plan, "run", recorded)
    traced, update = [], OPTIMIZERS[name].update

    def told(*args, **more):
        traced.append(1)
        return update(*args, **more)

    monkeypatch.setitem(OPTIMIZERS, name, OPTIMIZERS[name]._replace(update=told))
    trained(build(name, counts), data(sum(counts)))
    assert bool(ran) == joined
    assert len(traced) == 1  # by `init`
