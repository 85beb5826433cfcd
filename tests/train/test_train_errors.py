"""Bad input gets a clear error before anything is compiled."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax.cadence import SchedulerState
from elche_jax.lab import EmulatedSpeeds, ExtraWork, constant


def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


DATA = {"x": np.ones((20, 3), "float32")}
PARAMS = {"w": np.ones(3, "float32")}


def build(loss=loss_fn, **options):
    options.setdefault("devices", jax.devices()[:2])
    return elche.build_train_step(loss, optax.sgd(0.1), **options)


def windows(loss=loss_fn, data=DATA, batch_size=4, build_options=None, model_state=None, **options):
    """Asks for windows; whatever is wrong must come up before anything is compiled."""
    train = build(loss, **(build_options or {}))
    train.init(PARAMS, model_state=model_state)
    try:
        return train.windows(data, batch_size, **options)
    finally:
        assert train.report().compile_misses == 0


class Kind:
    """Stands for a device of another kind."""

    def __init__(self, kind, platform="gpu"):
        self.device_kind, self.platform = kind, platform


# -- build_train_step ----------------------------------------------------------------


def test_loss_fn_must_be_callable():
    with pytest.raises(TypeError, match=r"build_train_step: loss_fn must be callable, got int"):
        build(loss=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cadence": 8}, r"cadence must be a cadence such as ElChe\(\), got 8"),
        ({"cadence": elche.EveryBatch}, r"cadence must be a cadence .* got <class"),
        ({"config": {}}, r"config must be a DDPConfig, got dict"),
        ({"emulate": [1, 2]}, r"emulate must be an emulation of elche_jax\.lab, got \[1, 2\]"),
    ],
)
def test_parts_of_a_wrong_kind(options, message):
    with pytest.raises(TypeError, match="build_train_step: " + message):
        build(**options)


@pytest.mark.parametrize("optimizer", [None, optax.sgd])
def test_optimizer_of_a_wrong_kind(optimizer):
    with pytest.raises(TypeError, match=r"optimizer must be an optax optimizer, got"):
        elche.build_train_step(loss_fn, optimizer)


def test_cursor_of_a_wrong_kind():
    with pytest.raises(TypeError, match=r"cursor must be a Cursor, got dict\. Make one"):
        windows(cursor=elche.Cursor().to_dict())


def test_a_loss_that_is_a_python_number():
    train = build(lambda params, batch, rng: 1.0)
    state = train.init(PARAMS)
    for window in train.windows(DATA, 4):
        state, metrics = train(state, window)
    assert float(metrics["loss"]) == 1.0


def test_no_device():
    with pytest.raises(ValueError, match=r"devices must hold at least one device, got none"):
        build(devices=[])


def test_duplicate_device():
    one = jax.devices()[0]
    with pytest.raises(ValueError, match=r"no device may appear twice in devices, got .*0.* 2 tim"):
        build(devices=[one, jax.devices()[1], one])


def test_not_a_device():
    with pytest.raises(TypeError, match=r"devices must be jax\.Device objects .* got str"):
        build(devices=["cpu:0"])


def test_devices_of_several_kinds(monkeypatch):
    kinds = (Kind("RTX 4090"), Kind("RTX 4090"), Kind("cpu", "cpu"))
    monkeypatch.setattr("elche_jax.train.build.select_devices", lambda _: kinds)
    with pytest.raises(
        ValueError,
        match=r"devices must be of one kind and platform, got RTX 4090 x2, cpu x1\. Choose",
    ):
        build(devices=None)


def test_cadence_given_twice():
    config = elche.DDPConfig(policy="cadence")
    with pytest.raises(ValueError, match=r"must not both choose .* EveryBatch and policy='cad"):
        build(cadence=elche.EveryBatch(), config=config)


def test_nonfinite_word():
    with pytest.raises(ValueError, match=r"nonfinite must be 'raise' or 'skip', got 'ignore'"):
        build(nonfinite="ignore")


def test_emulation_for_another_number_of_devices():
    with pytest.raises(ValueError, match=r"EmulatedSpeeds: schedule .* \(2\), got 3"):
        build(emulate=EmulatedSpeeds([1, 2, 3]))
    with pytest.raises(
        ValueError,
        match=r"EmulatedSpeeds: schedule must give .* got ValueError for device 1: constant",
    ):
        build(emulate=EmulatedSpeeds(constant([5])))
    with pytest.raises(ValueError, match=r"EmulatedSpeeds: schedule\(0, 0, 0\) must be at least 0"):
        build(emulate=EmulatedSpeeds(lambda window, rank, microbatch: -1.0))
    with pytest.raises(ValueError, match=r"ExtraWork: times .* \(2\), got 1"):
        build(emulate=ExtraWork((3,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor": 0}, r"anchor must be at least 1, got 0"),
        ({"overhead_target": 0.6}, r"overhead_target must be at most 0\.5, got 0\.6"),
        ({"overhead_target": 0.001}, r"overhead_target must be at least 0\.01, got 0\.001"),
        ({"speed_hint": (1, 0.5)}, r"speed_hint ratio must be at least 1, got 0\.5"),
    ],
)
def test_knobs_of_the_cadence(options, message):
    with pytest.raises(ValueError, match="ElChe: " + message):
        elche.ElChe(**options)
    with pytest.raises(ValueError, match=message):
        elche.DDPConfig(**options)


def test_speed_hint_for_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match=r"slow_rank must be below world_size \(2\), got 5"):
        build(cadence=elche.ElChe(speed_hint=(5, 2.0)))


@pytest.mark.parametrize("policy", ["auto", "sync"])
def test_speed_hint_in_a_config_that_does_not_use_it(policy, caplog):
    with pytest.raises(ValueError, match=r"slow_rank must be below world_size \(2\), got 5"):
        build(config=elche.DDPConfig(policy=policy, speed_hint=(5, 2.0)))
    assert not caplog.records
    build(config=elche.DDPConfig(policy=policy, anchor=4, speed_hint=(1, 2.0)))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("elche: anchor=4, speed_hint=(1, 2.0) has no effect")
    build(config=elche.DDPConfig(policy=policy, anchor=4), devices=jax.devices()[:1])
    build(config=elche.DDPConfig(policy="cadence", anchor=4))
    assert len(caplog.records) == 1


def test_elche_on_one_device():
    with pytest.raises(ValueError, match=r"ElChe.*world_size must be at least 2, got 1"):
        build(devices=jax.devices()[:1], cadence=elche.ElChe())


@pytest.mark.parametrize("counts", [[(1, 2, 3)], [(0, 0)], []])
def test_recorded_counts_of_wrong_length_or_all_zero(counts):
    with pytest.raises(ValueError, match=r"Replay"):
        build(cadence=elche.Replay(counts))


def test_config_policy():
    with pytest.raises(ValueError, match=r"policy must be one of auto, sync, cadence, got 'x'"):
        elche.DDPConfig(policy="x")


def test_config_max_grad_norm():
    with pytest.raises(ValueError, match=r"DDPConfig: max_grad_norm must be above 0, got -1"):
        elche.DDPConfig(max_grad_norm=-1)


# -- init ----------------------------------------------------------------------------


def test_integer_parameters():
    with pytest.raises(
        TypeError, match=r"leaf \['n'\] is an array of shape \(2,\) and dtype int64\. Conv"
    ):
        build().init({"w": np.ones(3, "float32"), "n": np.arange(2)})


def test_no_parameters():
    with pytest.raises(ValueError, match=r"params must hold at least one array, got none"):
        build().init({})


@pytest.mark.parametrize("seed", [-1, 2**32, 2**70, np.int64(-1)])
def test_seed_out_of_range(seed):
    bound = "at least 0" if seed < 0 else "at most 4294967295"
    with pytest.raises(ValueError, match=rf"TrainStep\.init: rng must be {bound}, got {seed}"):
        build().init(PARAMS, rng=seed)


def test_a_numpy_seed_is_a_seed():
    keys = [build().init(PARAMS, rng=seed).key for seed in (7, np.int64(7))]
    np.testing.assert_array_equal(*keys)


def test_an_optimizer_that_asks_for_more():
    train = elche.build_train_step(loss_fn, optax.lbfgs(), devices=jax.devices()[:2])
    with pytest.raises(TypeError, match=r"must work with update\(grads, .*'value_fn'\."):
        train.init(PARAMS)


def test_parameters_that_are_no_pytree():
    with pytest.raises(
        TypeError, match=r"leaf params is a Kind\. Convert numbers with jnp\.asarray"
    ):
        build().init(Kind("x"))


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jax.random.key(0), r"an array of shape \(\) and dtype key<fry>"),
        (np.zeros(2, "complex64"), r"an array of shape \(2,\) and dtype complex64"),
        ("text", "a str"),
    ],
)
def test_model_state_that_cannot_be_combined(leaf, got):
    with pytest.raises(TypeError, match=rf"leaf \['m'\] is {got}\. Random keys: loss_fn gets"):
        build().init(PARAMS, model_state={"m": leaf})


def test_an_optimizer_whose_state_changes_its_type():
    def update(grads, state, params=None):
        return grads, {"n": state["n"] + 0.5}

    changing = optax.GradientTransformation(lambda params: {"n": jnp.int32(0)}, update)
    train = elche.build_train_step(loss_fn, changing, devices=jax.devices()[:2])
    with pytest.raises(
        TypeError, match=r"keep the structure.*leaf \['n'\] is float32\[\] instead of int32\[\]"
    ):
        train.init(PARAMS)
    growing = optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (g, (s, 1.0)))
    train = elche.build_train_step(loss_fn, growing, devices=jax.devices()[:2])
    with pytest.raises(TypeError, match=r"got another: structure PyTreeDef.* instead of "):
        train.init(PARAMS)


@pytest.mark.parametrize("rng", [1.5, "seed", None, True])
def test_rng_that_is_no_key(rng):
    with pytest.raises(TypeError, match=r"rng must be a key or an integer seed, got a "):
        build().init(PARAMS, rng=rng)


def test_rng_of_several_keys():
    with pytest.raises(TypeError, match=r"rng must be one key, got an array of shape \(2,\)"):
        build().init(PARAMS, rng=jax.random.split(jax.random.key(0)))


# -- windows: data -------------------------------------------------------------------


def test_windows_before_init():
    with pytest.raises(RuntimeError, match=r"init must be called before"):
        build().windows(DATA, 4)


@pytest.mark.parametrize(
    ("data", "batch_size", "error", "message"),
    [
        ({"x": np.ones((0, 3))}, 4, ValueError, r"at least one example, got 0"),
        (
            {"x": np.ones((4, 3)), "y": np.ones(5)}, 2, ValueError,
            r"same number of examples, got \{\"\['x'\]\": 4, \"\['y'\]\": 5\}",
        ),
        ({"x": np.float32(1)}, 2, ValueError, r"leading axis of examples, leaf \['x'\] is a scal"),
        ([1, 2, 3], 2, TypeError, r"got a list with leaves of type int"),
        (7, 2, TypeError, r"map-style dataset .* got int"),
        (DATA, 0, ValueError, r"batch_size must be at least 1, got 0"),
        (DATA, None, TypeError, r"batch_size must be an integer, got None"),
        (DATA, 2.0, TypeError, r"batch_size must be an integer, got 2\.0"),
        (DATA, 21, ValueError, r"at most the number of examples \(20\) with drop_last=True, got 2"),
        (
            {"x": np.array(["a"] * 20)}, 4, TypeError,
            r"array of numbers, leaf \['x'\] is of dtype <U1\. Encode it first",
        ),
        (np.array([None] * 20), 4, TypeError, r"leaf data is of dtype object"),
        (
            {"x": np.ones((20, 3), ">f4")}, 4, TypeError,
            r"machine's byte order, leaf \['x'\] is of dtype >f4\. Convert it",
        ),
        ([DATA, DATA], None, TypeError, r"got None \(NoneType\)\. A list is a pytree; .* iter"),
        (jax.random.split(jax.random.key(0), 20), 4, TypeError, r"leaf data is of dtype key<fry>"),
        (
            {"x": np.ones((20, 3), "float32"), "id": np.full(20, 2**31)}, 4, ValueError,
            r"integers of data must fit int32, which JAX makes of int64, got 2147483648\. Encode",
        ),
        (iter([]), None, ValueError, r"at least one microbatch, the iterator is empty"),
    ],
)  # fmt: skip
def test_data(data, batch_size, error, message):
    with pytest.raises(error, match=message):
        windows(data=data, batch_size=batch_size)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epochs": 0}, ValueError, r"epochs must be at least 1, got 0"),
        ({"seed": -1}, ValueError, r"seed must be at least 0, got -1"),
        ({"placement": "gpu"}, ValueError, r"placement must be 'auto', 'resident' or 'stream'"),
        ({"window_bytes": 0}, ValueError, r"window_bytes must be at least 1, got 0"),
        (
            {"window_bytes": 47, "placement": "stream"}, ValueError,
            r"window_bytes must hold at least one microbatch \(48 bytes\), got 47\. Raise",
        ),
        ({"mask_key": 3}, TypeError, r"mask_key must be a string, got int"),
        (
            {"cursor": elche.Cursor(epoch=2), "epochs": 2}, ValueError,
            r"cursor\.epoch must be below epochs \(2, .*\), got 2\. Raise epochs to go on",
        ),
    ],
)  # fmt: skip
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        windows(**options)


def test_resident_needs_arrays():
    with pytest.raises(ValueError, match=r"placement='resident' needs .* got a MapSource"):
        windows(data=Rows(), placement="resident")


class Rows:
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"x": np.ones(3, "float32")}


def test_an_iterator_has_one_epoch():
    with pytest.raises(ValueError, match=r"iterator can be used for one epoch only, got epochs=2"):
        windows(data=iter([{"x": np.ones((4, 3))}]), batch_size=None, epochs=2)


def test_batch_size_of_an_iterator():
    with pytest.raises(ValueError, match=r"that of the iterator's microbatches \(4\), got 8"):
        windows(data=iter([{"x": np.ones((4, 3))}]), batch_size=8)


def test_ragged_end_needs_losses_per_example_or_a_mask():
    with pytest.raises(ValueError, match=r"drop_last=False the loss must be a vector .* scalar"):
        windows(batch_size=8, drop_last=False)
    windows(batch_size=5, drop_last=False).close()  # nothing is ragged here


def test_mask_needs_a_dict():
    def loss(params, batch, rng):
        return jnp.mean(batch @ params["w"])

    with pytest.raises(TypeError, match=r"mask_key needs microbatches that are dicts, got an arr"):
        windows(loss, data=DATA["x"], mask_key="mask")


# -- windows: loss functions -----------------------------------------------------------


def returns(value):
    return lambda params, batch, rng: value(params, batch)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            lambda p, b: b["x"],
            r"float vector .*\(4\).* got an array of shape \(4, 3\) and ",
        ),
        (lambda p, b: jnp.int32(1), r"must be a float scalar.* shape \(\) and dtype int32"),
        (lambda p, b: jnp.ones(3), r"got an array of shape \(3,\) and dtype float32"),
        (lambda p, b: (jnp.float32(1), {}), r"got a tuple of 2\..*pass has_aux=True"),
        (lambda p, b: {"loss": jnp.float32(1)}, r"got a dict"),
        (lambda p, b: elche.Weighted(b["x"], jnp.float32(1)), r"Weighted\.loss must be a scalar"),
        (lambda p, b: elche.Weighted(jnp.float32(1), b["x"]), r"Weighted\.weight must be a scalar"),
        (
            lambda p, b: elche.Weighted(jnp.int32(1), jnp.int32(1)),
            r"\.loss must be a float",
        ),
    ],
)
def test_what_a_loss_returns(value, message):
    with pytest.raises(TypeError, match=message):
        windows(returns(value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda p, b: jnp.float32(1), r"must return \(loss, aux\), got an array of shape \(\)"),
        (lambda p, b: (jnp.float32(1), 3.0), r"aux must be a dict of metrics"),
        (lambda p, b: (jnp.float32(1), {"loss": 1.0}), r"must not use the name 'loss'"),
        (lambda p, b: (jnp.float32(1), {"m": b["x"]}), r"aux\['m'\] must be a scalar .* \(4, 3\)"),
    ],
)
def test_aux(value, message):
    with pytest.raises(TypeError, match=message):
        windows(returns(value), build_options={"has_aux": True})


@pytest.mark.parametrize(
    ("value", "has_aux", "message"),
    [
        (lambda s: jnp.float32(1), False, r"must return \(loss, model_state\), got an array"),
        (lambda s: (jnp.float32(1), {"other": s["m"]}), False, r"structure of the old one"),
        (
            lambda s: (jnp.float32(1), {"m": jnp.ones(2)}),
            False,
            r"leaf \['m'\] of the new",
        ),
        (lambda s: (jnp.float32(1), s), True, r"\(loss, \(model_state, aux\)\), got a second ele"),
    ],
)
def test_model_state(value, has_aux, message):
    def loss(params, model_state, batch, rng):
        return value(model_state)

    with pytest.raises(TypeError, match=message):
        windows(loss, model_state={"m": np.zeros(3, "float32")}, build_options={"has_aux": has_aux})


def test_the_users_own_error_comes_through():
    """A shape error inside the model surfaces as it is, at the call of windows."""

    def loss(params, batch, rng):
        return nn.Dense(3).apply({"params": params}, batch["nothing"]).mean()

    with pytest.raises(KeyError, match="nothing"):
        windows(loss)


# -- the call --------------------------------------------------------------------------


def test_state_that_was_given_up():
    train = build()
    first = train.init(PARAMS)
    with train.windows(DATA, 4) as iterator:
        state, _ = train(first, next(iterator))
        with pytest.raises(ValueError, match=r"train: state must be the one the last call retur"):
            train(first, next(iterator))
        assert not state.step.is_deleted()


@pytest.mark.parametrize("low", [0, -(2**31) - 1])
def test_streamed_integers_that_do_not_fit(low):
    numbers = np.zeros(20, "int64")
    numbers[5] = low
    numbers[6] = 2**31 - 1
    data = {"x": np.ones((20, 3), "float32"), "id": numbers}
    train = build()
    state = train.init(PARAMS)

    def loop(state):
        for window in train.windows(data, 4, placement="stream"):
            state, _ = train(state, window)

    if low == 0:
        loop(state)
    else:
        with pytest.raises(ValueError, match=r"must fit int32, .* got -2147483649\. Encode them"):
            loop(state)


def test_a_state_on_the_host():
    train = build()
    state = jax.tree.map(np.asarray, train.init(PARAMS))
    with train.windows(DATA, 4) as iterator:
        window = next(iterator)
        with pytest.raises(TypeError, match=r"on the devices .* got TrainState with host arrays\."):
            train(state, window)
        with pytest.raises(TypeError, match=r"state must be a TrainState .* got dict\."):
            train({"w": 1}, window)


@pytest.mark.parametrize("world", [1, 2])
def test_a_leaf_that_is_in_the_state_twice(world):
    """A target network that is the network itself: with several devices a crash in the runtime."""

    def loss(params, model_state, batch, rng):
        return jnp.mean((batch["x"] @ (params["w"] - model_state["w"])) ** 2), model_state

    train = build(loss, devices=jax.devices()[:world])
    state = train.init(PARAMS, model_state=PARAMS)
    with train.windows(DATA, 4) as iterator:
        window = next(iterator)
        with pytest.raises(
            ValueError,
            match=r"got leaf \.model_state\['w'\], which is in the state twice\. Copy it",
        ):
            train(state.replace(model_state=state.params), window)
        copied = state.replace(model_state=jax.tree.map(jnp.copy, state.params))
        train(copied, window)


@pytest.mark.parametrize("world", [1, 2])
def test_a_leaf_that_another_call_has_taken(world):
    """Back to the best parameters, which were not copied."""
    train = build(devices=jax.devices()[:world])
    state = train.init(PARAMS)
    best, copied = state.params, jax.tree.map(jnp.copy, state.params)
    with train.windows(DATA, 4) as iterator:
        state, _ = train(state, next(iterator))
        window = next(iterator)
        with pytest.raises(
            ValueError,
            match=r"got leaf \.params\['w'\] whose buffer was given up.* be copied first",
        ):
            train(state.replace(params=best), window)
        train(state.replace(params=copied), window)


def test_a_state_of_another_optimizer():
    train = build()
    train.init(PARAMS)
    other = elche.build_train_step(loss_fn, optax.adam(0.1), devices=jax.devices()[:2])
    state = other.init(PARAMS)
    with train.windows(DATA, 4) as iterator:
        window = next(iterator)
        with pytest.raises(ValueError, match=r"state must have the shapes .* another: structure "):
            train(state, window)
        assert not state.step.is_deleted()


def test_cadence_state_of_another_kind():
    train = build(cadence=elche.ElChe())
    with pytest.raises(TypeError, match=r"cadence_state: the value must be a .* got int"):
        train.cadence_state = 3
    with pytest.raises(ValueError, match=r"ElCheState\.from_dict: values must have the keys"):
        train.cadence_state = build(cadence=elche.EveryBatch()).cadence_state
    other = build(cadence=elche.ElChe(), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match=r"counts must have one entry per device \(2\), got 3\. S"):
        train.cadence_state = other.cadence_state.to_dict()
    good = train.cadence_state.to_dict()
    for field, value, message in (
        (
            "ms_per_batch",
            [1.0, 2.0, 3.0],
            r"ms_per_batch must have one entry per device \(2\), got",
        ),
        ("ms_per_batch", [float("nan"), 1.0], r"ms_per_batch\[0\] must be finite, got nan"),
        ("counts", [3, -1], r"counts\[1\] must be at least 0, got -1"),
        (
            "anchor",
            500,
            r"ElChe\.check_state: state must have an anchor of at most max_anchor \(200",
        ),
    ):
        bad = {**good, "cadence": {**good["cadence"], field: value}}
        with pytest.raises(ValueError, match=message):
            train.cadence_state = bad
    with pytest.raises(ValueError, match=r"shift must fit the scheduler's, got none"):
        train.cadence_state = SchedulerState(train.cadence_state.cadence, None)
    assert train.cadence_state.to_dict() == good


@pytest.mark.parametrize("kind", [elche.FixedTotal, elche.Balanced])
def test_a_stored_state_of_another_total(kind):
    train, other = build(cadence=kind(8)), build(cadence=kind(12))
    with pytest.raises(
        ValueError,
        match=rf"{kind.__name__}\.check_state: state must share out 8 micro.* got 12\. Beg",
    ):
        train.cadence_state = other.cadence_state
    assert sum(train.counts) == 8
    with pytest.raises(ValueError, match=r"Scheduler\.from_dict: values must have the keys"):
        train.cadence_state = {}


def test_something_else_than_a_window():
    train = build()
    with pytest.raises(TypeError, match=r"window must come from TrainStep\.windows, got dict"):
        train(train.init(PARAMS), DATA)


def test_the_parameters_given_are_copied():
    params = {"w": np.ones(3, "float32")}
    train = build()
    state = train.init(params)
    for window in train.windows(DATA, 4):
        state, _ = train(state, window)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    device_params = {"w": jnp.ones(3)}
    state = train.init(device_params)
    for window in train.windows(DATA, 4):
        state, _ = train(state, window)
    np.testing.assert_array_equal(device_params["w"], np.ones(3))


class Cadence:
    """A cadence of the user's own, which gives what it was told to."""

    def __init__(self, counts):
        self.counts = counts

    def init(self, world_size):
        return self

    def update(self, state, report, verdict=elche.STABLE):
        return state


@pytest.mark.parametrize("counts", [(1, 2, 3), (0, 0), (2, -1)])
def test_counts_of_the_users_own_cadence(counts):
    train = build(cadence=Cadence(counts))
    train.init(PARAMS)
    with pytest.raises(ValueError, match=r"Cadence: counts must have one entry per device \(2\)"):
        next(train.windows(DATA, 4))


def test_state_of_another_number_of_devices():
    train, other = build(), build(devices=jax.devices()[:1])
    train.init(PARAMS)
    with (
        train.windows(DATA, 4) as iterator,
        pytest.raises(
            ValueError, match=r"replicated over the 2 devices .* got leaves stacked as \(1,\)"
        ),
    ):
        train(other.init(PARAMS), next(iterator))
