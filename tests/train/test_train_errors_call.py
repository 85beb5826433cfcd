"""Bad input of the call, and of what is set on a training step."""

import copy
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from asking import DATA, PARAMS, build, loss_fn

import elche_jax as elche
from elche_jax.cadence import SchedulerState

shared = cache(build)
"""A step for tests that begin with `init`."""


def test_state_that_was_given_up():
    train = shared()
    first = train.init(PARAMS)
    with train.windows(DATA, 4) as iterator:
        state, _ = train(first, next(iterator))
        with pytest.raises(ValueError, match=r"train: state must be the one the last call retur"):
            train(first, next(iterator))
        assert not state.step.is_deleted()
        readers = {
            "unreplicate": lambda: elche.unreplicate(first.params),
            "check_replicas": lambda: elche.check_replicas(first.params),
            "TrainStep.init": lambda: train.init(first.params),
            "predict": lambda: elche.predict(lambda p, b: b["x"], first.params, DATA, 4),
        }
        for where, read in readers.items():
            with pytest.raises(ValueError, match=rf"^{where}: every leaf must still be there") as e:
                read()
            assert str(e.value).endswith("before that call: elche_jax.unreplicate(state.params).")


@pytest.mark.parametrize("low", [0, -(2**31) - 1])
def test_streamed_integers_that_do_not_fit(low):
    numbers = np.zeros(20, "int64")
    numbers[5] = low
    numbers[6] = 2**31 - 1
    data = {"x": np.ones((20, 3), "float32"), "id": numbers}
    train = shared()
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
    train = shared()
    state = jax.tree.map(np.asarray, train.init(PARAMS))
    with train.windows(DATA, 4) as iterator:
        window = next(iterator)
        message = (
            r"on the devices .* got TrainState whose \.params\['w'\] is on the host, an array "
        )
        message += r"of shape \(.*\. To move a whole state with an axis over devices: elche"
        with pytest.raises(TypeError, match=message):
            train(state, window)
        train(elche.replicate(jax.tree.map(lambda leaf: leaf[0], state), train.devices), window)
        with pytest.raises(TypeError, match=r"state must be a TrainState .* got dict\."):
            train({"w": 1}, window)


@cache
def injected(world):
    """A step whose state has a learning rate, for tests that begin with `init`."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    return elche.build_train_step(loss_fn, tx, devices=jax.devices()[:world])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("value", "error", "got"),
    [
        (
            0.5,
            TypeError,
            r"whose \.opt_state\.hyperparams\['learning_rate'\] is on the host, ",
        ),
        (
            jnp.float32(0.5),
            ValueError,
            r"another: leaf \.opt_state\.hyperparams\['learning_rate'\] is",
        ),
    ],
)
def test_a_learning_rate_that_is_not_on_every_device(value, error, got, world):
    """What is replaced in a state needs a copy for every device; the message says how."""
    train = injected(world)
    state = train.init(PARAMS)
    with train.windows(DATA, 4) as iterator:
        state, _ = train(state, next(iterator))
        rates = state.opt_state.hyperparams
        rates["learning_rate"] = value
        window = next(iterator)
        message = got + r".* Put what you replace in it on every device: elche_jax\.replicate\("
        with pytest.raises(error, match=message):
            train(state, window)
        before = elche.unreplicate(state.params)["w"]
        rates["learning_rate"] = elche.replicate(np.float32(0), train.devices)
        state, _ = train(state, window)
        np.testing.assert_array_equal(elche.unreplicate(state.params)["w"], before)


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
        match=rf"{kind.__name__}\.check_state: state must share out 8 micro.* got 12\. Start",
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
    train = shared()
    state = train.init(params)
    for window in train.windows(DATA, 4):
        state, _ = train(state, window)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    device_params = {"w": jnp.ones(3)}
    state = train.init(device_params)
    for window in train.windows(DATA, 4):
        state, _ = train(state, window)
    np.testing.assert_array_equal(device_params["w"], np.ones(3))


class Cadence(elche.Cadence):
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


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("TrainStep", shared),
        ("EvalStep", lambda: elche.build_eval_step(lambda params, batch: batch)),
        ("Trainer", lambda: elche.Trainer(loss_fn, optax.sgd(0.1))),
    ],
)
def test_what_is_bound_to_its_process(name, make, way):
    message = (
        rf"^{name}: must not be copied or pickled, as it has devices and threads of this process\. "
        r"Build another one where it is needed\.$"
    )
    with pytest.raises(TypeError, match=message):
        way(make())
