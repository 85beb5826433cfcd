"""Ctrl-C while a thread waits for another one."""

import signal
import threading

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax._waiting import interruptible
from elche_jax.data.prefetch import Prefetch
from elche_jax.lab import EmulatedSpeeds


class Stop(KeyboardInterrupt):
    pass


class Mine(RuntimeError):
    pass


@pytest.fixture
def torn(monkeypatch):
    """From now on a wait in this thread is interrupted as its condition takes the lock back."""
    wait, here = threading.Condition.wait, threading.current_thread()

    def torn_wait(self, timeout=None):
        if threading.current_thread() is not here:
            return wait(self, timeout)
        self.release()
        raise Stop

    return lambda: monkeypatch.setattr(threading.Condition, "wait", torn_wait)


@pytest.mark.parametrize("lock", [threading.Lock, threading.RLock])
@pytest.mark.parametrize("signalled", [Stop(1), SystemExit(143)])
def test_what_a_signal_raises_in_the_middle_of_taking_the_lock(lock, signalled):
    changed = threading.Condition(lock())
    with pytest.raises(type(signalled)) as raised, interruptible(), changed:
        changed.release()
        raise signalled
    assert raised.value is signalled


@pytest.mark.parametrize("error", [RuntimeError("mine"), ValueError("mine"), KeyboardInterrupt()])
def test_other_errors_are_what_they_are(error):
    with pytest.raises(type(error)) as raised, interruptible():
        raise error
    assert raised.value is error


@pytest.mark.parametrize("before", [ValueError(), KeyboardInterrupt()])
def test_an_error_in_the_course_of_another_one_is_what_it_is(before):
    with pytest.raises(RuntimeError, match="mine"):
        try:
            raise before
        except BaseException:
            with interruptible():
                raise RuntimeError("mine")  # noqa: B904  # its context is what is tested


def test_an_error_after_an_interrupt_is_what_it_is():
    with pytest.raises(Mine), interruptible():
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Mine  # noqa: B904  # its context is what is tested


def test_a_loop_that_waits_for_its_data_is_interrupted():
    waits, stopped = threading.Event(), threading.Event()

    def stop_it(number, frame):
        if not stopped.is_set():
            stopped.set()
            raise Stop

    def make(stop):
        assert waits.wait(60)
        while not stopped.wait(0.01):  # a signal is not noticed just before a wait begins
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        yield from ()

    before = signal.signal(signal.SIGUSR1, stop_it)
    try:
        prefetch = Prefetch(make, lambda: None)
        with pytest.raises(Stop):
            waits.set()
            next(prefetch)
        prefetch.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]).mean()


@pytest.mark.parametrize("place", ["loop", "drain", "trainer"])
def test_a_loop_that_waits_is_interrupted(place, torn):
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], emulate=EmulatedSpeeds([30.0] * 2)
    )
    data, params = {"x": np.ones((400, 3), "float32")}, {"w": np.ones(3, "float32")}
    if place == "trainer":
        handle = elche.Trainer(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2]).start(
            params, data, 2, 100, progress=False
        )
        torn()
        with pytest.raises(Stop):
            next(handle.metrics())
        handle.stop()
        return
    state = train.init(params)
    with pytest.raises(Stop), train.windows(data, batch_size=2) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 3:
                torn()
                if place == "drain":
                    windows.drain()
