"""Devices made slower on purpose: schedules, real waits, extra work without effect."""

import threading
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from marks import slow

import elche_jax as elche
from elche_jax import lab
from elche_jax.data.split import Range
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.loss import LossFn
from elche_jax.engine.mapped import AXIS, Mapped, stacked_sharding
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.microbatch import Microbatches
from elche_jax.engine.place import Placer
from elche_jax.engine.replicas import replicate
from elche_jax.engine.state import TrainState
from elche_jax.lab import (
    AtWork,
    EmulatedSpeeds,
    ExtraWork,
    constant,
    drift,
    jitter,
    throttle,
)

PLACES = st.tuples(st.integers(0, 1000), st.integers(0, 2), st.integers(0, 100))

# -- schedules


@given(PLACES)
def test_constant_depends_on_the_device_alone(place):
    assert constant([5, 10.5, 20])(*place) == (5, 10.5, 20)[place[1]]


@given(place=PLACES, at=st.integers(0, 900), length=st.integers(1, 100))
def test_throttle_slows_one_device_in_its_windows(place, at, length):
    base = constant([5, 5, 20])
    window, rank, _ = place
    forever = throttle(base, rank=2, factor=3, at=at)
    assert forever(*place) == (60 if rank == 2 and window >= at else base(*place))
    bounded = throttle(base, rank=2, factor=3, at=at, until=at + length)
    slow = rank == 2 and window in range(at, at + length)
    assert bounded(*place) == (60 if slow else base(*place))


@given(PLACES)
def test_drift_grows_by_a_share_of_the_first_time(place):
    window, rank, _ = place
    schedule = drift(constant([8, 8, 8]), rank=1, per_window=0.25)
    assert schedule(*place) == (8 + 2 * window if rank == 1 else 8)


@given(place=PLACES, share=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_jitter_stays_within_its_share_and_is_a_function_of_its_arguments(place, share, seed):
    time_ms = jitter(constant([10, 10, 10]), share, seed)(*place)
    assert 10 * (1 - share) - 1e-9 <= time_ms <= 10 * (1 + share) + 1e-9
    assert jitter(constant([10, 10, 10]), share, seed)(*place) == time_ms


def test_jitter_is_evenly_distributed_and_differs_everywhere():
    schedule = jitter(constant([10, 10]), share=0.5, seed=1)
    times = [schedule(w, d, m) for w in range(20) for d in range(2) for m in range(20)]
    assert len(set(times)) == 800
    assert np.mean(times) == pytest.approx(10, abs=0.3)  # 3 standard errors
    quarters, _ = np.histogram(times, bins=4, range=(5, 15))
    assert quarters.sum() == 800
    assert quarters.min() > 140
    other = jitter(constant([10, 10]), share=0.5, seed=2)
    assert other(0, 0, 0) != schedule(0, 0, 0)


def test_schedules_compose():
    schedule = throttle(drift(constant([10, 10]), 0, 0.1), rank=0, factor=2, at=5)
    assert schedule(5, 0, 0) == 30
    assert schedule(5, 1, 0) == 10


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: constant(5), TypeError, r"constant: ms must be a sequence of numbers"),
        (
            lambda: constant([5, -1]),
            ValueError,
            r"constant: ms\[1\] must be at least 0, got -1\.",
        ),
        (
            lambda: constant([5, float("nan")]),
            ValueError,
            r"constant: ms\[1\] must be finite, got nan\.",
        ),
        (
            lambda: constant([5, 5])(0, 2, 0),
            ValueError,
            r"constant: ms must have one entry per device, got 2, none for device 2\.",
        ),
        (
            lambda: throttle(constant([5]), rank=-1, factor=2, at=0),
            ValueError,
            r"throttle: rank must be at least 0, got -1\.",
        ),
        (
            lambda: throttle(constant([5]), rank=0, factor=0, at=0),
            ValueError,
            r"throttle: factor must be above 0, got 0\.",
        ),
        (
            lambda: throttle(constant([5]), rank=0, factor=2, at=-1),
            ValueError,
            r"throttle: at must be at least 0, got -1\.",
        ),
        (
            lambda: throttle(constant([5]), rank=0, factor=2, at=3, until=3),
            ValueError,
            r"throttle: until must be at least 4, got 3\.",
        ),
        (
            lambda: throttle(constant([5]), rank=0, factor=2, at=0.5),
            TypeError,
            r"throttle: at must be an integer, got 0\.5 \(float\)\.",
        ),
        (
            lambda: drift(constant([5]), rank=True, per_window=0.1),
            TypeError,
            r"drift: rank must be an integer, got True \(bool\)\.",
        ),
        (
            lambda: drift(constant([5]), rank=0, per_window=-0.1),
            ValueError,
            r"drift: per_window must be at least 0, got -0\.1\.",
        ),
        (
            lambda: jitter(constant([5]), share=1.5),
            ValueError,
            r"jitter: share must be at most 1, got 1\.5\.",
        ),
        (
            lambda: jitter(constant([5]), share=0.5, seed=-1),
            ValueError,
            r"jitter: seed must be at least 0, got -1\.",
        ),
        *(
            (
                lambda change=change: change([5, 20]),
                TypeError,
                rf"{name}: base must be a schedule, got \[5, 20\] \(list\)\. Pass constant",
            )
            for name, change in {
                "throttle": lambda base: throttle(base, rank=0, factor=2, at=0),
                "drift": lambda base: drift(base, rank=0, per_window=0.1),
                "jitter": lambda base: jitter(base, share=0.1),
            }.items()
        ),
        (
            lambda: EmulatedSpeeds([5, 5]).check(3),
            ValueError,
            r"EmulatedSpeeds: schedule must have one entry per device \(3\), got 2\.",
        ),
        (
            lambda: EmulatedSpeeds([5, -5]).check(2),
            ValueError,
            r"EmulatedSpeeds: schedule\[1\] must be at least 0, got -5\.",
        ),
        (
            lambda: EmulatedSpeeds(5).check(2),
            TypeError,
            r"EmulatedSpeeds: schedule must be a sequence of numbers, got 5 \(int\)\.",
        ),
        (
            lambda: ExtraWork((1, 2)).check(3),
            ValueError,
            r"ExtraWork: times must have one entry per device \(3\), got 2\.",
        ),
        (
            lambda: ExtraWork((1, 0)).check(2),
            ValueError,
            r"ExtraWork: times\[1\] must be at least 1, got 0\.",
        ),
        (
            lambda: ExtraWork((1, 1.5)).check(2),
            TypeError,
            r"ExtraWork: times\[1\] must be an integer, got 1\.5 \(float\)\.",
        ),
        (
            lambda: ExtraWork(3).check(2),
            TypeError,
            r"ExtraWork: times must be a sequence of integers, got 3 \(int\)\.",
        ),
    ],
)
def test_what_is_out_of_range_is_an_error(make, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("ms", "kind", "message"),
    [
        (-5, ValueError, "be at least 0, got -5"),
        (float("nan"), ValueError, "be finite, got nan"),
        (None, TypeError, r"be a number, got None \(NoneType\)"),
    ],
)
def test_times_of_later_microbatches_are_checked_too(ms, kind, message):
    emulation = EmulatedSpeeds(lambda *place: ms if place == (3, 1, 2) else 1.0)
    emulation.check(2)
    seconds = emulation.on_host()
    assert (seconds(3, 1, 2), seconds(3, 0, 3)) == (0.002, 0.003)
    with pytest.raises(kind, match=rf"^EmulatedSpeeds: schedule\(3, 1, 2\) must {message}\.$"):
        seconds(3, 1, 3)


def test_what_fits_passes_the_check():
    EmulatedSpeeds([5, 10]).check(2)
    EmulatedSpeeds(np.array([5.0, 10.0])).check(2)
    EmulatedSpeeds(constant([5, 10])).check(2)
    ExtraWork([1, 3]).check(2)


# -- waits


class Recorded:
    """A schedule that notes what it was asked for, in which order."""

    def __init__(self, ms):
        self.ms = ms
        self.asked = []
        self._lock = threading.Lock()

    def __call__(self, window, rank, microbatch):
        with self._lock:
            self.asked.append((window, rank, microbatch))
        return self.ms[rank]

    def of(self, rank):
        return [place for place in self.asked if place[1] == rank]


class Emulated:
    """The loop of a window round a counter, with a hook, on some devices."""

    def __init__(self, hook, world_size):
        self.devices = jax.devices()[:world_size]
        self.sharding = stacked_sharding(self.devices)

        def loop(count, step, fresh):
            rank = jnp.int32(0) if world_size == 1 else jax.lax.axis_index(AXIS)
            zero = hook.begin(rank, step, fresh > 0)

            def around(i, total):
                return hook.around(lambda i, t: t + 1, rank, i, total)

            total = jax.lax.fori_loop(0, count, around, jnp.float32(0) + zero)
            return total + hook.end(rank, count, total), None

        one = jax.ShapeDtypeStruct((world_size,), jnp.int32)
        self.program = Mapped(loop, self.devices, donate=()).compile(one, one, one)

    def __call__(self, counts, step=0, fresh=True):
        """Runs a window; gives the milliseconds from dispatch to each device's end."""
        n = len(self.devices)
        rows = [counts, [step] * n, [int(fresh)] * n]
        args = [jax.device_put(np.array(row, np.int32), self.sharding) for row in rows]
        begun = time.perf_counter()
        total, _ = self.program(*args)
        ends = {}
        for shard in total.addressable_shards:
            shard.data.block_until_ready()
            ends[shard.device] = 1e3 * (time.perf_counter() - begun)
        np.testing.assert_array_equal(total, counts)
        return [ends[device] for device in self.devices]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_microbatch_lasts_at_least_as_long_as_asked(world_size):
    ms = [4.0, 2.0, 1.0][:world_size]
    counts = [3, 10, 0][:world_size]
    took = Emulated(EmulatedSpeeds(ms), world_size)(counts)
    for rank in range(world_size):
        assert took[rank] >= ms[rank] * counts[rank]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_microbatch_of_every_device_is_asked_for_once(world_size):
    schedule = Recorded([0.0] * world_size)
    emulated = Emulated(EmulatedSpeeds(schedule), world_size)
    for step, counts in enumerate([[3, 0, 5], [1, 4, 0]]):
        schedule.asked.clear()
        emulated(counts[:world_size], step=step)
        for rank in range(world_size):
            assert schedule.of(rank) == [(step, rank, i) for i in range(counts[rank])]


def test_a_window_of_several_calls_counts_on():
    schedule = Recorded([0.0, 0.0])
    emulated = Emulated(EmulatedSpeeds(schedule), 2)
    emulated([2, 1], step=7, fresh=True)
    emulated([2, 0], step=7, fresh=False)
    emulated([1, 1], step=7, fresh=False)
    assert schedule.of(0) == [(7, 0, i) for i in range(5)]
    assert schedule.of(1) == [(7, 1, i) for i in range(2)]
    schedule.asked.clear()
    emulated([1, 1], step=8, fresh=True)
    assert schedule.of(0) == [(8, 0, 0)]


def test_leaves_without_elements_are_no_hindrance():
    hook = EmulatedSpeeds([0.0])
    jax.block_until_ready(hook.begin(jnp.int32(0), jnp.int32(0), True))
    done = hook.end(jnp.int32(0), jnp.int32(1), {"empty": jnp.zeros((0, 3)), "x": jnp.ones(2)})
    assert float(done) == 0


def test_times_may_change_from_microbatch_to_microbatch():
    def schedule(window, rank, microbatch):
        return 20.0 if (window, microbatch) == (1, 2) else 0.0

    emulated = Emulated(EmulatedSpeeds(schedule), 1)
    emulated([3], step=0)
    assert emulated([3], step=1)[0] >= 20


# -- extra work


def loss_fn(params, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    error = (jnp.where(kept, batch["x"], 0) @ params["w"] - batch["y"]) ** 2
    return jnp.tanh(error), {"error": error}


def sums_of(hook, world_size, counts):
    """A program's sums over a window of random data, one row per device."""
    devices = jax.devices()[:world_size]
    work = Microbatches(LossFn(loss_fn, has_aux=True), "vector", ("error",), "threefry2x32")
    program = CollectiveProgram(
        GradientRule(work, optax.sgd(0.1), world_size, MergeRules((), ())), hook=hook
    )
    params = {"w": np.linspace(-1, 1, 4, dtype=np.float32)}
    key = np.asarray(jax.random.key_data(jax.random.key(3)))
    one = TrainState(params, (), None, key, np.int32(11), np.int32(0), np.int32(0))
    state = replicate(one, devices)
    zeros = jax.eval_shape(program.zeros, one)
    sums = replicate(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), zeros), devices)
    rng = np.random.default_rng(0)
    pieces = Pieces(
        tuple(
            {
                "x": jax.device_put(
                    rng.normal(size=(world_size, length, 8, 4)).astype(np.float32),
                    stacked_sharding(devices),
                ),
                "y": jax.device_put(
                    rng.normal(size=(world_size, length, 8)).astype(np.float32),
                    stacked_sharding(devices),
                ),
            }
            for length in (2, 1)
        )
    )
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    ranges = [Range(*share) for share in zip(starts, counts, strict=True)]
    placer = Placer(lanes_of(devices))
    call_args = CallArgs(placer.rows(placer.call_args(ranges, 0, True, None, (0, 0))))
    args = (state, sums, pieces, call_args)
    (sums, _), _ = Mapped(program.accumulate, devices, donate=()).compile(*args)(*args)
    return jax.tree.map(np.asarray, sums)


@pytest.mark.parametrize(
    ("counts", "times"),
    [slow((3, 2), (1, 1)), ((3, 2), (1, 4)), slow((0, 3), (2, 3)), slow((3,), (5,))],
)
def test_extra_work_changes_no_bit_of_the_sums(counts, times):
    plain = sums_of(None, len(counts), counts)
    extra = sums_of(ExtraWork(times), len(counts), counts)
    assert np.abs(plain.own.grads[0]).sum() > 0
    for want, got in zip(jax.tree.leaves(plain), jax.tree.leaves(extra), strict=True):
        assert want.tobytes() == got.tobytes()


def test_extra_work_really_computes_so_often():
    # a pure callback stands for the gradient: XLA moves it out of a loop where it may
    calls = []

    def compute(x):
        calls.append(float(x))
        return np.float32(x + 1)

    def body(i, carry):
        weight, total = carry
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return weight, total + jax.pure_callback(compute, shape, weight)

    hook = ExtraWork((4,))

    @jax.jit
    def loop(weight):
        def around(i, carry):
            return hook.around(body, jnp.int32(0), i, carry)

        return jax.lax.fori_loop(0, 3, around, (weight, jnp.float32(0)))

    _, total = loop(jnp.float32(6))
    assert float(total) == 21
    assert calls == [6.0] * 12


# -- the end of a program


def waiting(at_work):
    """A thread that waits as the end of a program does."""
    thread = threading.Thread(target=at_work.wait)
    thread.start()
    return thread


def test_the_end_waits_for_every_device(monkeypatch):
    monkeypatch.setattr(lab, "QUIET_S", 0.01)
    at_work = AtWork()
    for device in range(2):
        at_work.begins(device)
    thread = waiting(at_work)
    at_work.ends(0)
    thread.join(0.1)
    assert thread.is_alive(), "device 1 is at work"
    at_work.ends(1)
    thread.join(30)
    assert not thread.is_alive()


def test_the_end_waits_for_what_is_in_a_queue_however_long_ago_the_last_one_ended(monkeypatch):
    monkeypatch.setattr(lab, "QUIET_S", 0.3)
    at_work = AtWork()
    at_work.begins(0)
    at_work.ends(0)
    threading.Event().wait(0.4)  # the quiet before does not count
    thread = waiting(at_work)
    at_work.begins(0)
    thread.join(0.5)
    assert thread.is_alive()
    at_work.ends(0)
    thread.join(30)
    assert not thread.is_alive()


def test_a_device_that_failed_is_healed_by_its_next_program(monkeypatch, caplog):
    monkeypatch.setattr(lab, "QUIET_S", 0.01)
    monkeypatch.setattr(lab, "PATIENCE_S", 0.1)
    at_work = AtWork()
    at_work.begins(0)  # and never ends
    at_work.wait()
    said = "elche: emulated devices are still at work 0.1 s after the end of the program."
    assert [record.getMessage() for record in caplog.records] == [said]
    at_work.begins(0)
    at_work.ends(0)
    monkeypatch.setattr(lab, "PATIENCE_S", 60)
    at_work.wait()
    assert len(caplog.records) == 1


# -- a schedule that fails while it trains


def failing_at(*place):
    """A schedule whose table has no time for a microbatch of a window."""

    def schedule(window, rank, microbatch):
        if (window, microbatch) == place:
            raise LookupError(f"no time of {place}")
        return 0.0

    return EmulatedSpeeds(schedule)


FAILS = {"window": 1}
"""The window in which the schedule of the step below fails."""


@cache
def failing(world_size):
    """A step for the next test, which begins with `init`."""

    def schedule(window, rank, microbatch):
        return failing_at(FAILS["window"], 0).schedule(window, rank, microbatch)

    return elche.build_train_step(
        lambda p, batch, rng: (batch["x"] @ p["w"]).mean(), optax.sgd(0.1),
        devices=jax.devices()[:world_size], cadence=elche.FixedTotal(2),
        emulate=EmulatedSpeeds(schedule),
    )  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("window", [1, 3])
def test_an_error_of_the_schedule_is_raised_as_it_is(window, world_size, monkeypatch):
    """In the middle of a run, and in its last window, which no dispatch follows."""
    monkeypatch.setitem(FAILS, "window", window)
    train = failing(world_size)
    state = train.init({"w": np.zeros(2, "f")})
    with pytest.raises(LookupError, match=rf"no time of \({window}, 0\)"):
        for one in train.windows({"x": np.ones((16, 2), "f")}, batch_size=2):
            state, _ = train(state, one)


def test_the_next_run_has_none_of_its_errors():
    """All devices fail, in all windows; the windows in flight, too."""
    fails = [True]

    def schedule(window, rank, microbatch):
        if fails[0] and window:
            raise LookupError("no times")
        return 0.0

    train = elche.build_train_step(
        lambda p, batch, rng: (batch["x"] @ p["w"]).mean(), optax.sgd(0.1),
        devices=jax.devices()[:4], cadence=elche.EveryBatch(), emulate=EmulatedSpeeds(schedule),
    )  # fmt: skip
    data = {"x": np.ones((64, 2), "f")}

    def run():
        state = train.init({"w": np.zeros(2, "f")})
        for window in train.windows(data, batch_size=2):
            state, _ = train(state, window)
        return int(state.step[0])

    for _ in range(3):
        fails[0] = True
        with pytest.raises(LookupError, match="no times"):
            run()
        fails[0] = False
        assert run() == 8


def test_so_is_that_of_an_evaluation():
    evaluate = elche.build_eval_step(
        lambda p, batch: {"x": batch["x"][:, 0] * p["w"]}, devices=jax.devices()[:2],
        cadence=elche.FixedTotal(4), emulate=failing_at(0, 1),
    )  # fmt: skip
    with pytest.raises(LookupError, match=r"no time of \(0, 1\)"):
        evaluate({"w": np.float32(1)}, {"x": np.ones((16, 2), "f")}, batch_size=2)
