"""The line for a lane that costs more than it gives."""

import dataclasses
import functools
import itertools
import logging

import jax
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.cadence import Rest, WindowPlan, WindowRecord
from elche_jax.engine.lane import lanes_of
from elche_jax.train.worth import WINDOWS, LaneWorth


def lines_of(devices, counts, sync_ms, caplog, windows=WINDOWS, **changes):
    worth = LaneWorth(lanes_of(devices))
    record = WindowRecord(0, 0, counts, 64, (90.0,) * len(counts), 100.0, sync_ms, 0.0, True)
    with caplog.at_level(logging.WARNING, "elche_jax"):
        for _ in range(windows):
            worth.observe(dataclasses.replace(record, **changes))
    return caplog.messages


def test_a_lane_below_the_cost_of_the_exchange_is_told_once(twins, caplog):
    devices = [jax.devices("cpu")[0], twins[0]]
    assert lines_of(devices, (98, 2), 5.0, caplog, windows=3 * WINDOWS) == [
        "elche: twin (rank 1) does 2.0 % of the work and the exchange takes 5.0 % of a window: the "
        "others are probably faster without it. Leave it out of devices, or make windows longer."
    ]


def test_a_lane_of_several_devices_is_told_with_all_ranks(twins, caplog):
    devices = [twins[0], jax.devices("cpu")[0], twins[1]]
    (line,) = lines_of(devices, (1, 97, 2), 5.0, caplog)
    assert line.startswith("elche: twin (ranks 0, 2) does 3.0 % of the work")


@pytest.mark.parametrize(
    ("counts", "sync_ms", "windows", "changes"),
    [
        ((90, 10), 5.0, WINDOWS, {}),  # it gives twice what it costs
        ((98, 2), 5.0, WINDOWS - 1, {}),
        ((98, 2), 5.0, WINDOWS, {"steady": False}),
        ((98, 2), 5.0, WINDOWS, {"cold": True}),
        ((100, 0), 5.0, WINDOWS, {}),  # it rests
    ],
)
def test_nothing_is_told_otherwise(counts, sync_ms, windows, changes, twins, caplog):
    devices = [jax.devices("cpu")[0], twins[0]]
    assert lines_of(devices, counts, sync_ms, caplog, windows, **changes) == []


def test_nothing_is_told_of_alike_devices(caplog):
    assert lines_of(jax.devices("cpu")[:2], (98, 2), 5.0, caplog) == []


# -- lanes that rest


REST = Rest(groups=((0,), (1,), (2, 3)))


def changed(before, after, gain, devices, caplog):
    worth = LaneWorth(lanes_of(devices), REST)
    first = REST.init(4)
    with caplog.at_level(logging.WARNING, "elche_jax"):
        worth.changed(
            dataclasses.replace(first, resting=before),
            dataclasses.replace(first, resting=after, gain=gain, pauses=(100, 100, 100)),
        )
    return caplog.messages


def test_a_lane_that_begins_or_ends_to_rest_is_told(twins, caplog):
    devices = [jax.devices("cpu")[0], *twins[:3]]
    assert changed((False,) * 3, (False, False, True), 1.25, devices, caplog) == [
        "elche: twin (ranks 2, 3) rests: the other devices train 25.0 % faster without it. It is "
        "tried again after 100 windows."
    ]
    caplog.clear()
    assert changed((False, True, False), (False,) * 3, 0.8, devices, caplog) == [
        "elche: twin (rank 1) works again: the job is 25.0 % faster with it."
    ]


def test_a_lane_that_works_in_place_of_another_is_told(twins, caplog):
    devices = [jax.devices("cpu")[0], *twins[:3]]
    assert changed((False, True, True), (True, False, False), 1.05, devices, caplog) == [
        "elche: cpu (rank 0) rests: the other devices train 5.0 % faster without it. It is "
        "tried again after 100 windows.",
        "elche: twin (rank 1) works again: the job is 5.0 % faster with it.",
        "elche: twin (ranks 2, 3) works again: the job is 5.0 % faster with it.",
    ]


def test_only_lanes_that_may_rest_are_tried(mixed):
    def rest(**options):
        train = elche.build_train_step(
            lambda params, batch, rng: 0.0, optax.sgd(0.1), **{"devices": mixed, **options}
        )
        return train._scheduler._controller.rest

    assert rest().groups == ((0, 2), (1,))
    assert rest(averaging=elche.ParameterAveraging()).groups == ((0, 2), (1,))
    assert rest(lanes=((0,), (1,), (2,))).groups == ((0,), (1,), (2,))
    none = [
        {"devices": mixed[:1]},
        {"devices": [mixed[0], mixed[2]]},
        {"cadence": elche.FixedTotal(8)},
        {"cadence": elche.ElChe(rests=False)},
        {"cadence": elche.Replay([(1, 1, 1)])},
    ]
    assert [rest(**options) for options in none] == [None] * len(none)


RULES = [
    None,
    elche.MeanGradient(delay=1),
    elche.MeanGradient(compression="int8"),
    elche.ParameterAveraging(),
    elche.DiLoCo(optax.sgd(0.7, momentum=0.9)),
]


QUICK = [(1, elche.ParameterAveraging())]  # test_train_lanes_rest has the mean gradient


@pytest.mark.parametrize(
    ("late", "averaging"),
    [row if row in QUICK else slow(*row) for row in itertools.product([0, 1], RULES)],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_a_run_in_which_a_lane_rests(late, averaging, mixed, monkeypatch, caplog):
    """The clock says that the others are faster without it; what is trained stays exact."""
    measured = WindowPlan.measured

    def slowed(plan, busy_ms, wall_ms, **rest):
        wall_ms = 3.0 * sum(plan.counts) if plan.counts[late] else 1.0 * sum(plan.counts)
        busy_ms = tuple(wall_ms * (count > 0) for count in plan.counts)
        return measured(plan, busy_ms, wall_ms, **rest | {"sync_ms": 0.1, "steady": True})

    monkeypatch.setattr(WindowPlan, "measured", slowed)
    monkeypatch.setattr("elche_jax.train.worth.Rest", functools.partial(Rest, first=4, pairs=2))
    train = elche.build_train_step(
        lambda params, batch, rng: ((batch["x"] @ params) ** 2).mean(), optax.sgd(0.01),
        devices=mixed, cadence=elche.ElChe(anchor=1), averaging=averaging,
    )  # fmt: skip
    state = train.init(np.ones(3, "float32"))
    rows = {"x": np.random.default_rng(0).normal(size=(400, 3)).astype("float32")}
    with (
        caplog.at_level(logging.WARNING, "elche_jax"),
        train.windows(rows, 2, epochs=None) as windows,
    ):
        for window in windows:
            state, _ = train(state, window)
            if caplog.messages:
                break
            assert window.index < 200
    assert any(
        "rests: the other devices train 200.0 % faster without it" in m for m in caplog.messages
    )
    elche.check_replicas(train.common(state))
    again = elche.build_train_step(
        lambda params, batch, rng: ((batch["x"] @ params) ** 2).mean(), optax.sgd(0.01),
        devices=mixed, cadence=elche.Replay(train.counts_history), averaging=averaging,
    )  # fmt: skip
    other = again.init(np.ones(3, "float32"))
    with again.windows(rows, 2, epochs=None) as windows:
        for window in windows:
            other, _ = again(other, window)
            if window.index + 1 == len(train.counts_history):
                break
    assert np.asarray(other.params).tobytes() == np.asarray(state.params).tobytes()
