"""The clock of a loop by hand: known times on a fake clock, windows that say nothing, threads."""

import gc
import os
import re
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elche_jax as elche
from elche_jax.engine import timed, timing
from elche_jax.engine.laned import Stacked

DEVICES = jax.devices()[:3]
GIVE_UP = 30  # seconds after which a hang is a failure; never waited for in a good run


def watchers():
    return [t for t in threading.enumerate() if t.name.startswith("elche-watch-")]


class FakeTime:
    """A clock that shows each thread what the test has set for it."""

    def __init__(self):
        self._local = threading.local()

    def set(self, now):
        self._local.now = now

    def perf_counter(self):
        return self._local.now


class Shard:
    """One device's entry, which is ready at a given time."""

    shape = (1,)

    def __init__(self, device, clock, ready, error=None):
        self._device, self._clock, self._ready, self._error = device, clock, ready, error

    def devices(self):
        return {self._device}

    def block_until_ready(self):
        if self._error is not None:
            raise self._error
        self._clock.set(self._ready)


class Ready(Stacked):
    """A stacked array whose entries are ready at given times."""

    shape, arrays = (3,), ()

    def __init__(self, clock, *times, error=None):
        self._shards = [
            Shard(device, clock, ready, error) for device, ready in zip(DEVICES, times, strict=True)
        ]

    def device_of(self, rank):
        return DEVICES[rank]

    def addressable_data(self, rank):
        return self._shards[rank]

    def map(self, fn):
        raise NotImplementedError

    def is_deleted(self):
        return False


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    clock.set(0.0)
    monkeypatch.setattr(timed, "time", clock)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timed, "ENDS", timing.Ends())
    return clock


@pytest.fixture
def ddp():
    made = elche.DDP(DEVICES)
    yield made
    made._watches._idle.clear()  # pytest holds `made` for longer


def window(ddp, clock, begun, worked, synced, counts=(2, 3, 4)):
    clock.set(begun)
    with ddp.timed(counts) as timer:
        timer.worked(Ready(clock, *worked))
        timer.synced(Ready(clock, *synced))
    return timer.report


# -- known times


def test_a_window_by_hand(ddp, clock):
    # the exchange takes 5 ms after the last device, which arrives 50 ms after the beginning
    report = window(ddp, clock, 10.0, (10.040, 10.050, 10.030), (10.055, 10.055, 10.056))
    assert report.wall_ms == pytest.approx((40, 50, 30))
    assert report.counts == (2, 3, 4)
    assert report.sync_ms == pytest.approx(5)
    assert report.loss is None


def test_a_window_begins_where_the_one_before_has_ended(ddp, clock):
    window(ddp, clock, 10.0, (10.1, 10.1, 10.1), (10.2, 10.3, 10.2))
    # dispatched while device 1 was still at the exchange, by another loop on the same devices
    report = window(elche.DDP(DEVICES), clock, 10.25, (10.35, 10.35, 10.45), (10.5, 10.5, 10.5))
    assert report.wall_ms == pytest.approx((100, 50, 200))
    assert report.sync_ms == pytest.approx(50)


def test_times_are_never_below_nothing(ddp, clock):
    # threads woken in the other order: an artefact of the clock
    report = window(ddp, clock, 10.0, (9.9, 10.1, 10.1), (9.8, 10.2, 10.2))
    assert report.wall_ms == pytest.approx((0, 100, 100)) and report.sync_ms == 0


def test_all_arrays_of_a_mark_count(ddp, clock):
    clock.set(0.0)
    with ddp.timed((1, 1, 1)) as timer:
        early, late = Ready(clock, 1.0, 1.0, 1.0), Ready(clock, 3.0, 1.5, 2.0)
        marked = (early, {"late": late, "none": None})
        assert timer.worked(marked) is marked
        assert timer.synced(late) is late
    assert timer.report.wall_ms == pytest.approx((3000, 1500, 2000))


def test_blocks_may_be_nested(ddp, clock):
    with ddp.timed((1, 1, 1)) as outer:
        outer.worked(Ready(clock, 1.0, 1.0, 1.0))
        inner = window(ddp, clock, 0.0, (0.5, 0.6, 0.7), (0.8, 0.8, 0.8))
        outer.synced(Ready(clock, 2.0, 2.0, 2.0))
    assert inner.wall_ms == pytest.approx((500, 600, 700))
    assert outer.report.sync_ms == pytest.approx(1000)


# -- real arrays


def loop(ddp):
    """A function that runs a window of a loop and returns its clock."""
    work = ddp.map(lambda x, n: jax.lax.fori_loop(0, n, lambda i, y: jnp.sin(y), x))

    def run(x, counts):
        with ddp.timed(counts) as clock:
            out = clock.worked(work(x, np.array(counts)))
            mean = clock.synced(ddp.weighted_all_reduce_gradients(out, counts))
        return clock, mean

    return run


def test_a_window_in_which_something_is_compiled_is_not_measured(ddp):
    run, x = loop(ddp), ddp.replicate(np.ones(5, "float32"))
    cadence = elche.ElChe(anchor=3)
    state = cadence.init(3)
    first, mean = run(x, state.counts)
    assert first.compiled
    assert first.report == elche.WindowReport((0.0,) * 3, (3, 3, 3), 0.0)
    assert cadence.update(state, first.report) == state
    second, again = run(x, state.counts)
    assert not second.compiled and min(second.report.wall_ms) > 0
    assert mean.tolist() == again.tolist()
    np.testing.assert_allclose(mean, np.full((3, 5), np.sin(np.sin(np.sin(1)))), rtol=1e-5)
    assert cadence.update(state, second.report).calibrated
    other, _ = run(ddp.replicate(np.ones(6, "float32")), state.counts)
    assert other.compiled


@pytest.mark.parametrize(
    "cadence",
    [elche.ElChe(), elche.FixedTotal(9), elche.Balanced(9, calibration_windows=1),
     elche.EveryBatch(), elche.Replay([(1, 2, 3)] * 3)],
    ids=lambda cadence: type(cadence).__name__,
)  # fmt: skip
def test_no_cadence_learns_from_what_is_not_measured(cadence):
    state = cadence.init(3)
    counts = state.counts
    after = cadence.update(state, elche.WindowReport((0.0,) * 3, counts, 0.0))
    assert sum(after.counts) == sum(counts)
    assert getattr(after, "ms_per_batch", None) == getattr(state, "ms_per_batch", None)
    assert getattr(after, "throughput", None) == getattr(state, "throughput", None)


def test_two_kinds(twins):
    devices = [jax.devices("cpu")[0], twins[0], jax.devices("cpu")[1]]
    run, ddp = loop(ddp := elche.DDP(devices)), ddp
    x = ddp.replicate(np.ones(5, "float32"))
    run(x, (1, 2, 3))
    clock, mean = run(x, (1, 2, 3))
    assert not clock.compiled and min(clock.report.wall_ms) > 0
    sines = [np.sin(1), np.sin(np.sin(1)), np.sin(np.sin(np.sin(1)))]
    np.testing.assert_allclose(mean, np.full((3, 5), np.average(sines, weights=(1, 2, 3))), 1e-5)


@pytest.mark.slow  # its lines are those of other tests
def test_the_page_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "by-hand.md"
    (script,) = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    names = {}
    exec(script, names)
    assert names["plan"].calibrated
    np.testing.assert_allclose(names["params"], np.ones((8, 8)), atol=0.5)
    assert elche.check_replicas(names["params"]) is None
    assert str(names["plan"].counts) in capsys.readouterr().out


# -- threads


def test_threads_are_kept_from_window_to_window(ddp, clock):
    assert watchers() == []
    window(ddp, clock, 0.0, (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    threads = watchers()
    assert len(threads) == 3
    with ddp.timed((1, 1, 1)) as kept:
        kept.worked(Ready(clock, 3.0, 3.0, 3.0))
        kept.synced(Ready(clock, 4.0, 4.0, 4.0))
    assert watchers() == threads
    ddp._watches._idle.clear()  # as if it were dropped; a clock that is kept keeps no threads
    assert watchers() == [] and kept.report.sync_ms > 0


def test_dropping_it_leaves_no_thread(clock):
    ddp = elche.DDP(DEVICES)
    window(ddp, clock, 0.0, (1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    del ddp
    gc.collect()
    assert watchers() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_block_that_raises_leaves_no_thread(ddp, clock, error, at):
    with pytest.raises(error), ddp.timed((1, 1, 1)) as timer:
        for mark in (timer.worked, timer.synced)[:at]:
            mark(Ready(clock, 1.0, 1.0, 1.0))
        raise error
    assert watchers() == []
    with pytest.raises(RuntimeError, match="report must be read after the block, got none yet"):
        _ = timer.report
    # the next block is as good as new
    report = window(ddp, clock, 10.0, (11.0, 11.0, 11.0), (12.0, 12.0, 12.0))
    assert report.wall_ms == pytest.approx((1000, 1000, 1000))


@pytest.fixture
def once():
    """Lets only the first SIGINT interrupt; gives how many there were."""
    signals = []

    def handler(number, frame):
        signals.append(number)
        if len(signals) == 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield signals
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_block_waits(ddp, clock, once):
    """The signal comes while a device is at work, and the device works on."""
    release, before = threading.Event(), set(watchers())

    class Busy(Shard):
        def block_until_ready(self):
            while not once:  # Python misses a signal that comes right before it begins to wait
                os.kill(os.getpid(), signal.SIGINT)
                release.wait(0.02)
            assert release.wait(GIVE_UP)

    out = Ready(clock, 1.0, 1.0, 1.0)
    out._shards[1] = Busy(DEVICES[1], clock, 1.0)
    with pytest.raises(KeyboardInterrupt), ddp.timed((1, 1, 1)) as timer:
        timer.worked(out)
        timer.synced(Ready(clock, 2.0, 2.0, 2.0))
    (left,) = set(watchers()) - before
    release.set()
    left.join(GIVE_UP)
    assert not left.is_alive()


def test_what_a_device_raises_ends_the_block(ddp, clock):
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="device lost"),
        ddp.timed((1, 1, 1)) as timer,
    ):
        error = jax.errors.JaxRuntimeError("device lost")
        timer.worked(Ready(clock, 1.0, 1.0, 1.0, error=error))
        timer.synced(Ready(clock, 2.0, 2.0, 2.0))
    assert watchers() == []


# -- errors


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ((1, 2), ValueError, r"DDP\.timed: counts must have one entry per device \(3\), got 2\."),
        ((1, -1, 1), ValueError, r"DDP\.timed: counts\[1\] must be at least 0, got -1"),
        ((0, 0, 0), ValueError, r"DDP\.timed: counts must have an entry above 0, got \(0, 0, 0\)"),
        ((1, 1.5, 1), TypeError, r"DDP\.timed: counts\[1\] must be an integer, got 1\.5"),
        (3, TypeError, r"DDP\.timed: counts must be a sequence of integers, got 3"),
    ],
)
def test_wrong_counts(ddp, counts, error, message):
    with pytest.raises(error, match=message):
        ddp.timed(counts)
    assert watchers() == []


NOT_STACKED = (
    r"DDP\.timed: worked must get arrays stacked over the devices, entry d of 3 on device d, got "
)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            lambda: jnp.ones(3),
            NOT_STACKED + r"an array of shape \(3,\) and dtype float32 as ",
        ),
        (lambda: {"w": np.ones((3, 2))}, NOT_STACKED + r"an array .* as leaf \['w'\]\. Pass what"),
        (lambda: [1.0], NOT_STACKED + r"a float as leaf \[0\]"),
        (lambda: elche.replicate(np.ones(2), DEVICES[:2]), NOT_STACKED + r".* \(2, 2\)"),
        (lambda: elche.replicate(np.ones(2), DEVICES[::-1]), NOT_STACKED + r".* \(3, 2\)"),
        (lambda: {"none": None}, r"DDP\.timed: worked must get at least one array, got none\."),
    ],
)
def test_what_is_not_stacked(ddp, out, message):
    with pytest.raises(ValueError, match=message), ddp.timed((1, 1, 1)) as timer:
        timer.worked(out())


def test_replicated_arrays_are_not_stacked(ddp):
    mesh = jax.sharding.Mesh(np.array(DEVICES), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with pytest.raises(ValueError, match=NOT_STACKED), ddp.timed((1, 1, 1)) as timer:
        timer.worked(jax.device_put(np.ones((3, 2)), whole))


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ("", r"worked and synced must both be called in the block, got neither\."),
        ("w", r"worked and synced must both be called in the block, got worked only\."),
        ("s", r"synced must be called once in the block, after worked, got a call without worked"),
        ("ww", r"worked must be called once in the block, got a second call\."),
        ("wss", r"synced must be called once in the block, after worked, got a second call\."),
        ("wsw", r"worked must be called once in the block, got a second call\."),
        ("r", r"report must be read after the block, got none yet\. A block that raised has none"),
        ("wsr", r"report must be read after the block, got none yet\."),
    ],
)
def test_marks_in_a_wrong_order(ddp, clock, marks, message):
    with pytest.raises(RuntimeError, match=message), ddp.timed((1, 1, 1)) as timer:
        for mark in marks:
            if mark == "r":
                _ = timer.report
            else:
                (timer.worked if mark == "w" else timer.synced)(Ready(clock, 1.0, 1.0, 1.0))
    with pytest.raises(RuntimeError, match=r"worked must be called .*, got a call after its end"):
        timer.worked(Ready(clock, 1.0, 1.0, 1.0))


def test_marked_arrays_that_are_donated(ddp):
    x = ddp.replicate(np.ones(5, "float32"))
    double, donating = ddp.map(lambda x: 2 * x), ddp.map(lambda x: x + 1, donate_argnums=0)
    message = r"DDP\.timed: {} must get arrays that are not donated in the block, got leaf \[0\]"
    with (
        pytest.raises(ValueError, match=message.format("worked")),
        ddp.timed((1, 1, 1)) as timer,
    ):
        (own,) = timer.worked([double(x)])
        timer.synced(donating(own))
    with (
        pytest.raises(ValueError, match=message.format("synced")),
        ddp.timed((1, 1, 1)) as timer,
    ):
        (mean,) = timer.synced([ddp.all_reduce_gradients(timer.worked(double(x)))])
        donating(mean)
    with (
        pytest.raises(ValueError, match=message.format("worked")),
        ddp.timed((1, 1, 1)) as timer,
    ):
        donating(own := double(x))
        timer.worked([own])
    assert watchers() == []
