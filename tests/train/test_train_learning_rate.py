"""Learning rates: schedules over the work done, and the rules for larger batches."""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings, strategies as st
from marks import slow, table

import elche_jax as elche
from elche_jax.train.initial import optimizer_state
from elche_jax.train.learning_rate import (
    learning_rate_factor,
    scale_learning_rate,
    schedule_by_work,
)

PARAMS = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([[0.5, -0.25]])}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
PEAK, LENGTH, WARMUP = 0.1, 1000, 100


def cosine(n):
    return PEAK * 0.5 * (1 + np.cos(np.pi * min(n, LENGTH) / LENGTH))


def linear(n):
    return PEAK * (1 - min(n, LENGTH) / LENGTH)


def warmup(n):
    return PEAK * n / WARMUP if n < WARMUP else PEAK


def stairs(n):
    return PEAK * 0.5 ** int(n >= 300) * 0.1 ** int(n >= 700)


# The optax schedule, and the same in NumPy, float64.
SCHEDULES = {
    "cosine": (optax.cosine_decay_schedule(PEAK, LENGTH), cosine),
    "linear": (optax.linear_schedule(PEAK, 0.0, LENGTH), linear),
    "warmup": (
        optax.join_schedules(
            [optax.linear_schedule(0.0, PEAK, WARMUP), optax.constant_schedule(PEAK)], [WARMUP]
        ),
        warmup,
    ),
    "stairs": (optax.piecewise_constant_schedule(PEAK, {300: 0.5, 700: 0.1}), stairs),
}
COSINE = SCHEDULES["cosine"][0]


@functools.cache
def sgd_update(name, unit):
    sgd = schedule_by_work(optax.sgd, unit=unit)(learning_rate=SCHEDULES[name][0])

    @jax.jit
    def update(opt_state, work):
        return sgd.update(ONES, opt_state, PARAMS, **work)

    return sgd, update


def once(tx, params=PARAMS, microbatches=7, examples=70):
    """The first update, as the training step asks for it."""
    tx = optax.with_extra_args_support(tx)
    work = {"microbatches": jnp.int32(microbatches), "examples": jnp.int32(examples)}
    return tx.update(ONES, tx.init(params), params, value=jnp.float32(0), grad=ONES, **work)


@table(name=SCHEDULES, unit=["microbatches", "examples"])
@settings(max_examples=15)
@given(windows=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 32)), min_size=1, max_size=12))
@example(windows=[(50, 2), (100, 2), (200, 2), (350, 2), (150, 2), (1, 2)])  # the schedules' edges
def test_each_update_uses_the_schedule_at_the_work_before(name, unit, windows):
    sgd, update = sgd_update(name, unit)
    want = SCHEDULES[name][1]
    opt_state, done = sgd.init(PARAMS), {"microbatches": 0, "examples": 0}
    for count, batch_size in windows:
        work = {key: jnp.int32(value) for key, value in done.items()}
        updates, opt_state = update(opt_state, work)
        rate = want(done[unit])
        np.testing.assert_allclose(opt_state.hyperparams["learning_rate"], rate, 1e-5, 1e-7)
        np.testing.assert_allclose(updates["a"], np.full(3, -rate), 1e-5, 1e-7)
        done["microbatches"] += count
        done["examples"] += count * batch_size


@pytest.mark.parametrize("factory", [optax.sgd, optax.adamw])
def test_windows_of_one_microbatch_are_optax(factory):
    mine = schedule_by_work(factory)(learning_rate=COSINE)
    theirs = optax.inject_hyperparams(factory)(learning_rate=COSINE)
    a, b = mine.init(PARAMS), theirs.init(PARAMS)
    for step in range(5):
        mine_updates, a = mine.update(PARAMS, a, PARAMS, microbatches=jnp.int32(step))
        their_updates, b = theirs.update(PARAMS, b, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, mine_updates, their_updates)
        jax.tree.map(np.testing.assert_array_equal, a.hyperparams, b.hyperparams)


def rates(tx, sizes):
    """The learning rate of the update that begins at each microbatch number."""
    starts = [0, *itertools.accumulate(sizes)][:-1]
    opt_state, seen = tx.init(PARAMS), {}
    for start in starts:
        _, opt_state = tx.update(ONES, opt_state, PARAMS, microbatches=jnp.int32(start))
        seen[start] = float(opt_state.hyperparams["learning_rate"])
    return seen


def test_the_rate_at_a_microbatch_does_not_depend_on_the_windows():
    """The same 64 microbatches, as equal and as unequal devices would cut them."""
    schedule = optax.cosine_decay_schedule(0.1, 64)
    cuts = [8] * 8, [24, 8, 24, 4, 4]
    mine = [rates(schedule_by_work(optax.sgd)(learning_rate=schedule), cut) for cut in cuts]
    theirs = [rates(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule), c) for c in cuts]
    common = sorted(mine[0].keys() & mine[1].keys())
    assert common == [0, 24, 32, 56]
    assert [mine[0][n] for n in common] == [mine[1][n] for n in common]
    assert all(theirs[0][n] != theirs[1][n] for n in common[1:])
    assert mine[0][56] < 0.01 < 0.09 < theirs[0][56]  # optax has seen 7 updates of 64


def test_several_schedules_and_constants():
    adamw = schedule_by_work(optax.adamw, unit="examples")(
        COSINE, b1=lambda n: 0.5 + n / 100, weight_decay=0.25
    )
    values = once(adamw, microbatches=1, examples=10)[1].hyperparams
    np.testing.assert_allclose(values["learning_rate"], cosine(10), rtol=1e-6)
    np.testing.assert_allclose([values["b1"], values["weight_decay"]], [0.6, 0.25], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.float32(0.5), "float32"), (np.int64(3), "int32")],
)
def test_constants_of_numpy(value, dtype):
    sgd = schedule_by_work(lambda learning_rate, n: optax.sgd(learning_rate))(COSINE, n=value)
    kept = sgd.init(PARAMS).hyperparams["n"]
    assert (kept.dtype, kept) == (dtype, value)


@pytest.mark.parametrize(
    ("value", "bound"), [(2**40, "at most 2147483647"), (-(2**31) - 1, "at least -2147483648")]
)
def test_an_integer_that_is_too_large(value, bound):
    def make(learning_rate, n):
        return optax.sgd(learning_rate)

    with pytest.raises(
        ValueError,
        match=rf"^schedule_by_work: n must be {bound}, got {value}\. If it is not a hyper"
        r"parameter, name it in static_args\.$",
    ):
        schedule_by_work(make)(COSINE, n=value)
    schedule_by_work(make, static_args="n")(COSINE, n=value)


def test_a_constant_may_be_set_between_updates():
    sgd = schedule_by_work(optax.sgd)(learning_rate=0.5)
    opt_state = sgd.init(PARAMS)
    assert opt_state.hyperparams["learning_rate"] == 0.5
    opt_state.hyperparams["learning_rate"] = jnp.float32(0.25)
    updates, _ = sgd.update(ONES, opt_state, PARAMS)  # no schedule: asks for nothing
    assert updates["a"].tolist() == [-0.25] * 3


def test_a_stateful_schedule_of_optax_stays_as_it_is():
    class Loss:
        def init(self):
            return jnp.float32(1)

        def update(self, state, **extra_args):
            return state / 2

        def __call__(self, state, *, value=0.0, **extra_args):
            return state + value

    opt_state = once(schedule_by_work(optax.sgd)(learning_rate=Loss()))[1]
    assert opt_state.hyperparams["learning_rate"] == 1.0
    assert opt_state.hyperparams_states["learning_rate"] == 0.5


BARE = schedule_by_work(optax.sgd)(learning_rate=lambda n: 1.0 * n)
MASK = {"a": True, "b": False}
LABELS = {"a": "scheduled", "b": "rest"}
ROUND = {
    "chain": optax.chain(optax.clip_by_global_norm(1.0), BARE),
    "named_chain": optax.named_chain(("first", optax.identity()), ("second", BARE)),
    "masked": optax.masked(BARE, MASK),
    "partition": optax.partition({"scheduled": BARE, "rest": optax.adam(1e-3)}, LABELS),
    "multi_transform": optax.multi_transform({"scheduled": BARE, "rest": optax.sgd(1)}, LABELS),
    "apply_if_finite": optax.apply_if_finite(BARE, 3),
    "conditionally_transform": optax.conditionally_transform(BARE, lambda step: step < 9),
    "flatten": optax.flatten(BARE),
    "inject_hyperparams": optax.inject_hyperparams(lambda b: optax.chain(optax.ema(b), BARE))(0.9),
    "schedule_free": optax.contrib.schedule_free(BARE, 1e-3),
    "mechanize": optax.contrib.mechanize(BARE),
    "scale_learning_rate": scale_learning_rate(BARE, 3),
}
MULTI = optax.MultiSteps(BARE, 2)
FORGET = {
    "MultiSteps": MULTI,
    "MultiSteps.gradient_transformation": MULTI.gradient_transformation(),
    "lookahead": optax.lookahead(BARE, 5, 0.5),
    "split_real_and_imaginary": optax.contrib.split_real_and_imaginary(BARE),
}


def rate_in(opt_state):
    found = optax.tree.get_all_with_path(opt_state, "hyperparams")
    (rate,) = [value["learning_rate"] for _, value in found if "learning_rate" in value]
    return rate


@pytest.mark.parametrize("name", ROUND)
def test_wrappers_that_hand_the_work_on(name):
    assert rate_in(after(name)) == 7.0


@pytest.mark.parametrize("name", FORGET)
def test_wrappers_that_do_not(name):
    params = optax.LookaheadParams(PARAMS, PARAMS) if name == "lookahead" else PARAMS
    with pytest.raises(TypeError, match=r"must be given microbatches=, .* a wrapper around the op"):
        once(FORGET[name], params)


def test_what_does_not_hand_the_work_on_goes_inside():
    def multi(learning_rate):
        return optax.MultiSteps(optax.sgd(learning_rate), 2).gradient_transformation()

    tx = schedule_by_work(multi)(learning_rate=lambda n: 1.0 * n)
    opt_state = tx.init(PARAMS)
    first, opt_state = tx.update(ONES, opt_state, PARAMS, microbatches=jnp.int32(3))
    second, opt_state = tx.update(ONES, opt_state, PARAMS, microbatches=jnp.int32(5))
    assert (first["a"][0], second["a"][0]) == (0, -5)
    assert opt_state.hyperparams["learning_rate"] == 5


def test_multi_steps_by_hand():
    tx = optax.GradientTransformationExtraArgs(MULTI.init, MULTI.update)
    opt_state = once(tx)[1]
    assert rate_in(opt_state) == 0.0  # not until the second window
    updates, opt_state = tx.update(ONES, opt_state, PARAMS, microbatches=jnp.int32(5))
    assert (rate_in(opt_state), updates["a"][0]) == (5, -5)


KEPT = {
    "sgd": schedule_by_work(optax.sgd)(COSINE, momentum=0.9),
    "adam": schedule_by_work(optax.adam, unit="examples")(COSINE),
    "adamw": schedule_by_work(optax.adamw)(COSINE, weight_decay=optax.linear_schedule(0, 1, 9)),
    "integers": schedule_by_work(optax.adamw)(1, weight_decay=0, eps=lambda n: 1),
    "arrays": schedule_by_work(optax.adamw)(np.float64([1e-3])[0], b1=jnp.float32(0.8)),
    "moments in bfloat16": schedule_by_work(optax.adam)(COSINE, mu_dtype=jnp.bfloat16),
    "adafactor": schedule_by_work(optax.adafactor, static_args="min_dim_size_to_factor")(COSINE),
    "lamb": schedule_by_work(optax.lamb)(COSINE),
    "scaled": scale_learning_rate(schedule_by_work(optax.adamw)(COSINE), 8, "sqrt"),
    **ROUND,
}


@functools.cache
def after(name):
    """Its state after one update, at the seventh microbatch."""
    return once(KEPT[name], microbatches=7)[1]


@pytest.mark.parametrize("name", KEPT)
def test_the_state_keeps_its_form(name):
    opt_state = optimizer_state(KEPT[name], PARAMS)
    mine = optax.tree.get_all_with_path((opt_state, after(name)), "hyperparams")
    for leaf in jax.tree.leaves([value for _, value in mine]):
        assert isinstance(leaf, jax.Array) and not leaf.weak_type
        assert leaf.dtype in (jnp.float32, jnp.int32)


def test_one_compiled_update_serves_all():
    sgd, _ = sgd_update("cosine", "microbatches")
    update = jax.jit(sgd.update)
    opt_state = sgd.init(PARAMS)
    for start in (0, 3, 50):
        _, opt_state = update(ONES, opt_state, PARAMS, microbatches=jnp.int32(start))
    assert update._cache_size() == 1


def test_parameters_of_16_bits():
    """optax would round the constants to bfloat16, b2 to 1, and divide by zero."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    adamw = schedule_by_work(optax.adamw)(COSINE)
    assert adamw.init(params).hyperparams["b2"] == np.float32(0.999)
    with pytest.raises(TypeError, match=r"must keep .* is float32\[3\] instead of bfloat16\[3\]"):
        optimizer_state(adamw, params)
    static = ("b1", "b2", "eps", "eps_root", "weight_decay")
    adamw = schedule_by_work(optax.adamw, static_args=static)(COSINE)
    opt_state = optimizer_state(adamw, params)
    updates, opt_state = adamw.update(params, opt_state, params, microbatches=jnp.int32(0))
    np.testing.assert_allclose(updates["a"], -0.1 * np.sign(PARAMS["a"]), rtol=0.02)
    assert opt_state.hyperparams["learning_rate"].dtype == jnp.float32


def test_resumed_it_goes_on_the_same():
    tx = scale_learning_rate(schedule_by_work(optax.adamw)(learning_rate=COSINE), 3)
    starts = [0, 5, 30, 31, 200, 900, 1500]

    def go_on(params, opt_state, starts):
        for start in starts:
            updates, opt_state = tx.update(params, opt_state, params, microbatches=jnp.int32(start))
            params = optax.apply_updates(params, updates)
        return params, opt_state

    whole = go_on(PARAMS, tx.init(PARAMS), starts)
    saved = pickle.dumps(jax.device_get(go_on(PARAMS, tx.init(PARAMS), starts[:3])))
    resumed = go_on(*jax.tree.map(jnp.asarray, pickle.loads(saved)), starts[3:])
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)


@pytest.mark.parametrize("world", [slow(1), 2])
def test_in_a_training_step(world):
    """Windows of changing sizes, the last microbatch of the epoch smaller than the others."""

    def loss_fn(params, batch, rng):
        return (batch["x"] @ params["w"]) ** 2

    units = "microbatches", "examples"
    both = [schedule_by_work(optax.sgd, unit=unit)(learning_rate=COSINE) for unit in units]
    counts = [[1], [3], [2]] if world == 1 else [[1, 1], [1, 3], [2, 1], [1, 2]]
    changing = elche.Replay(counts * 10)
    train = elche.build_train_step(
        loss_fn, optax.chain(optax.clip_by_global_norm(1.0), *both),
        devices=jax.devices()[:world], cadence=changing,
    )  # fmt: skip
    state = train.init({"w": np.ones(3, "float32")})
    data = {"x": np.random.default_rng(0).normal(size=(90, 3)).astype("float32")}
    done = dict.fromkeys(units, 0)
    for window in train.windows(data, batch_size=4, epochs=2, drop_last=False):
        state, _ = train(state, window)
        for unit, own in zip(units, elche.unreplicate(state.opt_state)[1:], strict=True):
            got = own.hyperparams["learning_rate"]
            np.testing.assert_allclose(got, cosine(done[unit]), rtol=1e-5, err_msg=unit)
        now = elche.unreplicate(state)
        done = {"microbatches": int(now.microbatches), "examples": int(now.examples)}
    assert done == {"microbatches": 46, "examples": 180}


def test_arguments_without_a_schedule_are_noticed(caplog):
    schedule_by_work(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    assert not caplog.records
    schedule_by_work(optax.sgd)(learning_rate=0.1)
    (record,) = caplog.records
    assert record.getMessage() == (
        "elche: schedule_by_work was given no schedule among the arguments of sgd, so that none "
        "counts work; one inside it still counts updates."
    )


@pytest.mark.parametrize(
    "factory", [lambda *rates: optax.sgd(*rates), lambda **rates: optax.sgd(**rates)]
)
def test_a_factory_that_does_not_name_its_arguments(factory):
    with pytest.raises(
        TypeError,
        match=r"^schedule_by_work: factory must name all its arguments, got one that takes "
        r"\(\*+rates\)\. Wrap it: lambda learning_rate: factory\(learning_rate=learning_rate\)\.$",
    ):
        schedule_by_work(factory)


@pytest.mark.parametrize("unit", ["microbatches", "examples"])
def test_an_update_without_the_work(unit):
    sgd = schedule_by_work(optax.sgd, unit=unit)(learning_rate=COSINE)
    opt_state = sgd.init(PARAMS)
    with pytest.raises(
        TypeError,
        match=rf"schedule_by_work: the optimizer's update must be given {unit}=, the work done so "
        r"far, got no extra argument\. elche_jax's training step gives it, but not to the outer "
        r"optimizer of DiLoCo; a wrapper around the optimizer must pass it on\.$",
    ):
        sgd.update(ONES, opt_state, PARAMS)
    with pytest.raises(TypeError, match=rf"given {unit}=, .* got grad, value\. elche_jax's"):
        sgd.update(ONES, opt_state, PARAMS, value=1.0, grad=ONES)


@pytest.mark.parametrize(
    "mask", [lambda p: jax.tree.map(lambda x: x.ndim > 1, p), lambda p: MASK, lambda p: np.ones(2)]
)
def test_a_function_that_is_no_schedule(mask):
    adamw = schedule_by_work(optax.adamw)(COSINE, mask=mask)
    with pytest.raises(
        TypeError,
        match=r"schedule_by_work: the schedule mask must return one number, got .*\. If it is "
        r"not a schedule, name it in static_args\.",
    ):
        adamw.init(PARAMS)


def test_static_arguments_are_left_alone():
    def mask(params):
        return MASK

    adamw = schedule_by_work(optax.adamw, static_args="mask")(1.0, weight_decay=0.5, mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates, opt_state = adamw.update(zeros, adamw.init(PARAMS), PARAMS)
    assert updates["a"].tolist() == [-0.5, 1.0, -1.5]
    assert updates["b"].tolist() == [[0.0, 0.0]]
    assert "mask" not in opt_state.hyperparams


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (optax.adamw(1e-3),), TypeError,
            r"schedule_by_work: factory must be a function that makes an optimizer, got Gradient"
            r"TransformationExtraArgs\. Pass optax\.adamw, say, and its arguments to the func",
        ),
        (
            (optax.sgd, "updates"), ValueError,
            r"schedule_by_work: unit must be one of 'microbatches', 'examples', got 'updates'\.",
        ),
        (
            (max,), TypeError,
            r"^schedule_by_work: factory must name all its arguments, got .*\. Wrap it: lambda lea",
        ),
        (
            (optax.sgd, "examples", 3), TypeError,
            r"^schedule_by_work: static_args must be the name of an argument of factory, or "
            r"several, got 3 \(int\)\.$",
        ),
        (
            (optax.sgd, "examples", ["momentum", ["nesterov"]]), TypeError,
            r"^schedule_by_work: static_args must be .*, got \['nesterov'\] \(list\)\.$",
        ),
        ((optax.sgd, "examples", "mask"), ValueError,
         r"^schedule_by_work: static_args must name arguments of factory .*, got 'mask'"),
    ],
)  # fmt: skip
def test_errors_of_schedule_by_work(arguments, error, message):
    with pytest.raises(error, match=message):
        schedule_by_work(*arguments)


@pytest.mark.parametrize(
    ("arguments", "factor"),
    [
        ((1,), 1.0),
        ((8,), 8.0),
        ((8, "none"), 1.0),
        ((16, "sqrt"), 4.0),
        ((9, "linear", 0.5), 5.0),
        ((9, "linear", 0), 1.0),
        ((7, "sqrt", 0.5), 2.0),
        ((3.5, "linear"), 3.5),
        ((np.int64(4), "sqrt", np.float32(1)), 2.0),
    ],
)
def test_learning_rate_factor(arguments, factor):
    got = learning_rate_factor(*arguments)
    assert type(got) is float and got == factor


@given(
    world=st.floats(1, 1e6), more=st.floats(1, 10), ratio=st.floats(0, 1),
    rule=st.sampled_from(["none", "linear", "sqrt"]),
)  # fmt: skip
def test_factors_are_ordered(world, more, ratio, rule):
    factor = learning_rate_factor(world, rule, ratio)
    assert 1 <= factor <= learning_rate_factor(world, "linear", ratio) <= world * (1 + 1e-12)
    assert factor <= learning_rate_factor(world * more, rule, ratio) * (1 + 1e-12)


SCALED = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": functools.partial(optax.adamw, weight_decay=0.1),
    "lion": optax.lion,
    "lamb": functools.partial(optax.lamb, weight_decay=0.1),
    "lars": functools.partial(optax.lars, weight_decay=0.1),
    "rmsprop": functools.partial(optax.rmsprop, momentum=0.9),
    "scheduled": lambda learning_rate: optax.adamw(optax.linear_schedule(learning_rate, 0, 9)),
    "by work": lambda learning_rate: schedule_by_work(optax.adamw)(
        learning_rate=optax.linear_schedule(learning_rate, 0, 9)
    ),
}
NOT_SCALED = {
    "adafactor": functools.partial(optax.adafactor, weight_decay_rate=0.1),
    "fromage": optax.fromage,
    "clipped": lambda learning_rate: optax.chain(optax.sgd(learning_rate), optax.clip(1e-3)),
    "schedule_free": lambda learning_rate: optax.contrib.schedule_free(
        optax.sgd(learning_rate), learning_rate
    ),
    "dadapt_adamw": lambda learning_rate: optax.contrib.dadapt_adamw(50 * learning_rate),
}


def train(tx, steps):
    tx = optax.with_extra_args_support(tx)
    params, opt_state = PARAMS, tx.init(PARAMS)
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p + step), params)
        updates, opt_state = tx.update(grads, opt_state, params, microbatches=jnp.int32(2 * step))
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.subtract, params, PARAMS)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_updates_are_those_of_a_larger_rate(name):
    got = train(scale_learning_rate(SCALED[name](0.01), 7, "linear", 0.5), 3)
    want = train(SCALED[name](0.04), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), got, want)
    assert np.abs(want["a"]).max() > 1e-5


@pytest.mark.parametrize("name", [slow(x) if x == "dadapt_adamw" else x for x in NOT_SCALED])
def test_updates_that_are_not(name):
    got = train(scale_learning_rate(NOT_SCALED[name](0.01), 4), 30)
    want = train(NOT_SCALED[name](0.04), 30)
    assert not np.allclose(got["a"], want["a"], 1e-3, 1e-7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"world_size": 0.5}, ValueError, r"world_size must be at least 1, got 0\.5\."),
        ({"world_size": "8"}, TypeError, r"world_size must be a number, got '8' \(str\)\."),
        ({"world_size": True}, TypeError, r"world_size must be a number, got True"),
        ({"world_size": float("nan")}, ValueError, r"world_size must be finite, got nan\."),
        ({"ratio": -0.1}, ValueError, r"ratio must be at least 0, got -0\.1\."),
        ({"ratio": 1.5}, ValueError, r"ratio must be at most 1, got 1\.5\."),
        ({"ratio": None}, TypeError, r"ratio must be a number, got None"),
        (
            {"rule": "cubic"}, ValueError,
            r"rule must be one of 'none', 'linear', 'sqrt', got 'cubic'\.",
        ),
    ],
)  # fmt: skip
def test_errors_of_the_factor(options, error, message):
    options = {"world_size": 2} | options
    with pytest.raises(error, match="learning_rate_factor: " + message):
        learning_rate_factor(**options)
    with pytest.raises(error, match="scale_learning_rate: " + message):
        scale_learning_rate(optax.sgd(1.0), **options)


@pytest.mark.parametrize("optimizer", [None, optax.sgd, 0.1])
def test_scaling_what_is_no_optimizer(optimizer):
    with pytest.raises(TypeError, match=r"scale_learning_rate: optimizer must be an optax optim"):
        scale_learning_rate(optimizer, 2)


def test_scaling_multi_steps():
    with pytest.raises(TypeError, match=r"got MultiSteps\. Pass an object like .* as optax\."):
        scale_learning_rate(MULTI, 2)
    tx = scale_learning_rate(optax.GradientTransformationExtraArgs(MULTI.init, MULTI.update), 2)
    assert rate_in(once(tx)[1]) == 0.0


def test_multi_steps_as_the_optimizer_of_a_training_step():
    """Its inner optimizer is told the work and the loss of the window that ends its steps."""
    last = optax.GradientTransformationExtraArgs(
        lambda params: jnp.float32(0),
        lambda grads, state, params=None, *, value, **extra: (grads, value),
    )
    inner = optax.chain(schedule_by_work(optax.sgd)(lambda n: 1.0 * n), last)
    train = elche.build_train_step(
        lambda p, batch, rng: batch["x"].mean() + 0 * p["w"].sum(), optax.MultiSteps(inner, 2),
        devices=jax.devices()[:1],
    )  # fmt: skip
    state = train.init({"w": np.ones(1, "f")})
    with train.windows({"x": np.arange(6, dtype="f")}, 1, shuffle=False) as windows:
        for _, window in zip(range(5), windows, strict=False):
            state, _ = train(state, window)
    scheduled, loss = elche.unreplicate(state.opt_state).inner_opt_state
    assert (float(scheduled.hyperparams["learning_rate"]), float(loss)) == (3.0, 3.0)


def test_a_schedule_does_not_begin_again_if_the_counter_wraps():
    rate = optax.linear_schedule(1.0, 0.0, 1000)
    train = elche.build_train_step(
        lambda p, batch, rng: (p["w"] * batch["x"]).mean(), schedule_by_work(optax.sgd)(rate),
        devices=jax.devices()[:1], cadence=elche.FixedTotal(16),
    )  # fmt: skip
    state = train.init({"w": np.float32(0)})
    state = state.replace(microbatches=elche.replicate(np.int32(2**31 - 20), train.devices))
    with train.windows({"x": np.ones(64, "f")}, 1) as windows:
        for window in windows:
            state, _ = train(state, window)
            assert float(state.opt_state.hyperparams["learning_rate"][0]) == 0
    assert int(state.microbatches[0]) < 0
