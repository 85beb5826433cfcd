"""Calls inside of what JAX transforms, and without its compiler: refused in words."""

import jax
import numpy as np
import pytest
from small import PARAMS, build, data

import elche_jax as elche

INSIDE = r": must be called outside of jit, vmap, grad and the like, got a call inside\. It compi"
OFF = r": jax_disable_jit must be off, as windows are compiled programs, got it on\. To look into "
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
