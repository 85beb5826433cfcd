"""Frozen parameters: bit for bit the same, without gradient, sums, state or exchange."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.engine.trainable import select_trainable

SEED = np.random.default_rng(0)
PARAMS = {
    "body": {"w": SEED.normal(size=(8, 64)).astype("f"), "b": np.zeros(64, "f")},
    "head": SEED.normal(size=(64,)).astype("f") / 8,
}
DATA = {"x": SEED.normal(size=(96, 8)).astype("f"), "y": SEED.normal(size=96).astype("f")}


def loss_fn(params, batch, rng):
    hidden = jnp.tanh(batch["x"] @ params["body"]["w"] + params["body"]["b"])
    return ((hidden @ params["head"] - batch["y"]) ** 2).mean()


def train_on(trainable, world, tx, epochs=2):
    train = elche.build_train_step(
        loss_fn, tx, devices=jax.devices()[:world], cadence=elche.FixedTotal(3), trainable=trainable
    )
    state = train.init(PARAMS)
    for window in train.windows(DATA, 8, epochs=epochs, shuffle=False):
        state, _ = train(state, window)
    return train, state


FORMS = {
    "subtrees": {"body": False, "head": True},
    "every leaf": {"body": {"w": False, "b": np.False_}, "head": True},
    "function": lambda path, leaf: "head" in path,
}


@jax.tree_util.register_dataclass
@dataclass
class Callable:
    """Parameters whose class can be called, as a model in Equinox."""

    body: Any
    head: Any

    def __call__(self, path, leaf):
        raise AssertionError("a tree is not called")


def test_a_tree_that_can_be_called_is_a_tree():
    train = elche.build_train_step(
        lambda params, batch, rng: ((batch["x"] @ params.body).sum(-1) * params.head).mean(),
        optax.sgd(0.1), devices=jax.devices()[:2], trainable=Callable(False, True),
    )  # fmt: skip
    params = Callable(np.ones((8, 2), "f"), np.ones((), "f"))
    state, like = train.init(params), params.body
    for window in train.windows({"x": DATA["x"]}, 8):
        state, _ = train(state, window)
    trained = elche.unreplicate(state.params)
    np.testing.assert_array_equal(trained.body, like)
    assert trained.head != 1


@cache
def by_optax():
    """The reference computes all gradients on one device and throws those of the body away."""
    labels = {"body": "frozen", "head": "train"}
    tx = optax.multi_transform({"train": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels)

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch, None), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = PARAMS, tx.init(PARAMS)
    for start in [0, 24, 48, 72] * 2:
        batch = {name: leaf[start : start + 24] for name, leaf in DATA.items()}
        params, opt_state = step(params, opt_state, batch)
    return params


def test_all_forms_choose_the_same():
    halves = [select_trainable(form, PARAMS).split(PARAMS) for form in FORMS.values()]
    for half, leaves in ((0, [PARAMS["head"]]), (1, jax.tree.leaves(PARAMS["body"]))):
        for made in halves:
            chosen = jax.tree.leaves(made[half])
            assert all(a is b for a, b in zip(chosen, leaves, strict=True))


@pytest.mark.parametrize("world", [slow(1), 3])
@pytest.mark.parametrize(
    "form", ["subtrees", slow("every leaf"), slow("function")]
)  # the one above
def test_as_optax_does_it_with_gradients_set_to_zero(form, world):
    _, state = train_on(FORMS[form], world, optax.adamw(1e-2))
    got = jax.device_get(elche.unreplicate(state.params))
    np.testing.assert_allclose(got["head"], by_optax()["head"], rtol=2e-5)
    assert not np.allclose(got["head"], PARAMS["head"], rtol=1e-3)
    for name, leaf in PARAMS["body"].items():
        assert got["body"][name].tobytes() == leaf.tobytes()
    elche.check_replicas(state)


@cache
def two(form):
    """What two devices have trained, for tests that only look at it."""
    return train_on(form and FORMS[form], 2, optax.adam(1e-2))


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_bytes_that_are_saved():
    """8 * 64 + 64 numbers frozen, 64 trained: a tenth of the sums, moments and exchange."""
    report = {}
    for name, form in (("all", None), ("head", "subtrees")):
        train, state = two(form)
        report[name] = train.report()
        sums = next(iter(train._runners._runners.values())).sums.take()
        assert bytes_of(sums.own.grads) == 2 * report[name].exchange_bytes
        moments = bytes_of((state.opt_state[0].mu, state.opt_state[0].nu))
        assert moments == 2 * 2 * report[name].exchange_bytes
    assert (report["all"].exchange_bytes, report["all"].frozen_bytes) == (4 * 640, 0)
    assert (report["head"].exchange_bytes, report["head"].frozen_bytes) == (4 * 64, 4 * 576)
    assert "exchange: 256 bytes per device and window (2.30 kB frozen, left out)" in str(
        report["head"]
    )


def test_what_is_frozen_is_not_in_the_collective():
    """The compiled exchange has operands for the head alone."""

    def summed(form):
        train, _ = two(form)
        runner = next(iter(train._runners._runners.values()))
        text = runner._combine.lower(runner.state, runner.sums.shapes).as_text()
        return sum(int(size) for size in _packed_sizes(text))

    others = 3  # loss, weight, devices that are not finite
    assert summed(None) == 640 + others
    assert summed("subtrees") == 64 + others


def _packed_sizes(text):
    import re

    return re.findall(r'"stablehlo.all_reduce".*?-> tensor<(\d+)xf32>', text, re.DOTALL)


def test_frozen_leaves_may_be_integers():
    def loss(params, batch, rng):
        return ((batch["x"][:, params["columns"]] @ params["w"] - batch["y"]) ** 2).mean()

    params = {"columns": np.array([1, 3]), "w": np.zeros(2, "f")}
    train = elche.build_train_step(
        loss, optax.sgd(0.1), devices=jax.devices()[:2], trainable={"columns": False, "w": True}
    )
    state = train.init(params)
    for window in train.windows(DATA, 8):
        state, _ = train(state, window)
    got = elche.unreplicate(state.params)
    assert got["columns"].tolist() == [1, 3] and np.asarray(got["w"]).any()


def test_what_was_trained_goes_on_with_other_parts_frozen():
    """Progressive training: the state's parameters begin another step's run."""
    _, first = two("subtrees")
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], trainable={"body": True, "head": False}
    )
    before = jax.device_get(elche.unreplicate(first.params))
    state = train.init(before)
    for window in train.windows(DATA, 8):
        state, _ = train(state, window)
    after = jax.device_get(elche.unreplicate(state.params))
    assert after["head"].tobytes() == before["head"].tobytes()
    assert np.abs(after["body"]["w"] - before["body"]["w"]).max() > 1e-4


@pytest.mark.parametrize(
    ("trainable", "error", "message"),
    [
        (False, ValueError, r"trainable must leave at least one leaf of params to train"),
        (
            {"body": True},
            ValueError,
            r"but in trainable 'head' is missing \(params has 'body', 'head'\)\.$",
        ),
        (
            {"bod": False, "head": True},
            ValueError,
            r"trainable must have the structure of params, .* but in params 'bod' is not there "
            r"\(params has 'body', 'head'\)\.$",
        ),
        (
            {"body": {"w": True, "c": True}, "head": True},
            ValueError,
            r"but in params\['body'\] 'c' is not there \(params\['body'\] has 'w', 'b'\)\.$",
        ),
        (
            {"body": [True, False], "head": True},
            ValueError,
            r"but trainable\['body'\] is a list where params\['body'\] is a dict\.$",
        ),
        ({"body": 1, "head": True}, TypeError, r"got 1 for leaf \['body'\]\['b'\]"),
        (lambda path, leaf: leaf, TypeError, r"must be True or False .* for leaf \['body'\]"),
        (lambda p: True, TypeError, r"must take \(path, leaf\), got a function of \(p\)\.$"),
    ],
)
def test_choices_that_do_not_fit(trainable, error, message):
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), trainable=trainable)
    with pytest.raises(error, match="^TrainStep.init: .*" + message):
        train.init(PARAMS)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (([True, True], False), r"trainable\[0\] has 2 entries where params\[0\] has 1"),
        ((True,), r"trainable has 1 entries where params has 2"),
        ((True, {"c": False}), r"in params\[1\] 'c' is not there \(params\[1\] has 'b'\)"),
        (([False], [True]), r"trainable\[1\] is a list where params\[1\] is a dict"),
    ],
)
def test_choices_that_do_not_fit_sequences(trainable, message):
    params = ([np.ones(2, "f")], {"b": np.ones(2, "f")})
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), trainable=trainable)
    with pytest.raises(ValueError, match=rf"^TrainStep.init: .*, but {message}\.$"):
        train.init(params)


def test_a_frozen_leaf_that_is_no_array():
    with pytest.raises(TypeError, match=r"must be an array, but frozen leaf \['n'\] is a f"):
        elche.build_train_step(loss_fn, optax.sgd(0.1), trainable={"n": False, "w": True}).init(
            {"n": 2.0, "w": np.ones(2)}
        )


def test_a_frozen_integer_that_jax_would_cut_off():
    params = {"ids": np.array([2**40 + 7]), "w": np.ones(2, "f")}
    message = r"of params must fit int32, .* int64, got 1099511627783 in leaf \['ids'\]\. Switch"
    with pytest.raises(ValueError, match=message):
        elche.build_train_step(loss_fn, optax.sgd(0.1), trainable={"ids": False, "w": True}).init(
            params
        )


def test_both_halves_make_the_whole():
    selection = select_trainable({"body": {"w": True, "b": False}, "head": True}, PARAMS)
    trained, frozen = selection.split(PARAMS)
    assert len(jax.tree.leaves(trained)) == 2 and len(jax.tree.leaves(frozen)) == 1
    joined = selection.join(trained, frozen)
    assert jax.tree.structure(joined) == jax.tree.structure(PARAMS)
    assert all(
        a is b for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(PARAMS), strict=True)
    )
