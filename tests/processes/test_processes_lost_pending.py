"""Jobs in which a process ends while windows are pending, against NumPy."""

import json

import jobs
import numpy as np
import pytest
from exchanged import train as by_hand_in_numpy
from losing_pending import EPOCHS, ROWS
from reference import BATCH, LEAVES
from test_averaging_table import TABLE

from elche_jax.train.lost import taken_over

pytestmark = pytest.mark.slow  # `make test` has one kill, with no window pending
TOTAL = ("FixedTotal", 8)
SIZE = EPOCHS * len(ROWS["x"]) // BATCH
"""Microbatches of the run."""


def run(fleet, rule, cadence, **dying):
    """What the processes say that are left; `dying` says how the others end, by their number."""
    how = {int(name[1:]): moment for name, moment in dying.items()}
    said = jobs.run("losing_pending.py", fleet, json.dumps((rule, cadence, how)), killed=[*how])
    return {at: one for at, one in enumerate(said) if at not in how}


def check(said, fleet, rule):
    """What must hold: no microbatch is left out or used twice, and all is as by hand."""
    _, by_hand = TABLE[rule]
    delay, outer = by_hand["delay"], by_hand.get("outer")
    first, *others = said.values()
    for other in others:
        for name in ("counts", "records", "weight", "at", "finite", "ended", "seen"):
            assert str(other[name]) == str(first[name]), name  # NaN is equal to itself
    counts = np.array(first["counts"])
    sizes = counts.sum(axis=1)
    assert sizes.sum() == SIZE and first["seen"] == [SIZE, len(counts)]
    # a window's metrics are told `delay` windows later, and are of all its microbatches
    places = np.split(np.arange(SIZE) % (SIZE // EPOCHS), np.cumsum(sizes)[:-1])
    assert first["weight"] == [0] * delay + sizes[:-delay].tolist()
    np.testing.assert_allclose(first["at"][delay:], [own.mean() for own in places[:-delay]], 1e-6)
    assert all(first["finite"])
    # as by hand, where pending windows run again, shared out among those that are left
    ranks = np.split(np.arange(sum(fleet)), np.cumsum(fleet)[:-1])
    lost, gone, shared = {}, [], list(map(tuple, first["counts"]))
    window = 0
    for process, at in first["ended"]:
        gone += ranks[process].tolist()
        window = max(window, at)  # one may end as windows run again
        again = range(max(0, window - delay), window)
        for at in again:
            shared[at] = taken_over(shared[at], gone)
        lost[window] = [shared[at] for at in again]
    by_hand = by_hand | ({"outer": outer()} if outer else {})  # the table is shared
    want = by_hand_in_numpy(first["counts"], rows=ROWS, lost=lost, **by_hand)[-1]
    return check_params(said, fleet, rule, want)


# The plans of these jobs differ from run to run, and with them what is a bit off: float32 is by
# the largest element of a leaf, int8 by a level of the largest progress.
NEAR = {"int8": 1e-2, "bfloat16": 2e-2, None: 1e-5}


def check_params(said, fleet, rule, want):
    """The parameters of each device are those by hand; returns who ended, before which window."""
    near = NEAR[TABLE[rule][1].get("kind")]
    ranks = np.split(np.arange(sum(fleet)), np.cumsum(fleet)[:-1])
    for process, one in said.items():
        for name in LEAVES:
            mine = np.array([want[rank][name] for rank in ranks[process]])
            atol = near * max(1, np.abs(mine).max())
            np.testing.assert_allclose(one["params"][name], mine, rtol=0, atol=atol)
    ended = next(iter(said.values()))["ended"]
    assert sorted({*said, *(process for process, _ in ended)}) == [*range(len(fleet))]
    return ended


MOMENTS = {
    "between its window and the exchange": ("exchange", 7),
    "in the middle of a window": ("contribute", 8),
    "in the first exchange": ("exchange", 1),
    "in the second exchange": ("exchange", 2),
    "in the second epoch": ("exchange", 14),
}
ONE, THREE = "mean gradient, one pending", "mean gradient, three pending"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_run_pending_windows_again(moment):
    fleet = (1, 1, 1)
    check(run(fleet, THREE, TOTAL, p2=MOMENTS[moment]), fleet, THREE)


RULES = [name for name, (_, by_hand) in TABLE.items() if by_hand.get("delay")]


@pytest.mark.parametrize("rule", RULES[::2])  # the others in test_processes_lost_ahead.py
def test_every_rule_with_pending_windows(rule):
    fleet = (2, 1, 1)
    check(run(fleet, rule, TOTAL, p1=("exchange", 4)), fleet, rule)


@pytest.mark.parametrize("second", [9, 8, 6])
def test_two_that_end_one_after_the_other(second):
    """The second one in a later window, in that of the first, and as windows run again."""
    fleet = (1, 2, 1)
    said = run(fleet, THREE, TOTAL, p1=("exchange", 4), p2=("exchange", second))
    assert check(said, fleet, THREE) == [[1, 3], [2, {9: 4, 8: 3, 6: 1}[second]]]


def test_at_a_random_moment():
    fleet = (1, 1, 1)
    check(run(fleet, ONE, TOTAL, p2=("time", 0)), fleet, ONE)


LOST = "train: process 1 (device 1) ended before window {} was complete; 1 of 2 devices are left. "


def test_windows_that_an_earlier_loop_left_pending_are_an_error():
    job = json.dumps((THREE, TOTAL, {1: ("exchange", 5)}, "two loops"))
    said, _ = jobs.run("losing_pending.py", (1, 1), job, killed=[1])
    assert said == {"processes": [1], "error": LOST.format(4) + (
        "Windows pending since before this call of windows would have to run again, but their data "
        "are closed. Resume from a checkpoint."
    )}  # fmt: skip


def test_a_window_that_is_not_finite_as_it_runs_again_is_an_error():
    job = json.dumps((THREE, TOTAL, {1: ("exchange", 5)}, "not finite later"))
    said, _ = jobs.run("losing_pending.py", (1, 1), job, killed=[1])
    assert said["error"].startswith("train: loss, gradient, weight (not negative), update")
    assert "those of window 2 (epoch 0, counts (8, 0)) were not: device 0" in said["error"]
