"""When a window began on the host: after the averages that the loop has to wait for before it."""

import time
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import optax
import pytest
from reference import BATCH, data, loss_fn, params
from test_averaging_exchange import Setup

import elche_jax as elche
from elche_jax.cadence import WindowPlan
from elche_jax.engine.host.coordinator import Coordinator, OpenWindow
from elche_jax.engine.host.runner import HostRunner
from elche_jax.engine.job import Measured
from elche_jax.engine.runner import Launch
from elche_jax.train.in_flight import InFlight
from elche_jax.train.telling import Telling


def test_a_window_begins_after_the_averages_before_it(monkeypatch):
    applied, begun = [], []
    apply, launch = HostRunner._apply_before, Coordinator.open

    def applies(*given):
        apply(*given)
        applied.append(time.perf_counter())

    def opens(coordinator, window):
        begun.append(window.at)
        launch(coordinator, window)

    monkeypatch.setattr(HostRunner, "_apply_before", applies)
    monkeypatch.setattr(Coordinator, "open", opens)
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], cadence=elche.EveryBatch(),
        exchange=elche.HostExchange(run_ahead=True),
    )  # fmt: skip
    state = train.init(params())
    with train.windows(data(), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            if window.index == 2:
                break
    assert len(begun) == 3
    assert all(waited <= at for waited, at in zip(applied, begun, strict=True))


def test_that_is_what_other_processes_are_told():
    """A window dispatched at 2 s, which began at 4 s, and which the devices end at 5 and 6 s."""
    one = Setup(2)
    try:
        window = OpenWindow(1, 4.0, (1, 1), 1, frozenset(), ahead=True)
        one.coordinator.open(window)
        for rank, end in enumerate([5.0, 6.0]):
            one.coordinator.delivered(rank, window, end, None)
        flight = InFlight(WindowPlan(1, 0, (1, 1), 2), 1.0, Launch(one.exchange, 1, 2.0, (1, 1)))
        job = SimpleNamespace(one_process=False)
        fleet = SimpleNamespace(devices=(Mock(), Mock()), world_size=2, job=job)
        rows = Telling(fleet, False, False).survey(flight, 0, lambda: True)
    finally:
        one.exchange.close()
    assert Measured(*rows.T).busy == pytest.approx([1000.0, 2000.0])
