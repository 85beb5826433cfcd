"""What `init` and the first `windows` say of a model that does not fit."""

import functools

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche

PARAMS = {"w": np.ones(3, "float32")}
DATA = {"x": np.ones((8, 3), "float32")}


def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]).mean()


def build(loss=loss_fn, **options):
    return elche.build_train_step(loss, optax.sgd(0.1), devices=jax.devices()[:2], **options)


@pytest.mark.parametrize("argument", ["params", "model_state"])
def test_copies_of_several_devices_are_no_model(argument):
    copies = build().init(PARAMS).params
    given = {"params": PARAMS, "model_state": None, argument: copies}
    with pytest.raises(
        ValueError,
        match=rf"^TrainStep.init: {argument} must be one copy, got leaf \['w'\] with the copies "
        r"of 2 devices\. Take one with elche_jax\.unreplicate\.$",
    ):
        build().init(given["params"], model_state=given["model_state"])


@pytest.mark.parametrize("argument", ["params", "model_state"])
def test_keys_that_cannot_be_sorted(argument):
    mixed = {"w": np.ones(3, "float32"), 1: np.ones(3, "float32")}
    given = {"params": PARAMS, "model_state": None, argument: mixed}
    with pytest.raises(
        TypeError,
        match=rf"^TrainStep.init: dicts in {argument} must have keys of one type, as JAX sorts "
        r"them, got several \('<' not .* 'int' and 'str'\)\. Use strings\.$",
    ):
        build().init(given["params"], model_state=given["model_state"])


def test_a_copy_of_one_device_is():
    copy = elche.unreplicate(build().init(PARAMS).params)
    assert np.asarray(build().init(copy).params["w"]).shape == (2, 3)


def test_parameters_that_are_laid_out_over_devices_otherwise_are_one_copy():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    w = jax.device_put(np.arange(8, dtype="float32").reshape(2, 4), columns)
    state = build().init({"w": w})
    np.testing.assert_array_equal(elche.unreplicate(state.params)["w"], w)


def test_a_loss_that_has_no_hash():
    class Loss(dict):
        __hash__ = None

        def __call__(self, params, batch, rng):
            return loss_fn(params, batch, rng)

    train = build(Loss())
    state = train.init(PARAMS)
    for window in train.windows(DATA, 4, shuffle=False):
        state, _ = train(state, window)
    np.testing.assert_allclose(elche.unreplicate(state.params)["w"], 0.9, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_numbers_of_too_few_bits(dtype):
    """What JAX makes of them has a layout that programs compiled ahead of time refuse."""
    few = np.zeros((8, 3)).astype(dtype)

    def refused(begin):
        text = rf"{begin} must have numbers of at least 8 bits, got {dtype} in leaf "
        return pytest.raises(TypeError, match=rf"^{text}\S+\. Convert it: leaf\.astype")

    with refused(r"TrainStep\.init: model_state"):
        build().init(PARAMS, model_state={"s": few})
    with refused(r"TrainStep\.init: params"):
        build(trainable=lambda path, _: "q" not in path).init({**PARAMS, "q": few})
    train = build()
    train.init(PARAMS)
    with refused("data: leaves"):
        train.windows({"q": few}, 4)
    with refused("predict: params"):
        elche.predict(lambda p, batch: batch, few, np.ones(4, "float32"), 4)


@pytest.mark.parametrize("rule", [None, elche.MeanGradient("int8", delay=2)])
def test_a_state_begins_under_a_guard_against_implicit_transfers(rule):
    """What is the user's own is on a device; the library puts its own there explicitly."""
    params, key, train = jax.device_put(PARAMS), jax.random.key(3), build(averaging=rule)
    with jax.transfer_guard("disallow"):
        state, of_seed = train.init(params, rng=key), train.init(params, rng=3)
    same = state, of_seed, train.init(PARAMS, rng=3)
    for mine, seeded, theirs in zip(*map(jax.tree.leaves, same), strict=True):
        np.testing.assert_array_equal(seeded, theirs, strict=True)
        np.testing.assert_array_equal(mine, theirs, strict=True)


@pytest.mark.parametrize("averaging", [None, elche.DiLoCo(optax.sgd(0.7, momentum=0.9))])
def test_float64_parameters_of_numpy_are_float32_without_a_warning(averaging):
    params = {name: np.asarray(leaf, np.float64) for name, leaf in PARAMS.items()}
    state = build(averaging=averaging).init(params)  # a warning is an error here
    floats = [leaf for leaf in jax.tree.leaves(state) if np.issubdtype(leaf.dtype, np.floating)]
    assert {leaf.dtype.name for leaf in floats} == {"float32"}


def test_merge_without_model_state():
    with pytest.raises(
        ValueError, match=r"model_state must be given where .* got None and merge='pooled'\. Pass"
    ):
        build(merge="pooled").init(PARAMS)


@pytest.mark.parametrize("value", [3_000_000_000, np.array([1, -(2**40)]), np.uint64(2**32)])
def test_integers_of_model_state_that_jax_would_cut_off(value):
    got = np.asarray(value).ravel()[-1]
    kind = "uint32" if got > 2**31 and got.dtype == "uint64" else "int32"
    message = rf"^TrainStep\.init: integers of model_state must fit {kind}, .* got {got} in leaf "
    with pytest.raises(ValueError, match=message + r"\['n'\]\. Switch jax_enable_x64 on\.$"):
        build().init(PARAMS, model_state={"n": value})


def test_the_count_of_examples_stays_at_its_largest_value():
    train, most = build(cadence=elche.FixedTotal(2)), 2**31 - 1
    state, seen = train.init(PARAMS), []
    state = state.replace(examples=elche.replicate(np.int32(most - 10), train.devices))
    for window in train.windows(DATA, 4, epochs=3):
        state, _ = train(state, window)
        seen.append(int(elche.unreplicate(state.examples)))
    assert seen == [most - 2, most, most]


def four(params, model_state, batch, rng):
    return loss_fn(params, batch, rng), model_state


@pytest.mark.parametrize(
    ("loss", "model_state", "message"),
    [
        (four, None, r"\(params, batch, rng\), as model_state was not given, got a function of "
                     r"\(params, model_state, batch, rng\)\.$"),
        (loss_fn, {"n": np.int32(0)}, r"\(params, model_state, batch, rng\), as model_state was "
                                      r"given, got a function of \(params, batch, rng\)\.$"),
    ],
)  # fmt: skip
def test_a_loss_of_other_arguments(loss, model_state, message):
    train = build(loss)
    train.init(PARAMS, model_state=model_state)
    with pytest.raises(TypeError, match="^loss_fn: must take " + message):
        train.windows(DATA, 4)


def test_functions_that_do_not_say_what_they_take():
    """Whatever takes the arguments will do: here one with `*args`."""
    train = build(lambda *args: loss_fn(*args))
    state = train.init(PARAMS)
    for window in train.windows(DATA, 4):
        state, metrics = train(state, window)
    assert metrics["finite"]


def with_a_model(loss):
    @functools.wraps(loss)
    def wrapper(params, batch, rng):
        return loss("model", params, batch, rng)

    return wrapper


@with_a_model
def wrapped(model, params, batch, rng):
    return loss_fn(params, batch, rng)


@pytest.mark.parametrize(
    "loss",
    [
        wrapped,
        jax.jit(loss_fn),
        functools.partial(lambda model, *args: loss_fn(*args), "model"),
        lambda params, batch, rng, scale=1.0: loss_fn(params, batch, rng) * scale,
    ],
    ids=["wraps", "jit", "partial", "default"],
)
def test_functions_in_other_clothes(loss):
    train = build(loss)
    state = train.init(PARAMS)
    for window in train.windows(DATA, 4):
        state, metrics = train(state, window)
    assert metrics["finite"]


def test_functions_of_an_evaluation_that_take_other_arguments():
    with pytest.raises(TypeError, match=r"^metric_fn: must take \(params, batch\), as model_state"):
        elche.build_eval_step(four)(PARAMS, DATA, 4)
    with pytest.raises(TypeError, match=r"^apply_fn: must take \(params, model_state, batch\), as"):
        elche.predict(lambda p, b: b, PARAMS, DATA, 4, model_state={"n": np.int32(0)})


def test_copies_of_several_devices_are_no_model_of_an_evaluation():
    copies = build().init(PARAMS).params
    with pytest.raises(ValueError, match=r"^predict: params must be one copy, got leaf \['w'\]"):
        elche.predict(lambda p, b: b["x"] @ p["w"], copies, DATA, 4)
