"""What may go wrong with devices of two kinds: bad input, errors and interrupts in a run."""

import signal
import threading
from functools import cache
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from marks import slow
from small import PARAMS, Broken, data, loss_fn, threads
from waits import comes_about, eventually

import elche_jax as elche
from elche_jax.engine.lane import Lane
from elche_jax.engine.lanes import window as window_module
from elche_jax.engine.lanes.drivers import Drivers
from elche_jax.engine.lanes.runner import LanesRunner, _finished
from elche_jax.engine.lanes.window import LanesWindow
from elche_jax.engine.runner import Launch


class Fixed(elche.Cadence):
    """Always the same counts."""

    adaptive = False

    def init(self, world_size):
        return elche.FixedTotal(2 * world_size).init(world_size)

    def update(self, state, report, verdict=elche.STABLE):
        return state


def build(devices, loss=loss_fn, **options):
    options = {"cadence": Fixed()} | options
    return elche.build_train_step(loss, optax.sgd(0.1), devices=devices, **options)


@cache
def shared(averaging, *devices):
    """A step for all tests that begin with `init`, and look only at what it does."""
    return build(devices, averaging=averaging)


LATE = elche.MeanGradient(delay=1)
late = pytest.mark.parametrize("averaging", [None, slow(LATE)])
pending = pytest.mark.parametrize("averaging", [slow(None), LATE])
"""With a window that is pending, or without; each of both in `make test` for about half."""


# -- bad input


def test_a_device_twice(mixed):
    with pytest.raises(
        ValueError,
        match=rf"^build_train_step: no device may appear twice in devices, got {mixed[1]} "
        r"2 times\.$",
    ):
        build([*mixed, mixed[1]])


NO_PARTITION = r"^build_train_step: lanes must hold each rank of the 3 devices once, got {}\.$"


@pytest.mark.parametrize(
    ("lanes", "error", "message"),
    [
        (((0, 2),), ValueError, NO_PARTITION.format(r"\(\(0, 2\),\)")),
        (((0, 1), (1, 2)), ValueError, NO_PARTITION.format(r"\(\(0, 1\), \(1, 2\)\)")),
        (((0, 2), (1,), (3,)), ValueError, NO_PARTITION.format(r"\(\(0, 2\), \(1,\), \(3,\)\)")),
        (((0, 2), (-2,)), ValueError, NO_PARTITION.format(r"\(\(0, 2\), \(-2,\)\)")),
        ((), ValueError, NO_PARTITION.format(r"\(\)")),
        (
            ((0, 1), (2,)), ValueError,
            r"^build_train_step: lanes must keep devices of several kinds apart, got cpu and twin "
            r"in one lane\.$",
        ),
        (
            lambda device: "all", ValueError,
            r"^build_train_step: lanes must keep devices of several kinds apart, got cpu and twin "
            r"in one lane\.$",
        ),
        (
            3, TypeError,
            r"^build_train_step: lanes must be a sequence of sequences of ranks, got 3 \(int\)\.$",
        ),
        (
            (0, 1, 2), TypeError,
            r"^build_train_step: lanes must be a sequence of integers, got 0 \(int\)\.$",
        ),
        (
            ((0, 2.0), (1,)), TypeError,
            r"^build_train_step: lanes\[1\] must be an integer, got 2\.0 \(float\)\.$",
        ),
        (
            lambda device: [device.id], TypeError,
            r"^build_train_step: lanes\(device\) must be hashable, got \[0\] \(list\)\.$",
        ),
    ],
)  # fmt: skip
def test_lanes_that_are_none(lanes, error, message, mixed):
    with pytest.raises(error, match=message):
        build(mixed, lanes=lanes)


def test_lanes_as_ranks_and_by_a_function(mixed):
    cpus = jax.devices("cpu")[:3]
    assert [lane.ranks for lane in build(cpus, lanes=((2, 0), (1,))).fleet.in_lanes()] == [
        (0, 2),
        (1,),
    ]
    odd = build(cpus, lanes=lambda device: device.id % 2)
    assert [lane.ranks for lane in odd.fleet.in_lanes()] == [(0, 2), (1,)]
    # an empty lane is none, one lane is none either
    assert build(cpus, lanes=((0, 1, 2), ())).fleet == Lane(tuple(cpus), (0, 1, 2))
    assert build(mixed, lanes=((0,), (1,), (2,))).fleet.ranks == ((0,), (1,), (2,))


ON_HOST = (
    r"^build_train_step: exchange must be None where devices are of several kinds, got "
    r"HostExchange\(.*\) and cpu, twin\. Every device would apply the mean by itself, and kinds "
    r"round differently\.$"
)


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": elche.HostExchange(), "averaging": elche.ParameterAveraging()},
        {"config": elche.DDPConfig(exchange="host"), "averaging": elche.ParameterAveraging()},
        {"exchange": elche.HostExchange()},
    ],
)
def test_no_exchange_on_the_host(options, mixed):
    with pytest.raises(ValueError, match=ON_HOST):
        build(mixed, **options)


THERE = r"\('cpu', 'twin'\)"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ElChe", lambda hint: {"cadence": elche.ElChe(speed_hint=hint)}),
        ("Balanced", lambda hint: {"cadence": elche.Balanced(8, speed_hint=hint)}),
        ("DDPConfig", lambda hint: {"cadence": None, "config": elche.DDPConfig(speed_hint=hint)}),
    ],
)
def test_a_hint_by_kinds_that_do_not_fit(name, options, mixed):
    with pytest.raises(
        ValueError,
        match=rf"^{name}: speed_hint must name kinds of the devices {THERE}, got 'tpu'\. Leave it "
        r"out\.$",
    ):
        build(mixed, **options({"cpu": 1, "twin": 2, "tpu": 9}))
    with pytest.raises(
        ValueError,
        match=rf"^{name}: speed_hint must have a speed for every kind of device {THERE}, got none "
        r"for 'twin'\.$",
    ):
        build(mixed, **options({"cpu": 1}))


@pytest.mark.parametrize("cadence", [elche.ElChe, lambda **hint: elche.Balanced(8, **hint)])
def test_a_hint_by_kind_needs_the_kinds(cadence):
    hinted = cadence(speed_hint={"cpu": 1, "twin": 2})
    with pytest.raises(
        ValueError,
        match=r"^(ElChe|Balanced)\.init: speed_hint must be one speed per device where the kinds "
        r"of the devices are not known, got \{'cpu': 1\.0, 'twin': 2\.0\}\. build_train_step knows "
        r"them; or call cadence\.for_kinds\.$",
    ):
        hinted.init(3)
    assert len(set(hinted.for_kinds(["cpu", "twin", "cpu"]).init(3).counts)) == 2


@pytest.mark.parametrize(
    ("hint", "error", "message"),
    [
        ({}, ValueError, r"speed_hint must have one entry per kind, got none\.$"),
        ({1: 2.0}, TypeError, r"speed_hint must map kinds of devices, such as 'cpu', to speeds, "),
        ({"cpu": 0}, ValueError, r"speed_hint\[0\] must be above 0, got 0\.$"),
        ({"cpu": "fast"}, TypeError, r"speed_hint\[0\] must be a number, got 'fast' \(str\)\.$"),
        ({"a": 1e-300, "b": 1e300}, ValueError, r"speed_hint must have no speed more than "),
    ],
)
def test_a_hint_by_kind_that_is_none(hint, error, message):
    for name, build in (("ElChe", elche.ElChe), ("DDPConfig", elche.DDPConfig)):
        with pytest.raises(error, match=f"^{name}: {message}"):
            build(speed_hint=hint)


# -- a state used again


@late
def test_a_state_that_was_given_up(averaging, mixed):
    train = shared(averaging, *mixed)
    old = train.init(PARAMS)
    with train.windows(data(), 2) as windows:
        new, _ = train(old, next(windows))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state)))
        with pytest.raises(
            ValueError,
            match=r"^train: state must be the one the last call returned, got leaf \.params\['w'\] "
            r"whose buffer was given up\. Write `state, metrics = train\(state, window\)`; what is "
            r"to be used again must be copied first \(leaf\.copy\(\)\)\.$",
        ):
            train(old, next(windows))
        new, metrics = train(new, next(windows))
    assert int(new.step[1]) == 2 and np.isfinite(metrics["loss"])


@pytest.mark.parametrize("kinds", [slow("one kind"), "two kinds"])
@pending
def test_a_copy_of_a_state_goes_on_the_same(averaging, kinds, mixed):
    devices = mixed if kinds == "two kinds" else jax.devices("cpu")[:3]
    train = shared(averaging, *devices)
    state, ends = train.init(PARAMS), []
    windows = list(train.windows(data(), 2, shuffle=False))
    state, _ = train(state, windows[0])
    copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    for start in (state, copy):
        for window in windows[1:]:
            start, _ = train(start, window)
        ends.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(start)])
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("here", "there", "rule", "got"),
    [
        (
            (0, 1, 2),
            (1, 0, 2),
            r"\(.*\(cpu\), .*\(twin\), .*\(cpu\)\), in this order",
            r".*\(twin\), ",
        ),
        slow(  # the first row has devices of two kinds, the next one others
            (0, 1), (0, 2), r".* \(twin\)\), in this order", r"cpu:0, cpu:1|TFRT_CPU_0, TFRT_CPU_1"
        ),
        ((0, 2), (0, 1), r"\([^()]*\), in this order", r".*\(twin\)"),
        ((0, 2), (2, 0), r"\([^()]*\), in this order", r".*_CPU_1, .*_CPU_0|cpu:1, cpu:0"),
    ],
)
def test_a_state_on_other_devices(here, there, rule, got, mixed):
    train, other = (shared(None, *(mixed[at] for at in ranks)) for ranks in (here, there))
    train.init(PARAMS)
    state = other.init(PARAMS)
    with (
        train.windows(data(), 2) as windows,
        pytest.raises(
            ValueError,
            match=rf"^train: state must be on the devices of this training step {rule}, got leaf "
            rf"\.params\['w'\] on ({got}).*Move it: elche_jax\.replicate\(jax\.tree\.map\(",
        ),
    ):
        train(state, next(windows))
    first = jax.tree.map(lambda leaf: leaf[0], other.init(PARAMS))
    moved = elche.replicate(first, train.devices)
    with train.windows(data(), 2) as windows:
        moved, metrics = train(moved, next(windows))
    assert np.isfinite(metrics["loss"])


def test_a_state_of_other_lanes():
    devices = jax.devices("cpu")[:2]
    train, other = build(devices), build(devices, lanes=((0,), (1,)))
    train.init(PARAMS)
    with (
        train.windows(data(), 2) as windows,
        pytest.raises(ValueError, match="in this order and one lane, got leaf"),
    ):
        train(other.init(PARAMS), next(windows))


def test_a_state_of_fewer_devices(mixed):
    train, other = build(mixed), build(mixed[:2])
    train.init(PARAMS)
    with (
        train.windows(data(), 2) as windows,
        pytest.raises(
            ValueError,
            match=r"^train: state must be replicated over the 3 devices of this training step, got "
            r"leaves stacked as \(2,\)\. ",
        ),
    ):
        train(other.init(PARAMS), next(windows))
    assert threads() == []


def test_a_stacked_array_is_no_parameter(mixed):
    train = build(mixed)
    with pytest.raises(ValueError, match=r"must be one copy, got leaf \['w'\] with the copies of"):
        train.init(elche.replicate(PARAMS, mixed))


# -- errors in a run


@pending
def test_threads_live_as_long_as_the_windows(averaging, mixed):
    train = shared(averaging, *mixed)
    state = train.init(PARAMS)
    with train.windows(data(), 2) as windows:
        state, _ = train(state, next(windows))
        assert {"elche-lane-0", "elche-lane-1", "elche-move-0", "elche-move-1"} <= set(threads())
    assert threads() == []


def test_windows_may_be_used_after_their_iterator_ended(mixed):
    train = shared(None, *mixed)
    state = train.init(PARAMS)
    windows = list(train.windows(data(), 2))
    assert threads() == []
    for window in windows:
        state, metrics = train(state, window)
        assert threads() == []
    assert state.microbatches.tolist() == [32] * 3 and np.isfinite(metrics["loss"])


def shape_error(params, batch, rng):
    raise KeyError("mine")


@late
def test_an_error_while_the_loss_is_traced(averaging, mixed):
    train = build(mixed, shape_error, averaging=averaging)
    train.init(PARAMS)
    with pytest.raises(KeyError, match="mine"):
        train.windows(data(), 4)
    assert threads() == []


def odd():
    raise ValueError("example is odd")


AT_SEVEN = {"do": odd}
"""What the step below does when it meets a microbatch that begins with 7."""


@cache
def checking(averaging):
    """A step over two lanes that looks at its microbatches while it runs."""

    def check(x):
        if x[0, 0] == 7.0:
            AT_SEVEN["do"]()
        return x

    def loss(params, batch, rng):
        shape = jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype)
        x = jax.pure_callback(check, shape, batch["x"])
        return loss_fn(params, {"x": x}, rng)

    return build(jax.devices("cpu")[:3], loss, averaging=averaging, lanes=((0, 2), (1,)))


@pytest.mark.parametrize("only", [0, 1])
@pending
def test_an_error_in_the_loss_while_it_runs(averaging, only):
    """On the devices of one lane, while the other one is fine."""
    at = 9 if only == 0 else 2
    examples = data()
    examples["x"][4 * at] = 7.0
    train = checking(averaging)
    state = train.init(PARAMS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="example is odd"):
        for window in train.windows(examples, 4, shuffle=False):
            state, metrics = train(state, window)
        jax.block_until_ready((state, metrics))
        train.settle()
    assert threads() == []


@late
def test_an_error_in_the_data_surfaces(averaging, mixed):
    train = shared(averaging, *mixed)
    state, done = train.init(PARAMS), 0
    with pytest.raises(OSError, match="example 17 is damaged"):
        for window in train.windows(Broken(), 2, shuffle=False):
            state, _ = train(state, window)
            done += 1
    assert threads() == [] and state.step.tolist() == [done] * 3 and done == 1


@pytest.mark.parametrize(
    ("owner", "at"),
    [
        (LanesWindow, "_contribute"),
        (window_module, "entries_of"),
        (LanesWindow, "_agree"),
        (Lane, "copies"),
    ],
)
@pytest.mark.parametrize("averaging", [None, slow(LATE)])
def test_an_error_of_one_lane_ends_the_others(owner, at, averaging, mixed, monkeypatch):
    """Whatever the lane was doing, nobody waits for it."""
    train = shared(averaging, *mixed)
    state, method, seen = train.init(PARAMS), getattr(owner, at), []

    def broken(*args):
        seen.append(at)
        if len(seen) == 3:
            raise OSError("lane broke")
        return method(*args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, broken)
        with pytest.raises(OSError, match="lane broke"):
            for window in train.windows(data(), 2):
                state, _ = train(state, window)
    assert threads() == []
    state = train.init(PARAMS)
    for window in train.windows(data(), 2):
        state, metrics = train(state, window)
    assert np.isfinite(metrics["loss"])


# -- interrupts


@pytest.mark.parametrize(
    ("averaging", "owner", "at", "thread"),
    [
        (None, Launch, "__call__", None),
        (None, Drivers, "put", "lane"),
        (LATE, Drivers, "put", "move"),
        slow(LATE, Launch, "__call__", None),
        slow(LATE, Drivers, "put", "lane"),
        slow(None, Drivers, "put", "move"),
    ],
)
def test_an_interrupt_anywhere_in_a_window(averaging, owner, at, thread, mixed, monkeypatch):
    train = shared(averaging, *mixed)
    state, method, seen = train.init(PARAMS), getattr(owner, at), []

    def interrupted(self, *args):
        if thread is None or args[0] == thread:
            seen.append(at)
            if len(seen) == 3:
                raise KeyboardInterrupt
        return method(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            for window in train.windows(data(), 2):
                state, _ = train(state, window)
    # while its traceback is held, and all that is in it
    assert threads() == [] and caught.tb is not None
    state = train.init(PARAMS)
    for window in train.windows(data(), 2):
        state, metrics = train(state, window)
    assert state.microbatches.tolist() == [32] * 3 and np.isfinite(metrics["loss"])


def press(main, caught, times):
    """Presses Ctrl-C until it is noticed.

    CPython sleeps through a signal that comes after it has looked for one and before it sleeps,
    which a signal of another thread does whenever it gets the interpreter's lock just then.
    """
    for _ in range(10):
        signal.pthread_kill(main, signal.SIGINT)
        if comes_about(lambda: caught.call_count >= times, 3.0):
            return
    raise AssertionError(f"Ctrl-C number {times} was not noticed")


def interrupting(signals, monkeypatch):
    """Data for `checking`: Ctrl-C comes in the middle of the second window."""
    main, sent, go_on = threading.main_thread().ident, threading.Event(), threading.Event()

    def press_once():
        if not sent.is_set():
            sent.set()
            if signals == 1:
                signal.pthread_kill(main, signal.SIGINT)
            else:  # the first one waits for the window, and so for this
                press(main, caught, 1)
                press(main, caught, 2)
                assert go_on.wait(60)

    monkeypatch.setitem(AT_SEVEN, "do", press_once)
    caught = mock.Mock(side_effect=signal.default_int_handler)
    examples = data()
    examples["x"][4 * 9] = 7.0  # of the second window, on the device of the second lane
    return examples, caught, go_on


@pending
def test_ctrl_c_waits_for_the_window_and_loses_nothing(averaging, sigint, monkeypatch):
    examples, _, _ = interrupting(1, monkeypatch)
    train = checking(averaging)
    state, windows = train.init(PARAMS), None
    with pytest.raises(KeyboardInterrupt):
        for window in train.windows(examples, 4, shuffle=False):
            state, _ = train(state, window)
            windows = window
    eventually(lambda: threads() == [])
    # the devices may be a window behind the loop
    assert windows.index in (1, 2) and state.step.tolist() == [windows.index + 1] * 3
    for window in train.windows(examples, 4, shuffle=False, cursor=windows.cursor):
        state, _ = train(state, window)
    want = train.init(PARAMS)  # Ctrl-C comes once
    for window in train.windows(examples, 4, shuffle=False):
        want, metrics = train(want, window)
    assert np.isfinite(metrics["loss"])
    for name, leaf in want.params.items():
        np.testing.assert_allclose(np.asarray(state.params[name]), np.asarray(leaf), rtol=1e-6)


@pending
def test_ctrl_c_after_the_lanes_are_done(averaging, sigint, monkeypatch):
    """When the old state is given up, and the loop does not have the new one yet."""
    pressed, whole = [], LanesRunner._whole

    def pressing(self, *args):
        if not pressed:
            pressed.append(window.index)
            signal.raise_signal(signal.SIGINT)
        return whole(self, *args)

    train = checking(averaging)
    state = train.init(PARAMS)
    monkeypatch.setattr(LanesRunner, "_whole", pressing)
    with pytest.raises(KeyboardInterrupt):
        for window in train.windows(data(), 4, shuffle=False):
            state, _ = train(state, window)
    assert pressed == [0] and state.step.tolist() == [1] * 3
    assert all(np.isfinite(leaf).all() for leaf in state.params.values())


@pytest.mark.parametrize("held", [False, True])
def test_how_many_ctrl_c_the_lanes_wait_for(held):
    """Where the first one is held back, that which is raised is the second."""
    part = mock.Mock()
    part.result.side_effect = [KeyboardInterrupt(), "done"]
    if held:
        with pytest.raises(KeyboardInterrupt):
            _finished([part], held)
        return
    done, came = _finished([part], held)
    assert done == ["done"] and isinstance(came, KeyboardInterrupt)


@pytest.mark.parametrize("of", ["engine.threads", "data.prefetch"])
def test_a_ctrl_c_while_threads_end_leaves_none(of, monkeypatch):
    """Also while something refers to their owners, as the traceback of the Ctrl-C does."""
    train, wait = checking(None), mock.Mock(side_effect=[KeyboardInterrupt(), *[True] * 99])
    state = train.init(PARAMS)
    windows = train.windows(data(), 4, shuffle=False)
    train(state, next(windows))
    with monkeypatch.context() as patch:
        patch.setattr(f"elche_jax.{of}.wait_for_end", wait)
        with pytest.raises(KeyboardInterrupt):
            windows.close()
    eventually(lambda: threads() == [])


@pytest.mark.slow  # test_how_many_ctrl_c_the_lanes_wait_for; CPython may sleep through one for 3 s
@pytest.mark.parametrize("averaging", [None, LATE])
def test_a_second_ctrl_c_does_not_wait(averaging, monkeypatch):
    examples, caught, go_on = interrupting(2, monkeypatch)
    before = signal.signal(signal.SIGINT, caught)
    train = checking(averaging)
    state = train.init(PARAMS)
    try:
        with pytest.raises(KeyboardInterrupt):
            for window in train.windows(examples, 4, shuffle=False):
                state, _ = train(state, window)
        assert caught.call_count == 2
    finally:
        go_on.set()
        signal.signal(signal.SIGINT, before)
    eventually(lambda: threads() == [])  # a thread that waits for a device ends with its work


# -- after a failure


@pending
def test_a_window_that_fails_can_be_trained_again(averaging, mixed, monkeypatch):
    """Nothing is lost: neither the old state, nor what is pending, nor the clock."""

    def run(fails):
        train = shared(averaging, *mixed)
        state, agree = train.init(PARAMS), LanesWindow._agree

        def broken(self):
            monkeypatch.setattr(LanesWindow, "_agree", agree)
            raise OSError("lane broke")

        for window in train.windows(data(), 2, shuffle=False):
            if fails and window.index == 2:
                monkeypatch.setattr(LanesWindow, "_agree", broken)
                with pytest.raises(OSError, match="lane broke"):
                    train(state, window)
            state, metrics = train(state, window)
        return state, metrics

    (want, said), (state, metrics) = run(False), run(True)
    assert metrics["loss"] == said["loss"]
    for name, leaf in want.params.items():
        np.testing.assert_array_equal(np.asarray(state.params[name]), np.asarray(leaf))


def test_64_bit_types_of_a_context_reach_the_lanes_threads(mixed):
    with jax.enable_x64(True):
        train = build(mixed)
        state = train.init({name: np.asarray(leaf, "float64") for name, leaf in PARAMS.items()})
        for window in train.windows(data(), 2):
            state, metrics = train(state, window)
        assert {leaf.dtype.name for leaf in state.params.values()} == {"float64"}
    assert np.isfinite(metrics["loss"])


def test_a_state_over_lanes_of_alike_devices_is_evaluated():
    devices = jax.devices("cpu")[:4]
    train = build(devices, lanes=((0, 3), (1, 2)))
    state = train.init(PARAMS)
    evaluate = elche.build_eval_step(lambda p, b: {"loss": loss_fn(p, b, None)}, devices=devices)
    assert evaluate(state, data(), 2) == pytest.approx(evaluate(PARAMS, data(), 2))


def test_lanes_with_an_exchange_on_the_host():
    with pytest.raises(
        ValueError,
        match=r"^build_train_step: lanes must be None with an exchange on the host, where no "
        r"devices meet, got \(\(0,\), \(1,\)\)\. Leave it out\.$",
    ):
        build(jax.devices("cpu")[:2], lanes=((0,), (1,)), exchange=elche.HostExchange())
