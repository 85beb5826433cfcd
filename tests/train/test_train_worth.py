"""The line for a lane that costs more than it gives."""

import dataclasses
import logging

import jax
import pytest

from elche_jax.cadence import WindowRecord
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
    ],
)
def test_nothing_is_told_otherwise(counts, sync_ms, windows, changes, twins, caplog):
    devices = [jax.devices("cpu")[0], twins[0]]
    assert lines_of(devices, counts, sync_ms, caplog, windows, **changes) == []


def test_nothing_is_told_of_alike_devices(caplog):
    assert lines_of(jax.devices("cpu")[:2], (98, 2), 5.0, caplog) == []
