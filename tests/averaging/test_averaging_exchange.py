"""The threads that collect deliveries, and the average of them, by themselves."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from waits import eventually

import elche_jax as elche
from elche_jax._processes import ExchangeLost
from elche_jax.engine.host.average import HostAverage
from elche_jax.engine.host.coordinator import Coordinator, OpenWindow
from elche_jax.engine.host.exchange import LiveExchange
from elche_jax.engine.host.limits import Limits
from elche_jax.engine.host.program import Delivery
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.reduce import Contribution, Reduction
from elche_jax.engine.wire import Encoded

NONE = MergeRules((), ())
AVERAGE = HostAverage(Reduction(NONE, elche.ParameterAveraging().weigh))


class Log:
    """What an exchange reports."""

    def __init__(self):
        self.over, self.errors, self.known = [], [], []

    def done(self, times, outcome):
        self.over.append((times, outcome))

    def learned(self, times, begins):
        self.known.append((times, begins))

    def failed(self, error):
        self.errors.append(error)


class Gates:
    """Which device is done with which window."""

    def __init__(self):
        self._lock, self._events = threading.Lock(), {}

    def of(self, window, rank):
        with self._lock:
            return self._events.setdefault((window, rank), threading.Event())

    def seconds(self, window, rank, count):
        assert self.of(window, rank).wait(30)
        return 0.0

    def open(self, window, *ranks):
        for rank in ranks:
            self.of(window, rank).set()


class Setup:
    def __init__(self, world=2, averaging=AVERAGE, **limits):
        self.world, self.log, self.gates = world, Log(), Gates()
        limits = Limits(**{"timeout_s": 30.0, "ahead": True} | limits)
        log = self.log
        self.coordinator = Coordinator(world, limits, log.done, log.learned, log.failed)
        self.exchange = LiveExchange(self.coordinator, averaging, self.gates.seconds)

    def launch(self, number, counts):
        self.coordinator.admit(counts)
        self.begin(number, counts)
        self.exchange.combining(number, 0.0, None)

    def begin(self, number, counts, at=0.0, absent=(), survey=None):
        made = [None if r in absent else delivery(count) for r, count in enumerate(counts)]
        ahead = self.coordinator.limits.ahead
        window = OpenWindow(number, at, counts, number, frozenset(absent), ahead, survey)
        self.exchange.launch(window, made)

    def has_room(self, counts):
        with self.coordinator.changed:
            return self.coordinator._has_room(counts)

    def admitted(self, counts):
        """A thread that waits for room; it ends when there is some."""
        thread = threading.Thread(target=self.coordinator.admit, args=(counts,))
        thread.start()
        return thread

    @property
    def windows(self):
        return [times.window for times, _ in self.log.over]

    def wait_over(self, *windows):
        eventually(lambda: self.windows == list(windows))


@pytest.fixture
def setup():
    made = []

    def make(*args, **options):
        made.append(Setup(*args, **options))
        return made[-1]

    yield make
    for one in made:
        for window in range(20):
            one.gates.open(window, *range(one.world))
        one.exchange.close()


def delivery(steps, progress=1.0, own=True, loss=2.0):
    def one(x, dtype="f"):
        return jnp.asarray(np.array([x], dtype))

    sums = {
        "loss": one(steps * loss), "weight": one(steps), "metrics": {}, "bad": one(not own)
    }  # fmt: skip
    row = one([steps, own, loss, steps, 9.0, steps])
    brought = Contribution(Encoded([one([progress] * 3)]), row, sums, [])
    return Delivery(brought, one(True, bool))


# -- who is waited for


def test_a_window_is_over_when_all_have_delivered(setup):
    one = setup(3)
    one.launch(1, (2, 1, 1))
    one.gates.open(1, 0, 2)
    assert one.windows == [] and one.coordinator.closed() == []
    one.gates.open(1, 1)
    one.wait_over(1)
    ((number, outcome),) = one.coordinator.closed()
    assert number == 1 and outcome.late == () and outcome.ahead
    np.testing.assert_allclose(outcome.average.metrics["share"], [0.5, 0.25, 0.25])
    assert one.coordinator.closed() == []


def test_windows_are_closed_in_order(setup):
    one = setup(2, max_overshoot=10)
    for number in (1, 2, 3):
        one.launch(number, (1, 1))
    for rank in (0, 1):
        for number in (1, 2, 3):
            one.gates.open(number, rank)
    one.wait_over(1, 2, 3)
    assert [number for number, _ in one.coordinator.closed()] == [1, 2, 3]


def test_who_is_late_is_not_waited_for_until_it_owes_nothing(setup):
    one = setup(2, timeout_s=0.02)
    for number in (1, 2):
        one.gates.open(number, 0)
        one.launch(number, (1, 1))
    one.wait_over(1, 2)
    assert one.exchange.late == {1}
    assert [outcome.late for _, outcome in one.log.over] == [(1,), (1,)]
    assert np.isnan(one.log.over[0][1].average.metrics["distance"]).tolist() == [False, True]
    one.gates.open(1, 1)
    assert one.exchange.late == {1}  # it still owes the second
    one.gates.open(2, 1)
    eventually(lambda: one.exchange.late == frozenset())
    one.launch(3, (1, 1))
    one.gates.open(3, 0, 1)
    one.wait_over(1, 2, 3)
    assert one.log.over[-1][1].late == ()


def test_a_device_without_work_is_not_named(setup):
    one = setup(2, timeout_s=0.02)
    one.gates.open(1, 0)
    one.launch(1, (3, 0))
    one.wait_over(1)
    assert one.log.over[0][1].late == () and one.exchange.late == {1}


def test_nobody_is_late_before_the_first_delivery(setup):
    """An average over no device is none."""
    one, other = setup(2, timeout_s=0.01), setup(2, timeout_s=0.01)
    one.launch(1, (1, 1))
    other.gates.open(1, 0)
    other.launch(1, (1, 1))
    other.wait_over(1)  # as long as that takes
    assert one.windows == [] and one.exchange.late == frozenset()
    one.gates.open(1, 1)
    one.wait_over(1)
    assert one.log.over[0][1].late == (0,)


def test_a_window_whose_only_worker_is_late_is_closed_without(setup):
    one = setup(2, timeout_s=0.02)
    one.gates.open(1, 0)
    one.launch(1, (1, 1))
    one.wait_over(1)
    one.gates.open(2, 0)
    one.begin(2, (0, 2), absent=[1])
    one.exchange.combining(2, 0.0, None)
    one.wait_over(1, 2)
    outcome = one.log.over[1][1]
    assert outcome.late == (1,) and outcome.missing == () and not outcome.will_be_known
    assert not outcome.average.mean.good


def test_the_times_of_a_device_that_is_late_again_are_learned(setup):
    """The first time may be an accident."""
    one = setup(2, timeout_s=0.02)
    for number, told in ((1, False), (2, True)):
        one.gates.open(number, 0)
        one.launch(number, (1, 1))
        eventually(lambda at=number: one.windows[-1:] == [at])
        assert one.exchange.late == {1} and one.log.over[-1][1].will_be_known
        one.gates.open(number, 1)
        eventually(lambda at=number: len(one.log.known) == at)
        times, begins = one.log.known[-1]
        assert times.window == number and (begins is not None) == told
        assert times.accumulated[1] >= times.accumulated[0] + 0.02
    assert begins[1] >= one.log.known[0][0].accumulated[1]
    one.gates.open(3, 0, 1)
    one.launch(3, (1, 1))
    one.wait_over(1, 2, 3)
    assert one.coordinator.incidents == [0, 0] and len(one.log.known) == 2


# -- how far a device may run ahead


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({}, [True, True, True]),
        ({"max_overshoot": 0}, [True, False, False]),
        ({"max_overshoot": 4}, [True, True, False]),
        ({"max_overshoot": 5}, [True, True, False]),
        ({"max_overshoot": 9}, [True, True, True]),
        ({"max_batch_diff": 3}, [True, False, False]),
        ({"max_batch_diff": 4}, [True, True, False]),
    ],
)
def test_how_far_a_device_may_run_ahead(setup, limits, fits):
    """Microbatches beyond the oldest window: 4 with a second one, 9 with a third."""
    one = setup(2, **limits)
    for number, (counts, fit) in enumerate(zip([(3, 1), (4, 2), (5, 1)], fits, strict=True)):
        assert one.has_room(counts) == fit
        waits = one.admitted(counts)
        if not fit:
            for window in range(1, 4):
                one.gates.open(window, 0, 1)
            waits.join(30)
            assert not waits.is_alive()
            one.wait_over(*range(1, number + 1))
            return
        waits.join(30)
        assert not waits.is_alive()
        one.launch(number + 1, counts)


def test_what_was_delivered_bounds_but_the_average_does_not(setup):
    """`max_batch_diff` is of deliveries: a window that is being averaged does not count."""
    averaging = threading.Event()

    def slow(deliveries, window, told):
        assert averaging.wait(30)
        return AVERAGE(deliveries, window)

    by_average = setup(2, slow, max_overshoot=0)
    by_delivery = setup(2, slow, max_batch_diff=1)
    for one in (by_average, by_delivery):
        one.launch(1, (2, 2))
        one.gates.open(1, 0, 1)
    eventually(lambda: all(by_delivery.coordinator.windows[1].got))
    free = by_delivery.admitted((2, 2))
    free.join(30)
    assert not free.is_alive() and not by_average.has_room((2, 2))
    waits = by_average.admitted((2, 2))
    averaging.set()
    waits.join(30)
    assert not waits.is_alive()


def test_the_gap_before_a_window_is_what_it_costs(setup):
    """`min over d of (launch - last delivery)`; nothing where a device has work."""
    one = setup(2)
    one.gates.open(1, 0, 1)
    one.launch(1, (1, 1))
    one.wait_over(1)
    end = max(one.log.over[0][0].accumulated)
    for number, at in ((2, end + 0.3), (3, end + 0.5)):
        one.begin(number, (1, 1), at)
        one.exchange.combining(number, 0.0, None)
    one.gates.open(2, 0, 1)
    one.gates.open(3, 0, 1)
    one.wait_over(1, 2, 3)
    first, second, third = (times for times, _ in one.log.over)
    assert first.sync_ms == 0 and third.sync_ms == 0
    np.testing.assert_allclose(second.sync_ms, 300, atol=0.1)


# -- a process of the job that ends


def test_nothing_is_averaged_after_a_lost_window_until_it_is_taken_back(setup):
    lost = {2}

    def averaging(deliveries, window, told):
        if window in lost:
            raise ExchangeLost
        return AVERAGE(deliveries, window)

    one = setup(2, averaging, max_overshoot=3)
    assert one.exchange.lost is None and one.coordinator.take_back() is None
    for number in (1, 2, 3):
        one.launch(number, (1, 1))
        one.gates.open(number, 0)
    one.gates.open(1, 1)
    one.gates.open(2, 1)
    eventually(lambda: [type(error) for error in one.log.errors] == [ExchangeLost])
    assert one.exchange.lost == 2
    one.coordinator.settle()  # nobody waits for what does not come
    assert one.has_room((9, 9))
    number, _ = one.coordinator.next_closed()
    assert number == 1
    with pytest.raises(ExchangeLost):
        one.coordinator.next_closed()
    lost.clear()
    assert one.coordinator.take_back() == 2 and one.exchange.lost is None
    one.launch(4, (1, 1))  # that is the second window again
    one.gates.open(3, 1)  # of which nobody hears any more
    one.gates.open(4, 0, 1)
    one.wait_over(1, 4)
    assert [number for number, _ in one.coordinator.closed()] == [4]
    assert one.coordinator.owed == [0, 0]


def test_a_window_that_the_loop_waits_for_is_lost_with_an_earlier_one(setup):
    def averaging(deliveries, window, told):
        raise ExchangeLost

    one = setup(2, averaging, max_overshoot=9)
    one.launch(1, (1, 1))
    window = OpenWindow(2, 0.0, (1, 1), 2, frozenset(), ahead=False)
    one.exchange.launch(window, [delivery(1), delivery(1)])
    one.gates.open(1, 0, 1)
    with pytest.raises(ExchangeLost):
        one.coordinator.outcome(2)


# -- ends


def test_a_window_is_over_only_when_the_loop_is_ready_to_hear_of_it(setup):
    one = setup(2)
    one.gates.open(1, 0, 1)
    one.begin(1, (1, 1))
    eventually(lambda: one.coordinator.windows[1].outcome is not None)
    assert one.windows == []
    one.exchange.combining(1, 0.0, None)
    assert one.windows == [1] and one.coordinator.windows == {}


def test_without_running_ahead_it_is_over_when_it_was_applied(setup):
    one = setup(2, ahead=False)
    one.launch(1, (1, 1))
    one.gates.open(1, 0, 1)
    outcome = one.coordinator.outcome(1)
    assert one.windows == [] and one.coordinator.closed() == [] and not outcome.ahead
    first, second = one.coordinator.windows[1].ends
    one.coordinator.applied(1, [first + 0.5, second + 0.75])
    assert one.windows == [1]
    times = one.log.over[0][0]
    np.testing.assert_allclose((times.sync_ms, times.skew_ms), (500, 250), rtol=1e-6)


@pytest.mark.parametrize("closed_first", [False, True])
def test_nobody_hears_of_a_window_that_was_abandoned(setup, closed_first):
    one = setup(2)
    one.begin(1, (1, 1))
    if closed_first:
        one.gates.open(1, 0, 1)
        eventually(lambda: one.coordinator.windows[1].outcome is not None)
    one.coordinator.abandon(1)
    one.gates.open(1, 0, 1)
    eventually(lambda: one.coordinator.windows == {})
    one.exchange.combining(1, 0.0, None)
    assert one.windows == []


def test_close_ends_the_threads_and_whoever_waits():
    one = Setup(2, max_overshoot=0)
    one.gates.open(1, 0, 1)
    one.gates.open(2, 0)
    one.launch(1, (1, 1))
    one.wait_over(1)
    one.launch(2, (1, 1))
    raised = []

    def wait():
        try:
            one.coordinator.admit((1, 1))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    one.gates.open(2, 1)  # so that its thread can end
    eventually(lambda: one.windows == [1, 2])
    one.exchange.close()
    one.exchange.close()
    thread.join(30)
    assert not thread.is_alive() and names() == []


def test_whoever_waits_hears_of_a_close():
    one = Setup(2, ahead=False)
    one.launch(1, (1, 1))
    one.coordinator.stop.set()
    with pytest.raises(RuntimeError, match=r"^train: the windows of this run were closed while it"):
        one.coordinator.outcome(1)
    one.gates.open(1, 0, 1)
    one.exchange.close()


def test_the_last_reference_ends_the_threads():
    one = Setup(3)
    del one
    gc.collect()
    eventually(lambda: names() == [])


@pytest.mark.parametrize("where", ["average", "device"])
def test_an_exception_in_a_thread(setup, where):
    def broken(deliveries, window, told):
        raise ArithmeticError("no average")

    one = setup(2, broken if where == "average" else AVERAGE, ahead=False)
    if where == "device":
        one.gates.seconds = None
        one.exchange._threads.put(0, "not a job")
        error = TypeError
    else:
        error = ArithmeticError
        one.launch(1, (1, 1))
        one.gates.open(1, 0, 1)
    eventually(lambda: len(one.log.errors) == 1)
    assert isinstance(one.log.errors[0], error)
    with pytest.raises(error):
        one.coordinator.admit((1, 1))


def names():
    ours = ("elche-fetch", "elche-average")
    return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


# -- the average


def test_shares_by_schedule():
    """On the host a schedule is asked for a number, whatever it is made of."""
    for power in (lambda t: 2.0 - t, lambda t: jnp.float32(2.0) - t):
        average = HostAverage(Reduction(NONE, elche.ParameterAveraging(power).weigh))
        deliveries = [on_host(delivery(1)), on_host(delivery(3))]
        assert average(deliveries, 1).metrics["share"].tolist() == [0.25, 0.75]
        assert average(deliveries, 2).metrics["share"].tolist() == [0.5, 0.5]


def on_host(one):
    """As it comes from a device."""
    return jax.tree.map(lambda x: np.asarray(x)[0], one)


def test_metrics_are_of_those_who_have_worked():
    deliveries = [on_host(delivery(3, loss=1.0)), None, on_host(delivery(1, -1.0, loss=5.0))]
    found = AVERAGE(deliveries, 0)
    assert found.metrics["loss"] == 2.0 and found.metrics["weight"] == 4.0
    assert found.metrics["share"].tolist() == [0.75, 0.0, 0.25]
    np.testing.assert_allclose(found.metrics["workers"], 1 / (0.75**2 + 0.25**2))
    np.testing.assert_allclose(found.mean.payload[0], np.full(3, 0.5))
    length = np.sqrt(3)
    np.testing.assert_allclose(found.metrics["update_norm"][[0, 2]], [length, length], rtol=1e-6)
    np.testing.assert_allclose(found.metrics["cosine"][[0, 2]], [1, -1], rtol=1e-6)
    assert found.own.tolist() == [True] * 3 and found.metrics["finite"]


def test_an_average_of_nothing_that_is_finite():
    deliveries = [on_host(delivery(0, 0.0, own=False)), on_host(delivery(0, 0.0, own=False))]
    found = AVERAGE(deliveries, 0)
    assert not found.mean.good and not found.metrics["finite"]
    assert np.isnan(found.metrics["loss"]) and found.metrics["workers"] == 1.0
    assert not found.mean.payload[0].any() and found.own.tolist() == [False, False]
