"""A run that is asked to start again saves, and ends with an exit code that says so."""

import sys

import children
import pytest
from marks import slow
from resumed import GRADIENTS, content, data, run, steps

import elche_jax as elche
from elche_jax import _progress
from elche_jax.checkpoint.store import Store

CASE = GRADIENTS["dropout"]
AT = 7
"""Windows after which the run is asked; no checkpoint is due."""


@pytest.fixture(scope="module")
def train():
    """A training step for all runs, each of which begins anew."""
    return CASE.build()


@pytest.fixture
def asked(monkeypatch):
    """Asks this process; the next run is not asked any more."""
    monkeypatch.setattr(_progress, "_asked", False)
    return elche.distributed.request_restart


def test_a_loop_saves_and_goes_on_later(train, asked, tmp_path, monkeypatch):
    whole, _ = run(CASE, train=train)

    with pytest.raises(elche.RestartRequested) as ended:
        stopped(train, tmp_path, asked)
    assert (ended.value.windows, ended.value.code) == (AT, 75)
    assert steps(tmp_path) == [3, 6, AT]
    monkeypatch.setattr(_progress, "_asked", False)
    again, _ = run(CASE, tmp_path, resume="must", train=train)
    assert content(again) == content(whole)


def stopped(train, folder, asked, trained=None, at=AT, **when):
    """Trains an epoch and saves, is asked after a window, and notes the windows."""
    state = CASE.init(train)
    checkpoints = elche.Checkpoints(folder, every_windows=3, **when)
    with elche.Checkpointer(train, checkpoints) as saver:
        for window in train.windows(data(), 2, epochs=1):
            state, _ = train(state, window)
            if trained is not None:
                trained.append(window.index)
            if window.index + 1 == at:
                asked()
            saver.save(state, window)


@pytest.mark.parametrize(("on_error", "last"), [("now", 2), slow("end", 8)])
def test_a_run_that_cannot_save_is_not_given_up(
    on_error, last, train, asked, tmp_path, monkeypatch
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "save", full)
    trained = []
    with pytest.raises(elche.CheckpointError, match="No space left on device"):
        stopped(train, tmp_path, asked, trained, at=2, on_error=on_error)
    assert (steps(tmp_path), len(trained)) == ([], last)


SCRIPT = """
import os, signal, sys
import numpy as np, optax
import elche_jax as elche

signal.signal(signal.SIGUSR1, lambda *_: elche.distributed.request_restart())

class Sends(elche.Callback):
    def on_window(self, context):
        if context.window.index == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]).mean()

trainer = elche.Trainer(loss_fn, optax.sgd(0.1), cadence=elche.FixedTotal(2))
trainer.fit({"w": np.ones(2, "float32")}, {"x": np.ones((64, 2), "float32")}, 2,
            checkpoints=elche.Checkpoints(sys.argv[1]), callbacks=[Sends()])
print("ended by itself")
"""


@pytest.mark.slow
def test_a_process_that_gets_a_signal(tmp_path):
    done = children.run(sys.executable, "-c", SCRIPT, tmp_path)
    assert (done.returncode, done.stdout) == (75, "")
    assert "Traceback" not in done.stderr
    assert steps(tmp_path) == [5]
