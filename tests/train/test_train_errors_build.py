"""Bad input of build_train_step and init: a clear error before anything is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asking import DATA, PARAMS, build, loss_fn, windows
from flax import nnx

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds, ExtraWork, constant
from elche_jax.train.initial import as_key


class Kind:
    """Stands for a device of another kind."""

    def __init__(self, kind, platform="gpu"):
        self.device_kind, self.platform = kind, platform


def test_loss_fn_must_be_callable():
    with pytest.raises(TypeError, match=r"build_train_step: loss_fn must be callable, got int"):
        build(loss=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cadence": 8}, r"cadence must be an elche_jax\.Cadence such as ElChe\(\), got 8"),
        ({"cadence": elche.EveryBatch}, r"cadence must be an .*Cadence .* got <class"),
        ({"has_aux": "no"}, r"has_aux must be of type bool, got 'no'"),
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


def test_the_optimizer_of_nnx():
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param)
    message = r"optimizer must be an optax optimizer, got Optimizer around one\. Pass its tx\.$"
    with pytest.raises(TypeError, match=message):
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


def test_cadence_given_twice():
    config = elche.DDPConfig(policy="cadence")
    with pytest.raises(ValueError, match=r"must not both choose .* EveryBatch and policy='cad"):
        build(cadence=elche.EveryBatch(), config=config)


def test_nonfinite_word():
    with pytest.raises(
        ValueError, match=r"nonfinite must be one of 'raise', 'skip', 'ignore', got 'warn'"
    ):
        build(nonfinite="warn")


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


def test_a_hook_that_forgets_what_it_returns():
    class Forgets(elche.EveryBatch):
        def for_kinds(self, kinds):
            pass

    with pytest.raises(
        TypeError, match=r"^Forgets: for_kinds must return a cadence, got None \(NoneType\)\.$"
    ):
        build(cadence=Forgets())

    class Short(elche.EveryBatch):
        def update(self, state, report):  # pyright: ignore[reportIncompatibleMethodOverride]
            return state

    with pytest.raises(
        TypeError,
        match=r"^Short: update must take \(state, report, verdict\), got a function of ",
    ):
        build(cadence=Short())


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


@pytest.mark.parametrize("counts", [[(1, 2, 3)], [(0, 0)], []])
def test_recorded_counts_of_wrong_length_or_all_zero(counts):
    with pytest.raises(ValueError, match=r"Replay"):
        build(cadence=elche.Replay(counts))


def test_config_policy():
    with pytest.raises(
        ValueError, match="policy must be one of 'auto', 'sync', 'cadence', 'async', got 'x'"
    ):
        elche.DDPConfig(policy="x")


def test_config_max_grad_norm():
    with pytest.raises(
        ValueError, match=r"DDPConfig: max_grad_norm must be at least 1e-30, got -1"
    ):
        elche.DDPConfig(max_grad_norm=-1)


HOST = elche.DDPConfig(exchange="host")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_grad_norm": -1}, ValueError, "max_grad_norm must be at least 1e-30, got -1"),
        ({"compute_dtype": "int8"}, ValueError, "compute_dtype must be one of 'bfloat16', 'float1"),
        ({"verify_every": 0}, ValueError, "verify_every must be at least 1, got 0"),
        ({"timeline": "run.jsonl"}, TypeError, "timeline must be a Timeline, got 'run.jsonl'"),
        ({"exchange": "host"}, TypeError, r"exchange must be a HostExchange or None, got 'host'"),
        (
            {"exchange": elche.HostExchange(), "config": HOST}, ValueError,
            r"exchange must be left out where config sets it \(exchange='host'\), got HostExch",
        ),
        (
            {"verify_every": 2, "config": elche.DDPConfig(verify_every=3)}, ValueError,
            r"verify_every must be left out where config sets it \(3\), got 2\.",
        ),
    ],
)  # fmt: skip
def test_arguments_that_are_knobs_too(options, kind, text):
    with pytest.raises(kind, match=f"^build_train_step: {text}"):
        build(**options)


@pytest.mark.parametrize(
    ("arguments", "knobs"),
    [
        ({"max_grad_norm": 2.0, "verify_every": 3}, {"max_grad_norm": 2.0, "verify_every": 3}),
        ({"compute_dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}),
        ({"averaging": elche.MeanGradient("bfloat16")}, {"exchange_dtype": "bfloat16"}),
        (
            {"averaging": elche.MeanGradient(delay=1), "cadence": elche.ElChe()},
            {"policy": "async"},
        ),
        (
            {"cadence": elche.ElChe(3, max_batch_diff=2),
             "exchange": elche.HostExchange(9.0, True, 4, 2)},
            {"policy": "async", "exchange": "host", "exchange_timeout": 9.0, "anchor": 3,
             "max_overshoot": 4, "max_batch_diff": 2},
        ),
        (
            {"config": elche.DDPConfig(policy="async"),
             "exchange": elche.HostExchange(run_ahead=True)},
            {"policy": "async", "exchange": "host"},
        ),
    ],
)  # fmt: skip
def test_a_config_says_what_objects_and_arguments_say(arguments, knobs):
    flat = build(config=elche.DDPConfig(**knobs))
    apart = build(**arguments)
    assert apart._options == flat._options
    assert apart._scheduler._controller == flat._scheduler._controller


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


SAM = optax.contrib.sam(optax.sgd(0.01), optax.sgd(0.1), sync_period=2)
"""Says that its update takes any keyword, but it does not."""


def test_an_optimizer_that_takes_no_keywords():
    train = elche.build_train_step(loss_fn, SAM, devices=jax.devices()[:2])
    with pytest.raises(
        TypeError,
        match=r"must work with update\(grads, .* unexpected keyword argument '\w+'\. If it needs "
        r"none of the keywords, pass optax\.GradientTransformation\(it\.init, lambda grads, ",
    ):
        train.init(PARAMS)


def test_an_optimizer_that_takes_no_keywords_goes_in_as_the_message_says():
    """The steps of optax."""
    it, x = SAM, {"x": DATA["x"][:4]}
    tx = optax.GradientTransformation(
        it.init, lambda grads, state, params=None: it.update(grads, state, params)
    )
    params, opt_state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    for _ in range(4):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, x, None), opt_state, params)
        params = optax.apply_updates(params, updates)
    train = elche.build_train_step(loss_fn, tx, devices=jax.devices()[:1])
    state = train.init(PARAMS)
    for window in train.windows({"x": np.tile(x["x"], (4, 1))}, 4):
        state, _ = train(state, window)
    np.testing.assert_allclose(elche.unreplicate(state.params)["w"], params["w"], rtol=1e-6)


def test_lookahead_parameters():
    params = optax.LookaheadParams.init_synced(PARAMS)
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    train = elche.build_train_step(loss_fn, tx, devices=jax.devices()[:2])
    with pytest.raises(TypeError, match=r"For Lookahead write averaging=DiLoCo\(optax\.sgd"):
        train.init(params)


def test_lookahead_of_plain_parameters(caplog):
    """Which has two sets of them; the same steps are an average with an outer optimizer."""
    tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
    train = elche.build_train_step(loss_fn, tx, devices=jax.devices()[:2])
    with pytest.raises(
        TypeError,
        match=r"^TrainStep\.init: the optimizer must work with .* got AttributeError: .*'fast'\. "
        r"For Lookahead write averaging=DiLoCo\(optax\.sgd\(slow_step_size\), inner_steps=sync_",
    ):
        train.init(PARAMS)
    assert "assuming that only fast parameters" in caplog.text  # what optax says of it


def test_lookahead_as_an_average():
    """On one device: the steps of optax."""
    x, fast = {"x": DATA["x"][:4]}, optax.LookaheadParams.init_synced(PARAMS)
    tx = optax.lookahead(optax.sgd(0.01), sync_period=2, slow_step_size=0.5)
    opt_state = tx.init(fast)
    for _ in range(4):
        grads = jax.grad(loss_fn)(fast.fast, x, None)
        updates, opt_state = tx.update(grads, opt_state, fast)
        fast = optax.apply_updates(fast, updates)
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.01), devices=jax.devices()[:1],
        averaging=elche.DiLoCo(optax.sgd(0.5), inner_steps=2),
    )  # fmt: skip
    state = train.init(PARAMS)
    for window in train.windows({"x": np.tile(x["x"], (4, 1))}, 4):
        state, _ = train(state, window)
    np.testing.assert_allclose(elche.unreplicate(state.params)["w"], fast.slow["w"], rtol=1e-6)


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
    with pytest.raises(TypeError, match=rf"leaf \['m'\] is {got}\. For random numbers, use"):
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


@pytest.mark.parametrize("rng", [1.5, "seed", None, True, jax.eval_shape(jax.random.key, 0)])
def test_rng_that_is_no_key(rng):
    with pytest.raises(TypeError, match=r"rng must be a key or an integer seed, got an? "):
        build().init(PARAMS, rng=rng)


@pytest.mark.parametrize("shape", [(), (3,), (4,)])
def test_a_raw_key_of_another_kind(shape):
    got = rf"got an array of shape {re.escape(str(shape))} and dtype uint32"
    todo = r"Pass a raw key of another kind as jax\.random\.wrap_key_data\(it, impl=\.\.\.\)\."
    with pytest.raises(
        TypeError,
        match=rf"^TrainStep\.init: rng must be a key or an integer seed, {got}\. {todo}$",
    ):
        build().init(PARAMS, rng=jnp.zeros(shape, jnp.uint32))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_whose_buffer_was_given_up(make):
    key = make(0)
    key.delete()
    with pytest.raises(
        ValueError,
        match=r"^TrainStep\.init: rng must be a key or an integer seed, got an array of shape .* "
        r"whose buffer was given up\. Make a new key\.$",
    ):
        build().init(PARAMS, rng=key)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_may_be_traced(make):
    """A model is initialised under `jax.eval_shape` for its shapes."""
    assert jax.eval_shape(as_key, make(0)).shape == ()


def test_rng_of_several_keys():
    with pytest.raises(TypeError, match=r"rng must be one key, got an array of shape \(2,\)"):
        build().init(PARAMS, rng=jax.random.split(jax.random.key(0)))


@pytest.mark.parametrize(
    ("fn", "got"),
    [
        (lambda updates: jax.tree.map(jnp.atleast_2d, updates), r"leaf .* is float32\[1, "),
        (lambda updates: {}, "structure "),
    ],
)
def test_an_optimizer_whose_updates_do_not_fit_the_parameters(fn, got):
    odd = optax.stateless(lambda updates, params: fn(updates))
    train = elche.build_train_step(loss_fn, odd, devices=jax.devices()[:1])
    message = "TrainStep.init: updates of the optimizer must have the structure and shapes of the "
    with pytest.raises(TypeError, match=rf"^{message}parameters, got others: {got}"):
        train.init(PARAMS)
