"""Ctrl-C while a thread waits for another one."""

import signal
import sys
import threading
import time
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche
from elche_jax._waiting import Condition, HeldInterrupt, interruptible
from elche_jax.data.prefetch import Prefetch
from elche_jax.engine.runner import Runner
from elche_jax.engine.timing import LoopClock
from elche_jax.lab import EmulatedSpeeds
from elche_jax.train.timing import Timing


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


def test_a_block_under_a_condition_begins_and_ends_without_a_function_of_python():
    """There a signal is handled: before the block with the lock taken, or before its release."""
    calls, changed = [], Condition()
    sys.setprofile(lambda frame, event, arg: calls.append((event, frame.f_code.co_name)))
    try:
        with changed:
            taken = "taken"
    finally:
        sys.setprofile(None)
    assert taken and [name for event, name in calls if event == "call"] == []


def test_no_signal_leaves_a_condition_taken():
    """As many as 300, at random moments of blocks, one after the other."""
    changed, came = Condition(), 0

    def stop(number, frame):
        raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    try:
        while came < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + came * 1e-6)
                # not for ever: what is raised while garbage is collected, Python only prints
                until = time.monotonic() + 1
                while True:
                    with changed:
                        pass
                    if time.monotonic() > until:
                        break
            except Stop:
                came += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    taken = []
    thread = threading.Thread(target=lambda: taken.append(changed.lock.acquire(timeout=60)))
    thread.start()
    thread.join()
    assert taken == [True]


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


def test_an_interrupt_is_held_back_once(sigint):
    with HeldInterrupt() as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.came
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as raised, HeldInterrupt() as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGINT)
        raise ValueError("mine")
    assert isinstance(raised.value.__context__, ValueError)


def test_a_handler_of_ones_own_is_left_alone(sigint):
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with HeldInterrupt() as interrupt:
        interrupt.begin()
        signal.raise_signal(signal.SIGINT)
        assert seen == [1] and not interrupt.came


@pytest.mark.parametrize(("world", "name"), [(1, "window"), (2, "combine"), (2, "last")])
def test_ctrl_c_while_a_program_takes_the_state_over_loses_nothing(
    world, name, sigint, monkeypatch
):
    data, seen, get = (
        {"x": np.float32(np.random.default_rng(0).normal(size=(48, 3)))},
        [],
        Runner._get,
    )

    def pressing(self, program):
        run = get(self, program)

        def called(*args):
            results = run(*args)  # the arguments are given up
            seen.append(program.key[0])
            if seen.count(name) == 2 and seen[-1] == name:
                signal.raise_signal(signal.SIGINT)
            return results

        return called

    def fit(cursor=None):
        """Trains from a window on; how far it came, and whether it was interrupted."""
        nonlocal state
        interrupted = False
        try:
            for window in train.windows(data, 48 // 24 // world, shuffle=False, cursor=cursor):
                state, _ = train(state, window)
                train._cache.wait()  # from then on windows may be one program
                cursor = window.cursor
        except KeyboardInterrupt:
            interrupted = True
        return cursor, interrupted

    train = elche.build_train_step(
        loss_fn, optax.adam(0.1), devices=jax.devices()[:world], cadence=elche.EveryBatch()
    )
    state = train.init({"w": np.ones(3, "float32")})
    fit()
    whole, state = state, train.init({"w": np.ones(3, "float32")})
    monkeypatch.setattr(Runner, "_get", pressing)
    monkeypatch.setattr(Timing, "timed", lambda *_: name != "last")  # whatever windows take
    cursor, interrupted = fit()
    assert interrupted and seen.count(name) == 2
    assert int(elche.unreplicate(state.step)) == cursor.window < 24
    assert fit(cursor) == (mock.ANY, False)
    np.testing.assert_array_equal(state.params["w"], whole.params["w"])


@pytest.mark.parametrize("how", ["close", "end", "error"])
def test_ctrl_c_in_the_last_window_of_a_loop_is_raised_once(how, sigint, monkeypatch):
    begin, pressed = HeldInterrupt.begin, []

    def pressing(self):
        held = begin(self)
        if held and not pressed:
            pressed.append("Ctrl-C")
            signal.raise_signal(signal.SIGINT)
        return held

    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], cadence=elche.EveryBatch()
    )
    data, state = {"x": np.ones((24, 3), "float32")}, train.init({"w": np.ones(3, "float32")})
    windows = train.windows(data, 2)
    monkeypatch.setattr(HeldInterrupt, "begin", pressing)
    state, _ = train(state, next(windows))
    assert pressed and int(elche.unreplicate(state.step)) == 1
    with pytest.raises(KeyboardInterrupt):
        if how == "close":
            windows.close()
        with windows:
            assert how == "end"
    windows.close()
    for window in train.windows(data, 2):
        state, _ = train(state, window)


def test_a_window_whose_wait_was_interrupted_is_waited_for_again():
    waits, done = [KeyboardInterrupt, None], []

    class Token:
        def block_until_ready(self):
            if error := waits.pop(0):
                raise error

    clock = LoopClock(done.append)
    clock.combining(7, 0.0, Token())
    with pytest.raises(KeyboardInterrupt):
        clock.wait(threading.Condition(), lambda: False)
    clock.wait(threading.Condition(), lambda: False)
    assert [times.window for times in done] == [7]
