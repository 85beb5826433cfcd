"""One window's record."""

import dataclasses

import pytest

from elche_jax.cadence.window import WindowRecord

RECORD = WindowRecord(
    window=3, epoch=1, counts=(4, 2), examples=60, busy_ms=(40.0, 25.0), wall_ms=50.0,
    sync_ms=1.0, skew_ms=2.0, steady=True,
)  # fmt: skip


def test_busy_share_is_busy_over_wall():
    assert RECORD.busy_share == pytest.approx((0.8, 0.5))


def test_busy_share_is_never_above_one():
    # threads note the end of a window and of its predecessor at slightly other times
    assert dataclasses.replace(RECORD, busy_ms=(51.0, 25.0)).busy_share == (1.0, 0.5)


def test_one_device_is_busy_all_the_time():
    one = dataclasses.replace(RECORD, counts=(4,), busy_ms=())
    assert one.busy_share == (1.0,)


def test_a_window_that_took_no_time_has_no_share():
    assert dataclasses.replace(RECORD, wall_ms=0.0).busy_share == (0.0, 0.0)


def test_records_are_plain_and_frozen():
    assert dataclasses.asdict(RECORD)["busy_ms"] == (40.0, 25.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECORD.wall_ms = 1.0
