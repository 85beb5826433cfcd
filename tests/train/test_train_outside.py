"""Calls inside of what JAX transforms, without its compiler, or checked by it: refused in words."""

import threading

import jax
import numpy as np
import pytest
from small import PARAMS, build, data

import elche_jax as elche

INSIDE = r": must be called outside of jit, vmap, grad and the like, got a call inside\. It compi"
OFF = r": jax_disable_jit must be off, as windows are compiled programs, but it is on\. To look "
X = np.ones(2, "float32")


def calls():
    """Every entry, by the name that messages give it."""
    train, evaluate = build(), elche.build_eval_step(lambda params, batch: {"x": batch["x"]})
    state = train.init(PARAMS)
    with train.windows(data(8), 4) as windows:
        window = next(windows)
    return {
        "build_train_step": build,
        "build_eval_step": lambda: elche.build_eval_step(print),
        "TrainStep.init": lambda: train.init(PARAMS),
        "windows": lambda: train.windows(data(8), 4),
        "train": lambda: train(state, window),
        "TrainStep.average": lambda: train.average(state),
        "evaluate": lambda: evaluate(PARAMS, data(8), 4),
        "predict": lambda: elche.predict(lambda params, x: x, None, X, 1),
        "Trainer": lambda: elche.Trainer(print, None),
    }


WHERE = {"evaluate": "build_eval_step", "Trainer": "build_train_step"}
"""What is part of another one."""


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_inside_of_a_transformation(transform):
    for name, call in calls().items():
        with pytest.raises(ValueError, match="^" + WHERE.get(name, name) + INSIDE):
            transform(lambda x, call=call: (call(), x)[1])(X[0] if transform is jax.grad else X)


def test_without_the_compiler():
    for name, call in calls().items():
        with (
            jax.disable_jit(),
            pytest.raises(ValueError, match="^" + WHERE.get(name, name) + OFF),
        ):
            call()


@pytest.mark.parametrize("name", ["debug_nans", "debug_infs"])
def test_with_checks_of_every_program(name):
    """They would see metrics that are not known yet, and windows that are dropped on purpose."""
    message = rf": jax_{name} must be off, as programs may return such values .* but it is on\. "
    message += rf"NonFiniteError names the microbatches; .* under jax\.{name}\(True\)\.$"
    for entry, call in calls().items():
        with getattr(jax, name)(True):
            if entry in ("build_eval_step", "evaluate", "predict"):
                call()
                continue
            with pytest.raises(ValueError, match="^" + WHERE.get(entry, entry) + message):
                call()


@pytest.mark.parametrize("devices", [1, 2])
def test_under_a_mesh(devices):
    """Which JAX takes for that of the programs; building runs none."""
    mesh = jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices])
    message = r": must be called without a mesh of jax\.set_mesh, got one with the axes "
    message += rf"{{'batch': {devices}}}\. .* call it outside of jax\.set_mesh\.$"
    for name, call in calls().items():
        if name.startswith("build_") or name == "Trainer":
            continue
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=WHERE.get(name, name) + message):
            call()


def test_under_a_mesh_of_the_one_device():
    train = build(1)
    with jax.set_mesh(jax.make_mesh((1,), ("batch",), devices=train.devices)):
        state = train.init(PARAMS)
        for window in train.windows(data(8), 4):
            state, _ = train(state, window)
    assert int(state.step[0]) == 2


def test_a_state_that_a_transformation_has_in_hand():
    """`jax.jit` around the user's own step."""
    train = build()
    state = train.init(PARAMS)
    with train.windows(data(8), 4) as windows:
        window = next(windows)
    with pytest.raises(ValueError, match=r"^train" + INSIDE):
        jax.jit(lambda state: train(state, window))(state)
    state, _ = train(state, window)
    assert int(state.step[0]) == 1


def test_a_step_is_used_by_one_thread_at_a_time(monkeypatch):
    """Two that train with the buffers of one step crashed."""
    train = build()
    state, said = train.init(PARAMS), []

    def second():
        for call in (lambda: train.init(PARAMS), lambda: train.windows(data(), 4)):
            with pytest.raises(RuntimeError, match="by one thread at a time") as found:
                call()
            said.append(found)

    def meanwhile(*arguments):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return inner(*arguments)

    with train.windows(data(), 4) as windows:
        inner = train._last_pipeline._dispatch
        monkeypatch.setattr(train._last_pipeline, "_dispatch", meanwhile)
        train(state, next(windows))
    assert len(said) == 2
    third = threading.Thread(target=lambda: said.append(train.init(PARAMS)))
    third.start()
    third.join()
    assert len(said) == 3, "one after the other they may"
