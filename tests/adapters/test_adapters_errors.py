"""What `from_linen` and `from_nnx` refuse, and in which words."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax_nets import LinenCNN, LinenMLP, NnxCNN, cross_entropy, data

import elche_jax as elche
from elche_jax.adapters.linen import from_linen
from elche_jax.adapters.model import keep_structure
from elche_jax.adapters.nnx import from_nnx

X = data()["x"]
KEY = jax.random.key(0)


class Both(nn.Module):
    def __call__(self, x, train, deterministic):
        return x


class Empty(nnx.Module):
    """No `__call__`."""


class Bare(nnx.Module):
    def __call__(self, x):
        return x


def mlp(**options):
    return from_linen(LinenMLP(), cross_entropy, **options)


def cnn(loss=cross_entropy):
    return from_nnx(NnxCNN(nnx.Rngs(0)), loss)


def linen_cnn():
    model = from_linen(LinenCNN(), cross_entropy)
    return model, *model.init(0, {"x": X[:1]})


MADE = {
    "no linen module": (
        lambda: from_linen(Bare(), cross_entropy),
        TypeError, r"from_linen: module must be a flax.linen module, got .*For a "
        "flax.nnx module, use from_nnx.",
    ),
    "a class of linen": (
        lambda: from_linen(LinenMLP, cross_entropy),
        TypeError, r"module must be a flax.linen module, got the class LinenMLP\.",
    ),
    "no nnx module": (
        lambda: from_nnx(LinenMLP(), cross_entropy),
        TypeError, r"from_nnx: model must be a flax.nnx module with __call__, got .*For "
        "a flax.linen module, use from_linen.",
    ),
    "a class of nnx": (
        lambda: from_nnx(NnxCNN, cross_entropy),
        TypeError, r"model must be a flax.nnx module with __call__, got the class NnxCNN\.",
    ),
    "not callable": (
        lambda: from_nnx(Empty(), cross_entropy),
        TypeError, r"model must be a flax.nnx module with __call__, got ",
    ),
    "no loss": (
        lambda: from_linen(LinenMLP(), 3),
        TypeError, r"from_linen: loss must be a function of \(outputs, batch\), got 3 \(int\)\.",
    ),
    "no metrics": (
        lambda: mlp().metric_fn("accuracy"),
        TypeError, r"Model.metric_fn: fn must be a function of \(outputs, batch\), got 'accuracy'",
    ),
    "inputs": (
        lambda: mlp(inputs=3),
        TypeError, r"from_linen: inputs must be a key of the batch or a function of it, got 3",
    ),
    "rngs": (
        lambda: mlp(rngs=3),
        TypeError, r"from_linen: rngs must be the name of a random stream or a sequence of names",
    ),
    "a stream twice": (
        lambda: mlp(rngs=("dropout", "noise", "dropout")),
        ValueError, r"from_linen: rngs must hold every name once, got 'dropout', 'noise', "
        r"'dropout'\.",
    ),
    "no filter": (
        lambda: from_nnx(NnxCNN(nnx.Rngs(0)), cross_entropy, param_type=3),
        TypeError, r"^from_nnx: param_type must be an NNX filter, got 3 \(int\)\.$",
    ),
    "no filter of what is trained": (
        lambda: cnn().trainable(3),
        TypeError, r"^Model.trainable: chosen must be an NNX filter, got 3 \(int\)\.$",
    ),
    "mutable": (
        lambda: mlp(mutable=3),
        TypeError, r"from_linen: mutable must be True, False, a name of a collection, or several",
    ),
    "kwargs": (
        lambda: mlp(train_kwargs=True),
        TypeError, r"from_linen: train_kwargs must be a dict of keyword arguments, got True",
    ),
    "two switches": (
        lambda: from_linen(Both(), cross_entropy, train_kwargs={}),
        ValueError, r"from_linen: module must have one argument that switches to training \(train, "
        r"training, .*\), got Both with train and deterministic\. Pass "
        r"train_kwargs= and eval_kwargs=\.",
    ),
    "no parameters": (
        lambda: from_nnx(Bare(), cross_entropy),
        ValueError, r"from_nnx: param_type must choose at least one variable of the module, got "
        r".*Param.*, which chooses none\.",
    ),
    "nothing to train": (
        lambda: cnn().trainable(nnx.LoRAParam),
        ValueError, r"Model.trainable: chosen must choose at least one parameter, got .*LoRAParam",
    ),
    "rng": (
        lambda: mlp().init(1.5, {"x": X}),
        TypeError, r"Model.init: rng must be a key or an integer seed, got a float\.",
    ),
    "seed": (
        lambda: mlp().init(-1, {"x": X}),
        ValueError, r"Model.init: rng must be at least 0, got -1\.",
    ),
    "no inputs": (
        lambda: mlp().init(0, {"text": X, "y": X}),
        ValueError, r"from_linen: batch must have an entry 'x' or 'inputs' or 'image', got entries "
        r"'text', 'y'\. Name it with inputs=, a key or a function of the batch\.",
    ),
    "no such inputs": (
        lambda: mlp(inputs="z").init(0, {}),
        ValueError, r"batch must have an entry 'z', got entries none\.",
    ),
    "no batch": (
        lambda: mlp().init(0, "x"),
        TypeError, r"from_linen: batch must be a dict, a tuple with the inputs first, or an array, "
        r"got a str\. Pass inputs=, a function of the batch\.",
    ),
    "a tuple and a key": (
        lambda: mlp(inputs="x").init(0, (X, X)),
        TypeError, r"from_linen: batch must be a dict, got a tuple of 2\.",
    ),
    "too many arguments": (
        lambda: mlp()(1, 2, 3, 4, 5),
        TypeError, r"from_linen: loss_fn must be called with \(params, batch, rng\) or \(params, "
        r"model_state, batch, rng\), got 5 arguments\.",
    ),
    "too few arguments": (
        lambda: mlp().apply_fn(1),
        TypeError, r"from_linen: apply_fn must be called with \(params, batch\) or \(params, "
        r"model_state, batch\), got 1 arguments\.",
    ),
    "a loss of three": (
        lambda: jax.eval_shape(
            cnn(lambda outputs, batch: (1, 2, 3)), cnn().params, cnn().model_state, {"x": X}, KEY
        ),
        TypeError, r"from_nnx: loss must return a loss or \(loss, metrics\), got a tuple of 3\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_what_is_refused(case):
    call, kind, message = MADE[case]
    with pytest.raises(kind, match=message):
        call()


def no_state_linen():
    model, params, _ = linen_cnn()
    return model(params, {"x": X}, KEY)


def whole_variables():
    model, params, state = linen_cnn()
    return model({"params": params, **state}, {"x": X}, KEY)


def parameters_as_state(method):
    model, params, state = linen_cnn()
    given = params, {**state, "params": params}
    return model.merge(*given) if method == "merge" else model(*given, {"x": X}, KEY)


def list_state():
    model, params, _ = linen_cnn()
    return model(params, [1], {"x": X}, KEY)


def several_copies(method):
    model = cnn()
    params = elche.replicate(model.params, jax.devices()[:2])
    return getattr(model, method)(params, model.model_state)


def linen_copies():
    model, params, _ = linen_cnn()
    return model.merge(elche.replicate(params, jax.devices()[:2]))


class Table(nnx.Module):
    def __init__(self, size=2**40):
        self.w = nnx.Param(jnp.ones(()))
        self.table = nnx.Variable(np.array([7, size]))

    def __call__(self, x):
        return x * self.w


def merge_table():
    model = from_nnx(Table(1), cross_entropy)
    return model.merge(model.params, {"table": np.array([-(2**40), 7])})


def other_shape():
    model = cnn()
    params = model.params
    params["out"]["bias"] = jnp.zeros(5)
    return model.merge(params, model.model_state)


def more_than_there_is():
    model = cnn()
    return model({**model.params, "more": jnp.ones(1)}, model.model_state, {"x": X}, KEY)


VARIABLES = {
    "linen without its state": (
        no_state_linen,
        ValueError, r"from_linen: params and model_state must hold what the module asks for, as "
        r"model.init makes them, got Scope\w+: .*batch_stats.*Was train.init given both\?",
    ),
    "linen, all in one": (
        whole_variables,
        ValueError, r"from_linen: params and model_state must hold what the module asks for",
    ),
    "a list": (
        list_state,
        TypeError, r"from_linen: model_state must be a dict of collections, got a list\.",
    ),
    "parameters as state": (
        lambda: parameters_as_state("call"),
        ValueError, r"^from_linen: model_state must hold no collection 'params', got "
        r"'batch_stats', 'params'\. Leave it out: parameters belong in params only\.$",
    ),
    "parameters as state to merge": (
        lambda: parameters_as_state("merge"),
        ValueError, r"^Model.merge: model_state must hold no collection 'params', got ",
    ),
    "nnx without its state": (
        lambda: cnn()(cnn().params, {"x": X}, KEY),
        ValueError, r"from_nnx: model_state must hold the variable norm/mean, got None\. Start "
        r"with train.init\(model.params, model_state=model.model_state\)\.",
    ),
    "nnx to update without its state": (
        lambda: cnn().update(cnn().params),
        ValueError, r"^Model.update: model_state must hold the variable norm/mean, got None\. "
        r"Pass model_state=\.$",
    ),
    "nnx to merge without a parameter": (
        lambda: cnn().merge({}, cnn().model_state),
        ValueError, r"^Model.merge: params must hold the variable conv/bias, got none in an empty "
        r"dict\. Pass params=\.$",
    ),
    "nnx without a parameter": (
        lambda: cnn()({"conv": {}}, cnn().model_state, {"x": X}, KEY),
        ValueError, r"from_nnx: params must hold the variable conv/bias, got none in an empty "
        r"dict\. Start with model.params\.",
    ),
    "nnx with more": (
        more_than_there_is,
        ValueError, r"from_nnx: params must hold the module's variables only, got leaf "
        r"\['more'\] too\. Is it another module's\?",
    ),
    "copies to merge": (
        lambda: several_copies("merge"),
        ValueError, r"Model.merge: params must be one copy, got leaf .* with the copies of 2 "
        r"devices\. Take one with elche_jax.unreplicate\.",
    ),
    "copies to update": (
        lambda: several_copies("update"),
        ValueError, r"Model.update: params must be one copy, got leaf ",
    ),
    "copies to merge, linen": (
        linen_copies,
        ValueError, r"Model.merge: params must be one copy, got leaf ",
    ),
    "a large integer": (
        lambda: from_nnx(Table(), cross_entropy).model_state,
        ValueError, r"^from_nnx: integers of model_state must fit int32, to which JAX converts "
        r"int64, got 1099511627776 in leaf \['table'\]\. Switch jax_enable_x64 on\.$",
    ),
    "a large integer to merge": (
        merge_table,
        ValueError, r"^Model.merge: integers of model_state must fit int32, .* got -1099511627776 "
        r"in leaf table\.",
    ),
    "another shape": (
        other_shape,
        ValueError, r"Model.merge: params must have the module's shapes, for out/bias \[\(3,\)\], "
        r"got \[\(5,\)\]\.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIABLES)
def test_variables_that_do_not_fit(case):
    call, kind, message = VARIABLES[case]
    with pytest.raises(kind, match=message):
        call()


class Changing(nnx.Module):
    def __init__(self, how):
        self.w = nnx.Param(jnp.ones(()))
        self.mean, self.how = nnx.BatchStat(jnp.zeros(3)), how

    def __call__(self, x):
        if self.how == "dtype":
            self.mean.set_value(self.mean.get_value().astype(jnp.float16))
        elif self.how == "shape":
            self.mean.set_value(jnp.zeros(4))
        elif self.how == "new":
            self.more = nnx.BatchStat(jnp.zeros(2))
        else:
            del self.mean
        return x * self.w


@pytest.mark.parametrize(
    ("how", "got"),
    [
        ("dtype", r"float16\[3\] for leaf \['mean'\], which was float32\[3\]\."),
        ("shape", r"float32\[4\] for leaf \['mean'\], which was float32\[3\]\."),
        ("new", r"a new leaf \['more'\]\. Start with a model state that has it\."),
        ("lost", r"none for leaf \['mean'\]\."),
    ],
)  # fmt: skip
def test_a_state_that_changes_its_form_is_named_before_anything_is_compiled(how, got):
    model = from_nnx(Changing(how), lambda outputs, batch: outputs.mean())
    train = elche.build_train_step(model, optax.sgd(0.1), devices=jax.devices()[:2])
    train.init(model.params, model_state=model.model_state)
    rule = "from_nnx: model_state must keep its leaves, shapes and dtypes in a step of the module"
    with pytest.raises(TypeError, match=f"{rule}, got {got}"):
        train.windows({"x": np.ones((16, 3), "float32")}, 4)


def test_a_state_in_another_order_keeps_its_names():
    old = OrderedDict(b=jnp.float32(1), a=jnp.float32(2))
    new = keep_structure("from_linen", old, {"a": jnp.float32(20), "b": jnp.float32(10)})
    assert list(new.items()) == [("b", 10), ("a", 20)]


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(1)(x)
        self.sow("losses", "size", (x**2).mean())
        return x


def test_what_is_sown_into_a_collection_of_its_own_is_named():
    x = np.ones((8, 3), "float32")
    model = from_linen(Sowing(), lambda outputs, batch: outputs.mean())
    params, state = model.init(0, {"x": x})
    with pytest.raises(TypeError, match=r"got a new leaf \['losses'\]\['size'\]\[1\]\."):
        model(params, state, {"x": x}, KEY)
    model = from_linen(Sowing(), lambda outputs, batch: outputs.mean(), mutable=False)
    assert model(params, state, {"x": x}, KEY)[1] == state


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.BatchNorm(use_running_average=not train)(x)


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x) + jax.random.normal(self.make_rng("noise"))


def test_a_collection_that_is_written_to_and_not_named():
    x = np.ones((8, 3), "float32")
    model = from_linen(
        Statistics(), lambda outputs, batch: outputs.mean(), mutable=False,
        eval_kwargs={"train": True}, train_kwargs={"train": True},
    )  # fmt: skip
    params, state = model.init(0, {"x": x})
    got = "got ModifyScopeVariableError: .*batch_stats"
    rule = "mutable must name every collection that the module writes to in training"
    with pytest.raises(ValueError, match=f"^from_linen: {rule}, {got}"):
        model(params, state, {"x": x}, KEY)
    rule = "eval_kwargs must let the module write to no collection in an evaluation"
    with pytest.raises(ValueError, match=f"^from_linen: {rule}, {got}"):
        model.apply_fn(params, state, {"x": x})


@pytest.mark.parametrize("train", [True, False])
def test_a_random_stream_that_there_is_not(train):
    x = np.ones((8, 3), "float32")
    model = from_linen(Noise(), lambda outputs, batch: outputs.mean())
    params = {"Dense_0": nn.Dense(1).init(KEY, x)["params"]}
    rule = "rngs must name every random stream of the module in training"
    if not train:
        rule = "eval_kwargs must let the module ask for no random keys in an evaluation"
    with pytest.raises(ValueError, match=f"^from_linen: {rule}, got InvalidRngError: .*noise"):
        if train:
            model(params, {"x": x}, KEY)
        else:
            model.apply_fn(params, {"x": x})


def test_metrics_without_has_aux_are_explained_by_the_step():
    def loss(outputs, batch):
        return cross_entropy(outputs, batch), {"one": outputs.mean()}

    train = elche.build_train_step(
        from_linen(LinenMLP(), loss), optax.sgd(0.1), devices=jax.devices()[:2]
    )
    train.init(mlp().init(0, {"x": X})[0])
    with pytest.raises(TypeError, match="dict of metrics, pass has_aux=True"):
        train.windows(data(), 4)
    train = elche.build_train_step(mlp(), optax.sgd(0.1), has_aux=True)
    train.init(mlp().init(0, {"x": X})[0])
    with pytest.raises(TypeError, match=r"loss_fn: must return \(loss, aux\), got an array"):
        train.windows(data(), 4)


def test_metrics_beside_a_state_need_has_aux_too():
    model = cnn(lambda outputs, batch: (cross_entropy(outputs, batch), {"one": outputs.mean()}))
    train = elche.build_train_step(model, optax.sgd(0.1), devices=jax.devices()[:2])
    train.init(model.params, model_state=model.model_state)
    with pytest.raises(TypeError, match="the new model_state must have the structure, shapes"):
        train.windows(data(), 4)
