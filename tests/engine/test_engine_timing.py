"""When each device was done: the formulas on hand numbers, the watching threads."""

import threading
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.engine.mapped import AXIS, Mapped, stacked_sharding
from elche_jax.engine.timing import Ends, Stopwatch, WindowTimes

GIVE_UP = 30  # seconds after which a hang is a failure; never waited for in a good run


def watchers():
    return [t for t in threading.enumerate() if t.name.startswith("elche-watch-")]


class Shard:
    """A shard of an array that becomes ready when the test says so."""

    def __init__(self, error=None):
        self.waited_for = threading.Event()
        self.ready = threading.Event()
        self.error = error

    def block_until_ready(self):
        self.waited_for.set()
        assert self.ready.wait(GIVE_UP)
        if self.error is not None:
            raise self.error


class Token:
    """A stacked array of such shards."""

    def __init__(self, *shards):
        self.addressable_data = list(shards).__getitem__
        self.shards = shards

    def block_until_ready(self):
        for shard in self.shards:
            shard.block_until_ready()


class Log:
    """Collects what a stopwatch reports; `wait(n)` until it has reported n times."""

    def __init__(self):
        self.times, self.errors = [], []
        self._told = threading.Semaphore(0)

    def done(self, times):
        self.times.append(times)
        self._told.release()

    def failed(self, error):
        self.errors.append(error)
        self._told.release()

    def wait(self, reports):
        for _ in range(reports):
            assert self._told.acquire(timeout=GIVE_UP)


def stopwatch_and_log(world_size):
    log = Log()
    return Stopwatch(world_size, log.done, log.failed), log


# -- formulas


def test_a_first_window_by_hand():
    # device 0 works 40 ms, device 1 60 ms; the exchange takes 5 ms after the last
    times = WindowTimes(0, 10.0, accumulated=(10.040, 10.060), combined=(10.065, 10.065))
    assert times.busy_ms([-inf, -inf]) == pytest.approx((40, 60))
    assert times.wait_ms == pytest.approx((25, 5))
    assert times.sync_ms == pytest.approx(5)
    assert times.skew_ms == pytest.approx(20)


def test_a_window_dispatched_early_begins_when_the_device_is_free():
    before = WindowTimes(0, 9.0, accumulated=(9.9, 9.8), combined=(10.0, 10.02))
    times = WindowTimes(1, 9.5, accumulated=(10.1, 10.22), combined=(10.23, 10.23))
    assert times.busy_ms(before.combined) == pytest.approx((100, 200))


def test_a_window_dispatched_late_begins_at_its_dispatch():
    before = WindowTimes(0, 9.0, accumulated=(9.9, 9.8), combined=(10.0, 10.02))
    times = WindowTimes(1, 10.01, accumulated=(10.11, 10.12), combined=(10.2, 10.2))
    assert times.busy_ms(before.combined) == pytest.approx((100, 100))


def test_ends_are_kept_per_device_and_by_time():
    ends, (a, b, c) = Ends(), jax.devices()[:3]
    assert ends.before([a, b], [5.0, 5.0]) == [-inf, -inf]
    ends.note([a, b], [1.0, 2.0])
    ends.note([b, c], [4.0, 4.5])  # another training step, on other devices
    ends.note([a], [3.0])
    assert ends.before([a, b, c], [9.0, 9.0, 9.0]) == [3.0, 4.0, 4.5]
    assert ends.before([a, b, c], [2.5, 4.0, 4.0]) == [1.0, 4.0, -inf]


def test_a_sync_never_costs_less_than_nothing():
    # two threads may be woken in the other order: a clock artefact
    times = WindowTimes(0, 0.0, accumulated=(1.0, 1.0), combined=(0.999, 1.004))
    assert times.sync_ms == 0
    assert times.skew_ms == pytest.approx(5)


@given(
    arrivals=st.lists(st.floats(0, 1000), min_size=1, max_size=6),
    cost=st.floats(0, 100),
)
def test_waits_are_skew_plus_cost(arrivals, cost):
    end = max(arrivals) + cost
    times = WindowTimes(0, 0.0, tuple(arrivals), (end,) * len(arrivals))
    assert times.sync_ms == pytest.approx(1e3 * cost, abs=1e-6)
    assert times.skew_ms == pytest.approx(1e3 * (max(arrivals) - min(arrivals)), abs=1e-6)
    for arrival, wait in zip(arrivals, times.wait_ms, strict=True):
        skew = 1e3 * (max(arrivals) - arrival)
        assert wait == pytest.approx(skew + 1e3 * cost, abs=1e-6)


# -- threads


def test_windows_of_real_arrays_come_in_order():
    devices = jax.devices()[:3]

    def work(x, count):
        return jax.lax.fori_loop(0, count, lambda i, y: jnp.sin(y @ y), x), None

    def combine(x):
        return jax.lax.psum(x, AXIS), None

    sharding = stacked_sharding(devices)
    x = jax.device_put(np.full((3, 8, 8), 0.1, np.float32), sharding)
    counts = [jax.device_put(np.array(c, np.int32), sharding) for c in [(1, 9, 40), (30, 2, 1)]]
    worker = Mapped(work, devices, donate=()).compile(x, counts[0])
    combiner = Mapped(combine, devices, donate=()).compile(x)
    stopwatch, log = stopwatch_and_log(3)
    for window in range(20):
        partial, _ = worker(x, counts[window % 2])
        stopwatch.accumulating(window, float(window), partial)
        whole, _ = combiner(partial)
        stopwatch.combining(window, 0.0, whole)
    log.wait(20)
    stopwatch.close()
    assert watchers() == []
    assert log.errors == []
    assert [times.window for times in log.times] == list(range(20))
    assert [times.dispatched for times in log.times] == [float(w) for w in range(20)]
    for times, after in zip(log.times, log.times[1:], strict=False):
        for rank in range(3):
            assert times.accumulated[rank] <= times.combined[rank] <= after.accumulated[rank]


ENDS_OF = [(w, r, end) for w in range(4) for r in range(2) for end in ("ac" if w % 2 else "c")]


@settings(deadline=None, max_examples=30)
@given(order=st.permutations(ENDS_OF))
def test_windows_with_and_without_times_come_in_order(order):
    """Of every second one a single thread waits, for both devices."""
    stopwatch, log = stopwatch_and_log(2)
    shards = {key: Shard() for key in order}
    for window in range(4):
        timed = window % 2 == 1
        if timed:
            stopwatch.accumulating(window, 0.0, Token(*(shards[window, r, "a"] for r in range(2))))
        whole = Token(*(shards[window, r, "c"] for r in range(2)))
        stopwatch.combining(window, 0.0, whole, timed)
    for key in order:
        shards[key].ready.set()
    log.wait(4)
    stopwatch.close()
    assert log.errors == [] and [times.window for times in log.times] == list(range(4))
    for times in log.times[::2]:
        assert times.accumulated == times.combined and len(set(times.combined)) == 1


@settings(deadline=None, max_examples=15)
@given(order=st.permutations([(w, r, end) for w in range(2) for r in range(2) for end in "ac"]))
def test_a_window_is_over_when_every_device_has_reported_both(order):
    stopwatch, log = stopwatch_and_log(2)
    shards = {key: Shard() for key in order}
    for window in range(2):
        stopwatch.accumulating(window, 0.0, Token(*(shards[window, r, "a"] for r in range(2))))
        stopwatch.combining(window, 0.0, Token(*(shards[window, r, "c"] for r in range(2))))
    for key in order[:-1]:
        shards[key].ready.set()
    last_window = order[-1][0]
    assert shards[order[-1]].waited_for.wait(GIVE_UP)
    log.wait(last_window)  # a window before the one held up is over, that one is not
    assert [times.window for times in log.times] == list(range(last_window))
    shards[order[-1]].ready.set()
    log.wait(2 - last_window)
    stopwatch.close()
    assert [times.window for times in log.times] == [0, 1]


def test_the_end_of_a_shard_is_not_the_end_of_another():
    stopwatch, log = stopwatch_and_log(2)
    slow, fast, ends = Shard(), Shard(), [Shard(), Shard()]
    stopwatch.accumulating(0, 0.0, Token(slow, fast))
    stopwatch.combining(0, 0.0, Token(*ends))
    fast.ready.set()
    assert ends[1].waited_for.wait(GIVE_UP)  # the fast one has been noted by now
    slow.ready.set()
    for end in ends:
        end.ready.set()
    log.wait(1)
    stopwatch.close()
    assert log.times[0].accumulated[1] < log.times[0].accumulated[0]


def test_what_a_shard_raises_is_handed_over():
    stopwatch, log = stopwatch_and_log(2)
    good, bad = Shard(), Shard(RuntimeError("device lost"))
    stopwatch.accumulating(0, 0.0, Token(good, bad))
    good.ready.set()
    bad.ready.set()
    log.wait(1)
    stopwatch.close()
    assert [str(error) for error in log.errors] == ["device lost"]
    assert log.times == []
    assert watchers() == []


def test_what_the_listener_raises_is_handed_over():
    def done(times):
        raise KeyError("listener")

    log = Log()
    stopwatch = Stopwatch(1, done, log.failed)
    shards = [Shard(), Shard()]
    for shard in shards:
        shard.ready.set()
    stopwatch.accumulating(0, 0.0, Token(*shards[:1]))
    stopwatch.combining(0, 0.0, Token(*shards[1:]))
    log.wait(1)
    stopwatch.close()
    assert [type(error) for error in log.errors] == [KeyError]


def test_close_leaves_no_thread_and_may_be_called_again():
    stopwatch, _ = stopwatch_and_log(4)
    assert len(watchers()) == 4
    stopwatch.close()
    stopwatch.close()
    assert watchers() == []


def test_nobody_waits_for_a_window_that_is_dropped():
    stopwatch, _ = stopwatch_and_log(2)
    found = []
    waiting = threading.Thread(target=lambda: found.append(stopwatch.accumulated(0)))
    waiting.start()
    stopwatch.dropped(0)
    waiting.join(GIVE_UP)
    ended = not waiting.is_alive()
    stopwatch.close()  # which ends it in any case
    assert ended and found == [None]


def test_dropping_it_leaves_no_thread():
    stopwatch, _ = stopwatch_and_log(3)
    assert len(watchers()) == 3
    del stopwatch
    assert watchers() == []


def test_close_from_its_own_thread_does_not_wait_for_itself():
    closed = threading.Event()

    def done(times):
        stopwatch.close()
        closed.set()

    log = Log()
    stopwatch = Stopwatch(2, done, log.failed)
    shards = [Shard() for _ in range(4)]
    for shard in shards:
        shard.ready.set()
    stopwatch.accumulating(0, 0.0, Token(*shards[:2]))
    stopwatch.combining(0, 0.0, Token(*shards[2:]))
    assert closed.wait(GIVE_UP)
    assert log.errors == []


def test_close_does_not_wait_for_a_device_that_works_on():
    stopwatch, log = stopwatch_and_log(2)
    threads = watchers()
    busy = [Shard(), Shard()]
    stopwatch.accumulating(0, 0.0, Token(*busy))
    for shard in busy:
        assert shard.waited_for.wait(GIVE_UP)
    stopwatch.close()
    assert all(thread.is_alive() for thread in threads)
    for shard in busy:
        shard.ready.set()
    for thread in threads:
        thread.join(GIVE_UP)
        assert not thread.is_alive()
    assert log.times == []


def test_threads_never_make_the_list_of_entries_at_once():
    """On JAX 0.10 two that do see half of it, now and then, and one of them fails."""
    makers = []

    class Lazy:
        def __init__(self):
            self.first = True

        def addressable_data(self, rank):
            if self.first:
                makers.append(threading.current_thread().name)
                self.first = False
            return jnp.zeros(())

    times = []
    done = threading.Event()
    watch = Stopwatch(4, lambda t: (times.append(t), done.set()), lambda error: done.set())
    try:
        watch.accumulating(1, 0.0, Lazy())
        watch.combining(1, 0.0, Lazy())
        assert done.wait(GIVE_UP)
    finally:
        watch.close()
    assert len(times) == 1 and makers == [threading.current_thread().name] * 2
