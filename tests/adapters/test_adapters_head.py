"""Heads: objects that hold a module and its parameters, and objects with methods of their own."""

from dataclasses import InitVar, dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn, nnx
from flax.core import freeze
from flax_nets import (
    LinenCNN,
    LinenMLP,
    NnxCNN,
    assert_equal,
    cross_entropy,
    data,
    stepped,
    trained,
)
from marks import slow

from elche_jax.adapters.head import from_head
from elche_jax.adapters.linen import from_linen
from elche_jax.adapters.nnx import from_nnx
from elche_jax.engine.replicas import replicate

X = data()["x"]


@dataclass(frozen=True)
class Classifier:
    """A task head, as libraries have them."""

    module: Any
    params: Any
    labels: tuple[str, ...] = ("a", "b", "c")
    model_state: Any = field(default=None, kw_only=True)

    def loss(self, outputs, batch):
        return cross_entropy(outputs, batch)


class Plain:
    """A head without a loss, whose attributes are set."""

    def __init__(self, module, params):
        self.module, self.params = module, params


@dataclass
class Initialized:
    """A head that makes its own parameters."""

    module: Any
    seed: InitVar[int] = 0
    params: Any = field(init=False)

    def __post_init__(self, seed):
        self.params = self.module.init(jax.random.key(seed), X[:1], True)


class ReadOnly:
    module = LinenMLP()

    @property
    def params(self):
        return {}


def variables(module=None):
    """Those of a module; with a constant that training must not touch."""
    params, model_state = begun(module or LinenCNN())
    return {"params": params, **(model_state or {})}


@cache
def begun(module):
    return jax.device_get(from_linen(module, cross_entropy).init(3, {"x": X[:1]}))


@pytest.mark.parametrize("form", [slow("whole"), "apart"])
def test_a_head_of_a_linen_module_with_state(form):
    whole = variables()
    state = {"batch_stats": whole["batch_stats"]}
    if form == "whole":
        head = Classifier(LinenCNN(), whole)
    else:
        head = Classifier(LinenCNN(), whole["params"], model_state=state)
    model = from_head(head)
    assert_equal(model.params, whole["params"])
    assert_equal(model.model_state, state)
    end = stepped(model, model.params, model.model_state)
    want = stepped(from_linen(LinenCNN(), cross_entropy), whole["params"], state)
    assert_equal(end, want)

    back = model.write_back(head, end.params, end.model_state)
    assert isinstance(back, Classifier) and back.labels == head.labels
    if form == "whole":
        assert_equal(back.params, {"params": end.params, **end.model_state})
        assert back.model_state is None
    else:
        assert_equal((back.params, back.model_state), (end.params, end.model_state))
    assert_equal(from_head(back).params, jax.device_get(end.params))
    assert_equal(head.params, whole if form == "whole" else whole["params"])


def test_copies_of_several_devices_are_not_written_back():
    head = Plain(LinenMLP(), variables(LinenMLP())["params"])
    model = from_head(head, cross_entropy)
    copies = replicate(model.params, jax.devices()[:2])
    with pytest.raises(ValueError, match=r"^Model\.write_back: params must be one copy, got leaf"):
        model.write_back(head, copies)


@pytest.mark.parametrize("frozen", [slow(False), True])
def test_a_head_with_whole_variables_and_state_apart(frozen):
    """A collection in each place; each is written back to where it was."""
    made = variables()
    whole = {"params": made["params"], "constants": {"c": np.float32(3)}}
    state = {"batch_stats": made["batch_stats"]}
    if frozen:
        whole, state = freeze(whole), freeze(state)
    head = Classifier(LinenCNN(), whole, model_state=state)
    model = from_head(head)
    assert sorted(model.model_state) == ["batch_stats", "constants"]
    assert_equal(model.params, made["params"])
    end = stepped(model, model.params, model.model_state)
    assert np.abs(end.model_state["batch_stats"]["BatchNorm_0"]["mean"]).max() > 0
    back = model.write_back(head, end.params, end.model_state)
    assert_equal(back.params, {"params": end.params, "constants": {"c": np.float32(3)}})
    assert_equal(back.model_state, {"batch_stats": end.model_state["batch_stats"]})


@pytest.mark.parametrize("form", [slow("whole"), "mixed"])
def test_state_that_is_not_given_stays_in_the_head(form):
    whole = variables()
    stats = {"batch_stats": whole["batch_stats"]}
    if form == "whole":
        head = Classifier(LinenCNN(), whole)
    else:
        head = Classifier(LinenCNN(), {"params": whole["params"]}, model_state=stats)
    model = from_head(head)
    params = jax.tree.map(lambda x: x + 1, model.params)
    back = from_head(model.write_back(head, params))
    assert_equal(back.params, params)
    assert_equal(back.model_state, stats)


def test_a_head_without_state_and_with_a_loss_given():
    params = variables(LinenMLP())["params"]
    head = Plain(LinenMLP(), params)
    model = from_head(head, lambda outputs, batch: cross_entropy(outputs, batch).mean())
    assert model.model_state is None
    end = stepped(model, model.params)
    back = model.write_back(head, end.params)
    assert back is not head and back.module is head.module
    assert_equal(back.params, end.params)
    assert_equal(head.params, params)
    # arrays of its own: training may take the buffers
    jax.tree.map(lambda x: x.delete(), model.params)
    want = LinenMLP().apply({"params": head.params}, X, True)
    np.testing.assert_allclose(model.apply_fn(model.params, {"x": X}), want, rtol=1e-6)


def test_a_head_that_makes_its_own_parameters_gets_the_trained_ones():
    head = Initialized(LinenMLP(), seed=1)
    model = from_head(head, cross_entropy)
    params = jax.tree.map(lambda x: x + 1, model.params)
    back = model.write_back(head, params)
    assert isinstance(back, Initialized) and back.module is head.module
    assert_equal(back.params, {"params": params})
    assert_equal(head.params, LinenMLP().init(jax.random.key(1), X[:1], True))


def test_options_of_the_module_are_passed_on():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x, scale):
            return nn.Dense(2)(x) * scale

    x = np.ones((2, 3), "float32")
    params = Scaled().init(jax.random.key(0), x, 1.0)
    model = from_head(
        Plain(Scaled(), params), lambda outputs, batch: outputs.sum(), inputs="z",
        rngs="noise", mutable=False, train_kwargs={"scale": 2.0}, eval_kwargs={"scale": 3.0},
    )  # fmt: skip
    plain = nn.Dense(2).apply({"params": params["params"]["Dense_0"]}, x)
    batch = {"x": 0, "z": x}
    np.testing.assert_allclose(model.apply_fn(model.params, batch), 3 * plain, rtol=1e-6)
    loss = model(model.params, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, 2 * plain.sum(), rtol=1e-6)


@pytest.mark.parametrize("form", [slow("dict"), "state"])
def test_a_head_of_an_nnx_module(form):
    module = NnxCNN(nnx.Rngs(0))
    params = nnx.state(module, nnx.Param)
    if form == "dict":
        params = nnx.to_pure_dict(params)
    head = Classifier(module, params)
    model = from_head(head)
    same = from_nnx(module, cross_entropy)
    assert_equal(model.params, same.params)
    assert_equal(model.model_state, same.model_state)
    end = stepped(model, model.params, model.model_state)
    want = stepped(same, same.params, same.model_state)
    assert_equal(end, want)

    back = model.write_back(head, end.params, end.model_state)
    assert isinstance(back.params, type(params))
    assert_equal(jax.device_get(from_head(back).params), end.params)
    assert_equal(back.model_state, end.model_state)
    same.update(end.params, end.model_state)
    np.testing.assert_array_equal(back.module(X), same.merge(end.params, end.model_state)(X))


class Scale:
    """The protocol, without Flax: a running mean for state, noise in training."""

    def __init__(self):
        self.params = {"w": np.float32(0)}
        self.model_state = {"seen": np.float32(0)}

    def variables(self):
        return self.params, self.model_state

    def apply(self, params, model_state, batch, rng, train):
        outputs = batch["x"].mean(axis=(1, 2, 3)) * params["w"]
        if train:
            outputs += jax.random.normal(rng, outputs.shape)
            model_state = {"seen": 0.5 * model_state["seen"] + 0.5 * batch["y"].mean()}
        else:
            assert rng is None
        return outputs, model_state


def scale_loss(outputs, batch):
    return (outputs - batch["y"]) ** 2


def scale_by_hand(params, model_state, batch, rng):
    outputs = batch["x"].mean(axis=(1, 2, 3)) * params["w"] + jax.random.normal(rng, (4,))
    seen = 0.5 * model_state["seen"] + 0.5 * batch["y"].mean()
    return (outputs - batch["y"]) ** 2, {"seen": seen}


def test_a_head_with_methods_of_its_own():
    head = Scale()
    model = from_head(head, scale_loss)
    got, metrics = trained(model, model.params, model.model_state, world=1)
    want, wanted = trained(scale_by_hand, head.params, head.model_state, world=1)
    assert_equal(got, want)
    assert metrics == wanted
    outputs = model.apply_fn(got.params, got.model_state, data())
    np.testing.assert_allclose(outputs, X.mean(axis=(1, 2, 3)) * got.params["w"], rtol=1e-5)
    back = model.write_back(head, got.params, got.model_state)
    assert (back.params, back.model_state) == (got.params, got.model_state)
    assert head.params == {"w": 0}


ERRORS = {
    "no head": (
        lambda: from_head(3, cross_entropy),
        TypeError, r"from_head: obj must have .module, a flax module, and .params, or the methods "
        r"variables and apply, got int\.",
    ),
    "a module": (
        lambda: from_head(LinenMLP(), cross_entropy),
        TypeError, r"obj must have .* got LinenMLP\. For a module itself, use from_linen or "
        r"from_nnx\.",
    ),
    "no params": (
        lambda: from_head(SimpleNamespace(module=LinenMLP()), cross_entropy),
        TypeError, r"obj must have .module, a flax module, and .params, .* got SimpleNamespace\.",
    ),
    "no loss": (
        lambda: from_head(Plain(LinenMLP(), {})),
        TypeError, r"from_head: loss must be given, as obj has no method loss\(outputs, batch\), "
        "got None",
    ),
    "options of linen": (
        lambda: from_head(Plain(NnxCNN(nnx.Rngs(0)), {}), cross_entropy, mutable=False),
        TypeError, r"from_head: mutable must be left out for a head without a Linen module, got "
        r"False \(bool\)\.",
    ),
    "options of nnx": (
        lambda: from_head(Plain(LinenMLP(), {}), cross_entropy, param_type=nnx.Param),
        TypeError, r"param_type must be left out for a head without an NNX module, got ",
    ),
    "options of a module": (
        lambda: from_head(Scale(), scale_loss, inputs="x"),
        TypeError, r"inputs must be left out for a head without a .module, got 'x' \(str\)\.",
    ),
    "variables": (
        lambda: from_head(SimpleNamespace(variables=dict, apply=print), cross_entropy).params,
        TypeError, r"obj.variables must return \(params, model_state\), got a dict\.",
    ),
    "apply": (
        lambda: from_head(SimpleNamespace(variables=dict, apply=lambda *a: 1), cross_entropy)(
            {}, {}, None
        ),
        TypeError, r"obj.apply must return \(outputs, model_state\), got a int\.",
    ),
    "nowhere to write to": (
        lambda: from_head(SimpleNamespace(variables=dict, apply=print), cross_entropy).write_back(
            3, {}
        ),
        TypeError, r"Model.write_back: head must have an attribute params to write to, got int\.",
    ),
    "params that are read only": (
        lambda: from_head(ReadOnly(), cross_entropy).write_back(ReadOnly(), {}),
        TypeError, r"^Model.write_back: head must have an attribute params that can be set, got "
        r"ReadOnly: .*no setter\.$",
    ),
    "state in two places": (
        lambda: from_head(
            Classifier(LinenCNN(), {"params": {}, "a": {}, "b": {}}, model_state={"b": {}})
        ).model_state,
        ValueError, r"^from_head: obj.model_state must hold no collection that obj.params has too, "
        r"got 'b'\.$",
    ),
    "state that is no dict": (
        lambda: from_head(Classifier(LinenCNN(), {"params": {}}, model_state=[1])).params,
        TypeError, r"^from_head: obj.model_state must be a dict of collections, got a list\.$",
    ),
    "parameters as state": (
        lambda: from_head(
            Classifier(LinenCNN(), {"params": {}}, model_state={"a": {}, "params": {}})
        ).model_state,
        ValueError, r"^from_head: obj.model_state must hold no collection 'params', got 'a', "
        r"'params'\. Leave it out: parameters belong in params only\.$",
    ),
    "parameters as state, apart": (
        lambda: from_head(Classifier(LinenCNN(), {}, model_state={"params": {}})).params,
        ValueError, r"^from_head: obj.model_state must hold no collection 'params', got 'params'",
    ),
    "parameters as state to write": (
        lambda: from_head(Classifier(LinenCNN(), {"params": {}})).write_back(
            Classifier(LinenCNN(), {"params": {}}), {"w": X}, {"params": {}}
        ),
        ValueError, r"^Model.write_back: model_state must hold no collection 'params', got ",
    ),
    "a large integer": (
        lambda: from_head(Plain(LinenMLP(), {"table": np.array([2**40])}), cross_entropy).params,
        ValueError, r"^from_head: integers of params must fit int32, to which JAX converts int64, "
        r"got 1099511627776 in leaf \['table'\]\. Switch jax_enable_x64 on\.$",
    ),
    "a large integer as state": (
        lambda: from_head(
            Classifier(LinenMLP(), {}, model_state={"ids": {"n": 2**40}})
        ).model_state,
        ValueError, r"^from_head: integers of model_state must fit int32, .* 1099511627776 in leaf "
        r"\['ids'\]\['n'\]\.",
    ),
    "another's params": (
        lambda: from_head(Plain(NnxCNN(nnx.Rngs(0)), {"out": {}}), cross_entropy).apply_fn(
            {"out": {}}, {}, {"x": X}
        ),
        ValueError, r"from_head: params must hold the variable conv/bias, got none in 'out'\. "
        r"Start with model\.params\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        call()
