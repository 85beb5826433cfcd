"""Flax's train state: there and back to the bit, and what is refused."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, serialization
from flax.training import train_state
from flax_nets import LinenCNN, LinenMLP, assert_equal, cross_entropy, data
from marks import slow

import elche_jax as elche
from elche_jax.adapters.convert import from_flax, to_flax
from elche_jax.adapters.linen import from_linen

X = data()["x"]
TX = optax.adamw(1e-2)


class WithStats(train_state.TrainState):
    batch_stats: Any = None
    note: str = ""


class Keyed(train_state.TrainState):
    key: Any
    batch_stats: Any = None


@cache
def begun(module):
    """A model of a module, its parameters and its model state."""
    model = from_linen(module, cross_entropy)
    return model, *jax.device_get(model.init(0, {"x": X[:1]}))


def build(tx=TX, module=None, world=2, **options):
    """A training step and its first state."""
    model, params, model_state = begun(LinenCNN() if module is None else module)
    train = elche.build_train_step(model, tx, devices=jax.devices()[:world], **options)
    return train, train.init(params, model_state=model_state)


def run(train, state, windows=3):
    for window in train.windows(data(8 * windows), batch_size=4):
        state, _ = train(state, window)
    return state


@pytest.mark.parametrize("where", ["devices", slow("one device"), slow("host")])
def test_there_and_back(where):
    train, state = build()
    state = run(train, state)
    given = state if where == "devices" else elche.unreplicate(state)
    given = jax.device_get(given) if where == "host" else given
    apply_fn = LinenCNN().apply
    there = to_flax(given, apply_fn, TX, kind=WithStats, note="kept")
    want = jax.device_get(elche.unreplicate(state))
    assert (there.step, there.note) == (3, "kept")
    assert there.tx is TX and there.apply_fn is apply_fn
    assert_equal(jax.device_get(there.params), want.params)
    assert_equal(jax.device_get(there.opt_state), want.opt_state)
    # through a file, as flax writes it
    restored = serialization.from_bytes(there, serialization.to_bytes(there))
    for between in (there, restored):
        back = from_flax(train, between.replace(note=None), rng=5)
        elche.check_replicas(back)
        assert back.step.tolist() == [3, 3]
        got = jax.device_get(elche.unreplicate(back))
        for name in ("params", "opt_state", "model_state"):
            assert_equal(getattr(got, name), getattr(want, name))
        assert got.microbatches == 3 and got.key.tolist() == [0, 5]
    jax.block_until_ready(run(train, back))
    # nothing of `there` was given up
    jax.block_until_ready(run(train, from_flax(train, there.replace(note=None))))


def test_a_flax_loop_goes_on_here_as_it_would_have():
    """The state of a plain Flax loop, then the same batches on one device here."""
    module, tx = LinenMLP(), optax.adam(1e-2)
    variables = jax.jit(module.init, static_argnums=2)(jax.random.key(0), X[:1], True)
    state = train_state.TrainState.create(apply_fn=module.apply, params=variables["params"], tx=tx)

    @jax.jit
    def step(state, batch):
        def loss_fn(params):
            outputs = state.apply_fn({"params": params}, batch["x"], deterministic=True)
            return cross_entropy(outputs, batch).mean()

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    batches = [{k: v[i : i + 8] for k, v in data().items()} for i in range(0, 64, 8)]
    for batch in batches[:4]:
        state = step(state, batch)
    model = from_linen(module, cross_entropy, train_kwargs={"deterministic": True})
    train = elche.build_train_step(model, tx, devices=jax.devices()[:1])
    ours = from_flax(train, state)
    for window in train.windows(iter(batches[4:])):
        ours, _ = train(ours, window)
    for batch in batches[4:]:
        state = step(state, batch)
    end = to_flax(ours, module.apply, tx)
    assert (end.step, state.step) == (8, 8)
    assert_equal(jax.device_get(end.params), jax.device_get(state.params), rtol=1e-4)
    assert_equal(jax.device_get(step(end, batches[0]).opt_state[0].count), np.int32(9))


def mlp_state(tx=TX, **changes):
    _, params, _ = begun(LinenMLP())
    made = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    return made.replace(**changes)


def keyed_state():
    made = mlp_state()
    return Keyed.create(apply_fn=None, params=made.params, tx=TX, key=jnp.zeros(2))


def test_a_further_field_may_be_model_state():
    train = elche.build_train_step(
        lambda params, model_state, batch, rng: (params["w"], model_state), TX,
        devices=jax.devices()[:1],
    )  # fmt: skip
    made = keyed_state().replace(params={"w": jnp.ones(())})
    made = made.replace(opt_state=TX.init(made.params))
    state = from_flax(train, made, model_state={"key": made.key})
    assert state.model_state["key"].shape == (1, 2)
    assert from_flax(train, made.replace(key=None), model_state={}).model_state == {}


def wider(tree):
    return jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), tree)


FROM = {
    "no training step": (
        lambda train: from_flax(3, mlp_state()),
        TypeError, r"from_flax: train must be of type TrainStep, got 3 \(int\)\.",
    ),
    "no train state": (
        lambda train: from_flax(train, {"params": 1}),
        TypeError, r"from_flax: flax_state must be a flax.training.train_state.TrainState, got a "
        r"dict\.",
    ),
    "a state of ours": (
        lambda train: from_flax(train, train.init({"w": jnp.ones(2)})),
        TypeError, r"flax_state must be .* got a TrainState\. For a state of elche_jax, "
        r"use replicate\(state, train.devices\)\.",
    ),
    "replicated": (
        lambda train: from_flax(train, jax_utils.replicate(mlp_state(), jax.devices()[:2])),
        ValueError, r"from_flax: flax_state must be one copy, got leaf \['opt_state'\].* with "
        r"the copies of 2 devices\.",
    ),
    "of sgd": (
        lambda train: from_flax(train, mlp_state(tx=optax.sgd(0.1))),
        ValueError, r"from_flax: flax_state must be of the training step's optimizer and of its "
        r"own parameters, got an opt_state with none for leaf \[0\]\.count instead of int32\[\]\.",
    ),
    "of another model": (
        lambda train: from_flax(train, mlp_state(opt_state=wider(mlp_state().opt_state))),
        ValueError, r"got an opt_state with int32\[2\] for leaf \[0\]\.count instead of int32\[\]",
    ),
    "of an optimizer with more": (
        lambda train: from_flax(train, mlp_state(tx=optax.chain(TX, optax.trace(0.9)))),
        ValueError, r"got an opt_state with none for leaf \[0\]\.count instead of int32\[\]",
    ),
    "of another structure": (
        lambda train: from_flax(train, mlp_state(opt_state=(*mlp_state().opt_state, ()))),
        ValueError, r"got an opt_state with structure PyTreeDef.* instead of PyTreeDef",
    ),
    "a further field": (
        lambda train: from_flax(train, keyed_state()),
        ValueError, r"^from_flax: flax_state must be None in fields that a TrainState of elche_jax "
        r"lacks, got a value in 'key'\. Pass it in model_state=\{'key': \.\.\.\}, or keep it "
        r"yourself and pass flax_state\.replace\(key=None\)\.$",
    ),
    "statistics that model_state leaves out": (
        lambda train: from_flax(
            train, keyed_state().replace(batch_stats={"m": X}), model_state={"key": X}
        ),
        ValueError, r"got a value in 'batch_stats'\. Pass it in model_state=\{'batch_stats': ",
    ),
    "a bad seed": (
        lambda train: from_flax(train, mlp_state(), rng=-1),
        ValueError, r"from_flax: rng must be at least 0, got -1\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FROM)
def test_what_from_flax_refuses(case):
    train, _ = build(module=LinenMLP())
    call, kind, message = FROM[case]
    with pytest.raises(kind, match=message):
        call(train)


TO = {
    "no state": (
        lambda state: to_flax(mlp_state(), None, TX),
        TypeError, r"to_flax: state must be a TrainState of elche_jax, got a TrainState\.",
    ),
    "no kind": (
        lambda state: to_flax(state, None, TX, kind=dict),
        TypeError, r"to_flax: kind must be a subclass of flax.training.train_state.TrainState, "
        r"got <class 'dict'> \(type\)\.",
    ),
    "another optimizer": (
        lambda state: to_flax(state, None, optax.sgd(0.1, momentum=0.9), kind=WithStats),
        ValueError, r"to_flax: tx must be the optimizer that the state was made with, got another: "
        r"its state has none for leaf \[0\]\.count instead of int32\[\]\.",
    ),
    "an unknown field": (
        lambda state: to_flax(state, None, TX, kind=WithStats, rate=0.1),
        TypeError, r"^to_flax: fields must be fields of WithStats that the state does not fill, "
        r"got 'rate'\.$",
    ),
    "a field of the state": (
        lambda state: to_flax(state, None, TX, kind=WithStats, batch_stats={}),
        TypeError, r"to_flax: fields must be fields of WithStats .* got 'batch_stats'\.",
    ),
    "no value for a field": (
        lambda state: to_flax(state, None, TX, kind=Keyed),
        TypeError, r"^to_flax: fields must hold every field of Keyed without a default, got none "
        r"for 'key'\. Pass key=\.$",
    ),
    "no place for the statistics": (
        lambda state: to_flax(state, None, TX),
        ValueError, r"to_flax: kind must have a field for every collection of model_state, got "
        r"TrainState for 'batch_stats'\. Pass a subclass with that field, or "
        r"state\.replace\(model_state=None\)\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TO)
def test_what_to_flax_refuses(case):
    _, state = build()
    call, kind, message = TO[case]
    with pytest.raises(kind, match=message):
        call(state)


def averaged(rule, world=2):
    """A training step by local steps, and its state after some windows."""

    def loss_fn(params, batch, rng):
        return ((batch["x"] @ params["w"] - 1) ** 2).mean() + params["v"] ** 2

    devices = jax.devices()[:world]
    train = elche.build_train_step(loss_fn, optax.sgd(0.05), averaging=rule, devices=devices)
    state = train.init({"w": np.zeros(4, "float32"), "v": np.ones((), "float32")})
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    for window in train.windows({"x": x}, batch_size=4):
        state, _ = train(state, window)
    return train, state


RULES = {
    "late": elche.ParameterAveraging(delay=1, optimizer_state="keep"),
    "in fragments": elche.DiLoCo(optax.sgd(0.7), inner_steps=4, fragments=2),
}


@pytest.mark.parametrize("rule", ["late", slow("in fragments")])
def test_parameters_that_may_differ_are_averaged_before(rule):
    train, state = averaged(RULES[rule])
    text = (
        r"^to_flax: state must have equal parameters on all devices, got one whose devices may "
        r"differ\. Convert elche_jax\.unreplicate\(state\)\.replace\(params=train\.average\(state"
        r"\), averaging=None\)\.$"
    )
    for given in (state, elche.unreplicate(state)):
        with pytest.raises(ValueError, match=text):
            to_flax(given, None, optax.sgd(0.05))
    average = train.average(state)
    one = elche.unreplicate(state).replace(params=average, averaging=None)
    assert_equal(to_flax(one, None, optax.sgd(0.05)).params, average)


# where the rule keeps copies equal, and on one device, a state is converted as it is
EQUAL = {
    "at once": (elche.DiLoCo(optax.sgd(0.7), inner_steps=4), 2),
    "gradients, late": (elche.MeanGradient(delay=1), 2),
    "one device": (elche.ParameterAveraging(delay=1, optimizer_state="keep"), 1),
}


@pytest.mark.parametrize("case", ["at once", slow("gradients, late"), slow("one device")])
def test_parameters_that_are_equal_are_converted(case):
    train, state = averaged(*EQUAL[case])
    assert_equal(to_flax(state, None, optax.sgd(0.05)).params, train.average(state))


def test_a_state_with_frozen_parameters_is_refused():
    module = LinenMLP()
    _, params, _ = begun(module)
    chosen = jax.tree.map(lambda _: False, params)
    chosen["Dense_0"] = jax.tree.map(lambda _: True, params["Dense_0"])
    _, state = build(module=module, trainable=chosen)
    text = r"^to_flax: tx must be .* A state made with trainable= cannot be converted\.$"
    with pytest.raises(ValueError, match=text):
        to_flax(state, None, TX)
