"""The numbers of a run, against sums by hand and in NumPy."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence.window import WindowRecord
from elche_jax.observe.report import (
    DeviceReport,
    RunReport,
    device_reports,
    imbalance,
    limit_share,
    make_report,
    ms_per_batch,
)

COMPILES = {"hits": 7, "misses": 2, "ahead": 1, "seconds": 3.5, "waited_s": 2.0}


def record(counts, busy_ms, wall_ms, window=0, steady=True, examples=0, sync_ms=1.0):
    return WindowRecord(window, 0, counts, examples, busy_ms, wall_ms, sync_ms, 2 * sync_ms, steady)


def test_ms_per_batch_is_the_median_over_the_windows_a_device_ran_in():
    records = [
        record((2, 0), (10.0, 0.0), 10.0),  # 5 ms
        record((4, 1), (24.0, 9.0), 30.0),  # 6 ms, 9 ms
        record((1, 1), (50.0, 9.0), 60.0),  # an outlier of 50 ms
    ]
    assert ms_per_batch(records, 0) == 6
    assert ms_per_batch(records, 1) == 9
    assert ms_per_batch(records[:1], 1) is None


def test_one_device_is_measured_by_the_window():
    assert ms_per_batch([record((4,), (), 20.0)], 0) == 5


def test_limit_share_by_hand():
    # solo: 100 and 50 microbatches per second; together 150, so 0.2 s could do 30
    records = [record((16, 8), (160.0, 160.0), 200.0)]
    assert limit_share(records) == pytest.approx(24 / 30)


@settings(deadline=None)
@given(
    ms=st.lists(st.floats(0.1, 50), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    waste=st.floats(0, 10),
)
def test_limit_share_is_one_where_nobody_waits(ms, counts, waste):
    counts = tuple(counts[: len(ms)])
    busy = tuple(c * t for c, t in zip(counts, ms, strict=True))
    share = limit_share([record(counts, busy, max(busy) + waste)] * 3)
    # the machine's work over what it could have done in that time
    could = (np.float64(max(busy) + waste) / np.array(ms)).sum()
    assert share == pytest.approx(sum(counts) / could)
    assert share <= 1 + 1e-9
    if waste == 0 and max(busy) == min(busy):
        assert share == pytest.approx(1)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record((2, 0), (10.0, 0.0), 10.0)],  # one device never ran
        [record((2, 2), (10.0, 0.0), 10.0)],  # or was never measured
        [record((2, 2), (10.0, 10.0), 0.0)],
    ],
)
def test_limit_share_is_not_known_before_all_are_measured(records):
    assert limit_share(records) is None


def test_imbalance_by_hand():
    # equal counts take 20 ms each; the devices work 5 + 5 + 10 + 20 of 80 ms
    equal = record((1, 1, 1, 1), (5.0, 5.0, 10.0, 20.0), 20.0)
    assert imbalance([equal]) == pytest.approx(0.5)
    # counts do not matter, the speeds do
    fitted = record((4, 4, 2, 1), (20.0, 20.0, 20.0, 20.0), 20.0)
    assert imbalance([fitted]) == pytest.approx(0.5)


def test_no_imbalance_without_measurements_or_differences():
    assert imbalance([]) == 0
    assert imbalance([record((0, 0), (0.0, 0.0), 1.0)]) == 0
    assert imbalance([record((2, 4), (10.0, 20.0), 20.0)]) == 0


def test_device_reports_by_hand():
    records = [
        record((4, 1), (40.0, 20.0), 50.0),
        record((3, 0), (30.0, 0.0), 50.0),
        record((5, 6), (900.0, 900.0), 1000.0, steady=False),
    ]
    assert device_reports(records, ["a", "b"]) == [
        DeviceReport("a", 10.0, 12, 0.7),
        DeviceReport("b", 20.0, 7, 0.2),
    ]
    assert device_reports([], ["a"]) == [DeviceReport("a", None, 0, 0.0)]


def test_times_of_a_report_are_those_of_steady_windows():
    records = [
        record((9, 9), (900.0, 900.0), 1000.0, steady=False, examples=1000, sync_ms=99.0),
        record((4, 2), (40.0, 40.0), 50.0, examples=60, sync_ms=1.0),
        record((4, 2), (40.0, 40.0), 50.0, examples=60, sync_ms=2.0),
        record((4, 2), (40.0, 40.0), 100.0, examples=60, sync_ms=9.0),
    ]
    report = make_report(records, ["a", "b"], (5, 3), COMPILES)
    assert report == RunReport(
        devices=(DeviceReport("a", 10.0, 21, 0.6), DeviceReport("b", 20.0, 15, 0.6)),
        counts=(5, 3),
        windows=4,
        examples_per_s=pytest.approx(180 / 0.2),
        limit_share=pytest.approx(18 / (200 * (1 / 10 + 1 / 20))),
        sync_ms=2.0,
        skew_ms=4.0,
        compile_hits=7,
        compile_misses=2,
        compiled_ahead=1,
        compile_s=3.5,
    )


def test_report_of_a_run_that_has_not_begun():
    report = make_report([], ["a", "b"], (1, 1), COMPILES)
    assert report.windows == 0
    assert report.examples_per_s == 0
    assert report.limit_share is None
    assert (report.sync_ms, report.skew_ms) == (0, 0)
    assert "- of the limit" in str(report)


def test_report_reads_as_a_table():
    report = RunReport(
        devices=(
            DeviceReport("cuda:0", 5.125, 1200, 0.98),
            DeviceReport("cuda:1", None, 0, 0),
        ),
        counts=(16, 4),
        windows=75,
        examples_per_s=12345.6,
        limit_share=0.954,
        sync_ms=1.234,
        skew_ms=0.5,
        compile_hits=70,
        compile_misses=3,
        compiled_ahead=2,
        compile_s=1.26,
    )
    assert str(report).splitlines() == [
        "device              ms/microbatch   counts   microbatches   busy",
        "cuda:0                       5.12       16           1200    98%",
        "cuda:1                          -        4              0     0%",
        "last 75 windows: 12,346 examples/s, 95.4% of the limit, sync 1.23 ms, skew 0.50 ms",
        "compiles: 3 waited for, 2 ahead, 70 hits, 1.3 s",
    ]
    assert "- of the limit" in str(dataclasses.replace(report, limit_share=None))
    assert "ahead, 1.3 s" in str(dataclasses.replace(report, compile_hits=None))


def test_sizes_and_numbers_read_as_they_are():
    report = make_report([record((4,), (), 50.0)], ["a"], (4,), COMPILES, 1, 10_004, 96)
    text = str(report)
    assert "last 1 window: " in text and "not finite: 1 window (" in text
    assert "exchange: 10.00 kB per device and window (96 bytes frozen, left out)" in text
    big = str(dataclasses.replace(report, exchange_bytes=2_500_000_000, frozen_bytes=0))
    assert "exchange: 2.50 GB per device and window" in big
