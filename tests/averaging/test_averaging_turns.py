"""What a loop exchanges with other processes while a thread averages its windows."""

import threading
from functools import partial

import pytest
from test_averaging_exchange import AVERAGE, Setup
from waits import eventually

from elche_jax._turns import SECOND, TURNS, Turns
from elche_jax.engine.survey import Survey
from elche_jax.train.telling import unmeasured_rows


class OfJob(Setup):
    """An exchange of one of several processes, which notes when a window is averaged."""

    def __init__(self, noted):
        def average(deliveries, window, told):
            TURNS.wait()  # as before every exchange: this thread has its turn
            noted.append(f"window {window}")
            return AVERAGE(deliveries, window)

        super().__init__(2, average)

    def dispatch(self, number):
        self.begin(number, (1, 1), survey=Survey(partial(unmeasured_rows, [True, True])))
        self.exchange.combining(number, 0.0, None)


@pytest.fixture
def noted():
    return []


@pytest.fixture
def job(noted):
    made = [OfJob(noted), OfJob(noted)]
    yield made
    for one in made:
        one.gates.open(1, 0, 1)
        one.gates.open(2, 0, 1)
        one.exchange.close()


def in_turn(noted, name, wait):
    """A thread that notes when it was its turn."""
    thread = threading.Thread(target=lambda: (wait(), noted.append(name)))
    thread.start()
    return thread


def ended(thread):
    thread.join(30)
    return not thread.is_alive()


def test_an_exchange_of_the_loop_comes_after_windows_that_were_dispatched(job, noted):
    one, _ = job
    one.dispatch(1)
    one.dispatch(2)
    loop = in_turn(noted, "the loop's", TURNS.wait)
    one.gates.open(1, 0, 1)
    eventually(lambda: noted == ["window 1"])
    one.gates.open(2, 0, 1)
    assert ended(loop)
    assert noted == ["window 1", "window 2", "the loop's"]


def test_windows_of_one_loop_come_after_those_of_another(job, noted):
    one, other = job
    one.dispatch(1)
    loop = in_turn(noted, "dispatched", partial(other.dispatch, 2))
    one.gates.open(1, 0, 1)
    assert ended(loop)
    other.gates.open(2, 0, 1)
    other.wait_over(2)
    assert noted == ["window 1", "dispatched", "window 2"]


def test_later_windows_of_a_loop_do_not_wait(job, noted):
    one, _ = job
    one.dispatch(1)
    loop = in_turn(noted, "dispatched", partial(one.dispatch, 2))
    assert ended(loop) and noted == ["dispatched"], "while no device is done with window 1"


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_nobody_waits_for_a_thread_that_has_ended(job, noted, how):
    one, _ = job
    one.dispatch(1)
    loop = in_turn(noted, "the loop's", TURNS.wait)
    if how == "failed":
        one.coordinator.failed(ArithmeticError("no average"))
    else:
        one.coordinator.end()
    assert ended(loop) and noted == ["the loop's"]


def refused(turns):
    """What a thread is told that begins a call."""
    said = []

    def call():
        try:
            with turns.call():
                said.append(None)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    assert ended(thread)
    return said[0]


def test_a_second_thread_is_refused_and_then_all(caplog):
    turns = Turns()
    with turns.call(), turns.call():
        turns.of_windows(lambda: turns.call().__enter__())  # the thread of a loop
        assert refused(turns) == refused(turns) == SECOND
    assert caplog.messages == [f"elche: {SECOND}"], "at once, and once"
    with pytest.raises(RuntimeError, match="one thread of each"), turns.call():
        pass


def test_threads_one_after_the_other_are_not_refused():
    turns = Turns()
    with turns.call():
        pass
    assert refused(turns) is None
    with turns.call():
        pass
