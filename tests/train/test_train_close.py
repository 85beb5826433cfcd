"""A loop that closes its windows in a job of several processes waits for those in flight."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import elche_jax as elche
from elche_jax.cadence import Controller, WindowPlan
from elche_jax.engine.lane import Lane
from elche_jax.engine.runner import Launch
from elche_jax.engine.timing import WindowTimes
from elche_jax.train.finite import FinitePolicy, FiniteWatch
from elche_jax.train.in_flight import InFlight
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.options import Options
from elche_jax.train.pipeline import Pipeline


class Loop:
    """A loop with two windows in flight; notes what a close waits for."""

    def __init__(self, monkeypatch):
        devices = tuple(Mock(platform="gpu", process_index=0) for _ in range(2))
        feed = SimpleNamespace(fleet=Lane(devices, (0, 1)))
        self.scheduler = LiveScheduler(Controller(elche.EveryBatch()), 2, hint=False)
        watch = FiniteWatch(FinitePolicy("ignore"), devices)
        self.run = Pipeline(feed, self.scheduler, elche.Cursor(), watch, None, None, Options())
        for number in range(2):
            plan = WindowPlan(number, 0, (1, 1), 2)
            launch = Launch(None, number, 0.0, plan.counts)
            self.run._flights[number] = InFlight(plan, 0.0, launch)
        self.run._job = SimpleNamespace(one_process=False)
        self.waits = []
        monkeypatch.setattr(self.run._changed, "wait_for", self._wait_for)

    def _wait_for(self, until):
        self.waits.append(bool(until()))

    def complete(self, number):
        self.run.on_complete(WindowTimes(number, 0.0, (1.0, 1.0), (1.0, 1.0)))


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_a_close_waits_for_what_is_in_flight(loop):
    loop.run.close()
    assert loop.waits == [False]


def test_it_does_where_the_loop_has_recorded_a_window_itself(loop):
    """As it does if a mean is known before the loop has dispatched all of its window."""
    loop.complete(0)
    loop.run.close()
    assert loop.waits == [False]


def test_it_does_where_that_failed(loop, monkeypatch):
    monkeypatch.setattr(loop.scheduler, "observe", Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"):
        loop.complete(0)
    loop.run.close()
    assert loop.waits == [False]


def test_a_close_while_a_window_is_recorded_does_not_wait_for_it(loop, monkeypatch):
    monkeypatch.setattr(loop.scheduler, "observe", lambda record, at, run: loop.run.close())
    loop.complete(0)
    assert loop.waits == [] and loop.run.closed
