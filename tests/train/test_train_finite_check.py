"""Windows that run again after a loss are counted once."""

from types import SimpleNamespace

import jax
import pytest

import elche_jax as elche
from elche_jax.cadence import Controller, WindowPlan
from elche_jax.engine.lane import Lane
from elche_jax.train.finite import FinitePolicy, FiniteWatch
from elche_jax.train.live_scheduler import KEPT, LiveScheduler
from elche_jax.train.options import Options
from elche_jax.train.pipeline import Pipeline


class Said:
    """Stands for what takes skips and errors."""

    def __init__(self):
        self.skips, self.errors = [], []

    def on_skip(self, plan, event):
        self.skips.append(plan.window)

    def found(self, number, error):
        self.errors.append(str(error))


def plan(window):
    return WindowPlan(window, 0, (1, 1), 2)


@pytest.fixture
def said():
    return Said()


@pytest.fixture
def watch():
    return FiniteWatch(FinitePolicy("skip", 3), jax.devices()[:2])


@pytest.fixture
def check(said, watch, monkeypatch):
    """What a pipeline does with a window of which it is known whether it is finite."""
    feed = SimpleNamespace(fleet=Lane(tuple(jax.devices()[:2]), (0, 1)))
    scheduler = LiveScheduler(Controller(elche.EveryBatch()), 2, hint=False)
    run = Pipeline(feed, scheduler, elche.Cursor(), watch, None, None, Options())
    monkeypatch.setattr(scheduler, "on_skip", said.on_skip)
    monkeypatch.setattr(run.errors, "found", said.found)
    yield run._count
    run.close()


def test_what_was_skipped_is_not_skipped_again(said, watch, check):
    for window, finite in enumerate([True, False, False]):
        check(plan(window), finite, [finite] * 2, 0)
    for window, finite in [(1, False), (2, False), (2, False)]:  # run again, and told late
        check(plan(window), finite, [finite] * 2, 0)
    assert (watch.skipped, watch.in_a_row, said.skips, said.errors) == (2, 2, [1, 2], [])
    check(plan(3), False, [False] * 2, 0)
    assert watch.skipped == 3 and "3 windows in a row were dropped" in said.errors[0]


def test_what_is_finite_again_does_not_begin_the_row_anew(said, watch, check):
    for window, finite in [(0, True), (1, False), (0, True)]:
        check(plan(window), finite, [finite] * 2, 0)
    assert watch.in_a_row == 1


def test_what_is_not_finite_when_run_again_counts(said, watch, check):
    for finite in (True, False):
        check(plan(0), finite, [finite] * 2, 0)
    assert (watch.skipped, said.skips) == (1, [0])


def test_only_windows_that_may_run_again_are_kept(watch, check):
    last = 3 * KEPT
    for window in range(last + 1):
        check(plan(window), False, [False] * 2, 0)
    assert len(check.__self__._not_finite) <= KEPT
    check(plan(last - KEPT // 2), False, [False] * 2, 0)
    assert watch.skipped == last + 1
