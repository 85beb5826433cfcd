"""Jobs in which a process ends while the host exchanges windows that devices ran ahead of."""

import json

import jobs
import numpy as np
import pytest
from exchanged import train as by_hand_in_numpy
from losing_pending import BACK, EPOCHS, ROWS
from reference import BATCH
from test_averaging_table import TABLE
from test_processes_lost import check_fit
from test_processes_lost_pending import check_params
from test_processes_rules import AHEAD

from elche_jax.train.training import STATE

pytestmark = pytest.mark.slow  # `make test` has one kill, with no window pending
ELCHE, TOTAL = ("ElChe", 3, 0.1, 4), ("FixedTotal", 8)
SIZE = EPOCHS * len(ROWS["x"]) // BATCH
"""Microbatches of the run."""


def run(fleet, rule, way, cadence, how_else=None, **dying):
    """What the processes say that are left; `dying` says how the others end, by their number."""
    how = {int(name[1:]): moment for name, moment in dying.items()}
    job = json.dumps((rule, cadence, how, how_else, way))
    said = jobs.run("losing_pending.py", fleet, job, killed=[*how])
    return {at: one for at, one in enumerate(said) if at not in how}


def check(said, fleet, rule, way):
    """What must hold: no microbatch is left out or used twice, and all is as by hand."""
    _, by_hand = TABLE[rule]
    delay, outer = by_hand.get("delay"), by_hand.get("outer")
    first, *others = said.values()
    for other in others:
        for name in ("ran", "counts", "records", "weight", "at", "finite", "ended", "seen"):
            assert str(other[name]) == str(first[name]), name  # NaN is equal to itself
    counts = np.array(first["counts"])
    sizes = counts.sum(axis=1)
    assert sizes.sum() == SIZE and first["seen"] == [SIZE, len(counts)]
    assert counts.tolist() == [*{at: each for at, each in first["ran"]}.values()]
    assert len(first["records"]) == len(counts)
    assert all(first["finite"])
    if delay:  # a window's metrics are those of the mean applied last, of all its microbatches
        places = np.split(np.arange(SIZE) % (SIZE // EPOCHS), np.cumsum(sizes)[:-1])
        told = told_in(first["ran"], delay)
        assert first["weight"][delay:] == [sizes[at] for at in told]
        want = [places[at].mean() for at in told]
        np.testing.assert_allclose(first["at"][delay:], want, 1e-6)
    ranks = np.split(np.arange(sum(fleet)), np.cumsum(fleet)[:-1])
    for process, at in first["ended"]:
        assert not counts[at:, ranks[process]].any()
    by_hand = by_hand | ({"outer": outer()} if outer else {})  # the table is shared
    ahead = AHEAD.get(way)
    want = by_hand_in_numpy(counts, rows=ROWS, ran=first["ran"], ahead=ahead, **by_hand)[-1]
    return check_params(said, fleet, rule, want)


def told_in(ran, delay):
    """Of which window each tells, from the first one that does; `ran` as in `exchanged.train`."""
    told, before, last = {}, -1, -1
    for at, _ in ran:
        last = max(at, last)  # the window after which others run again is told of then
        whole = -1 if at == before + 1 else at - 1
        told[last] = max(last - delay, whole, told.get(last, -1))
        before = at
    return [told[window] for window in range(delay, last + 1)]


MOMENTS = {
    "between its window and the exchange": ("average", 7),
    "within the average": ("one of its exchanges", 14),
    "as it dispatches a window": ("dispatch", 8),
    "in the first average": ("average", 1),
    "in the second average": ("average", 2),
    "in the second epoch": ("average", 14),
}
ONE, THREE = "mean gradient, one pending", "mean gradient, three pending"
WAYS = [(ONE, "host"), (THREE, "host"), *(("mean gradient", way) for way in AHEAD)]


def each(name, values, times=1):
    """A test of each value in so many ways, the next ones for the next value."""
    rows = [
        (value, *WAYS[(at * times + more) % len(WAYS)])
        for at, value in enumerate(values)
        for more in range(times)
    ]
    return pytest.mark.parametrize((name, "rule", "way"), rows)


@each("moment", MOMENTS)
def test_the_others_run_again_what_has_no_mean(moment, rule, way):
    fleet = (1, 1, 1)
    check(run(fleet, rule, way, TOTAL, p2=MOMENTS[moment]), fleet, rule, way)


RULES = [(name, "host") for name, (_, by_hand) in TABLE.items() if by_hand.get("delay")][1::2]
"""Those that do not end so with an exchange on devices, in test_processes_lost_pending.py."""
KINDS = ["mean gradient, int8", "Local SGD, bfloat16", "DiLoCo", "a rule of one's own"]
"""Each kind of rule and each compression once."""


@pytest.mark.parametrize(("rule", "way"), [*RULES, *((name, "ahead") for name in KINDS)])
def test_every_rule(rule, way):
    fleet = (2, 1, 1)
    check(run(fleet, rule, way, TOTAL, p1=("average", 5)), fleet, rule, way)


@each("second", [11, 8, 6, 5])
def test_two_that_end_one_after_the_other(second, rule, way):
    """The second one in a later window, and as windows run again."""
    fleet = (1, 2, 1)
    said = run(fleet, rule, way, TOTAL, p1=("average", 4), p2=("average", second))
    ended = check(said, fleet, rule, way)
    assert ended[0] == [1, 3] and ended[1][0] == 2


@each("seed", range(5))
def test_at_a_random_moment(seed, rule, way):
    fleet = (1, 1, 1)
    check(run(fleet, rule, way, TOTAL, p2=("time", seed)), fleet, rule, way)


@each("back", [1, 2, 3, 4])
def test_in_the_last_windows(back, rule, way):
    fleet, total = (1, 1, 1), TOTAL[1]
    last = EPOCHS * -(-SIZE // EPOCHS // total)
    said = run(fleet, rule, way, TOTAL, p2=("average", last + 1 - back))
    assert check(said, fleet, rule, way)


@each("number", [1, 2], times=3)  # more windows there may not be: speeds say how many
def test_as_speeds_become_known(number, rule, way):
    """Then plans wait for the record of a window that may be lost."""
    fleet = (1, 1)
    check(run(fleet, rule, way, ELCHE, p1=("average", number)), fleet, rule, way)


@pytest.mark.parametrize(
    ("back", "number"), [("late", 4), ("late, back at once", 4), ("late, back at once", 7)]
)
@pytest.mark.parametrize(("rule", "way"), [(THREE, "host"), ("mean gradient", "ahead")])
def test_a_device_that_is_late_meanwhile(back, number, rule, way):
    """It is given what it has missed when windows run again, and once it is back."""
    fleet, (_, by_hand) = (2, 1, 1), TABLE[rule]
    said = run(fleet, rule, way, ("EveryBatch",), back, p2=("average", number))
    first, second = said.values()
    for name in ("ran", "counts", "records", "weight", "finite", "ended", "seen"):
        assert str(first[name]) == str(second[name]), name
    counts, records = np.array(first["counts"]), first["records"]
    assert counts.sum() == SIZE and len(records) == len(counts)
    assert first["seen"] == [SIZE, len(counts)]
    late = [at for at, record in enumerate(records) if "left_out=(1,)" in record]
    away = counts[max(late) + 1 : BACK + 1, 1]
    assert 2 in late and counts[-1][1] > 0
    assert back != "late" or (len(away) and not away.any())
    # by hand: without its microbatches of these windows
    at = np.cumsum([0, *counts.sum(axis=1)])
    lost = [at[window] + counts[window][0] for window in late]
    kept = np.delete(np.arange(SIZE), lost)
    every = {name: np.concatenate([leaf] * EPOCHS) for name, leaf in ROWS.items()}
    rows = {name: leaf.reshape(SIZE, BATCH, *leaf.shape[1:])[kept] for name, leaf in every.items()}
    rows = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in rows.items()}

    def there(window, row):
        return [0 if rank == 1 and window in late else count for rank, count in enumerate(row)]

    ran = [(window, there(window, row)) for window, row in first["ran"]]
    windows = [there(window, row) for window, row in enumerate(counts)]
    ahead = AHEAD.get(way)
    want = by_hand_in_numpy(windows, rows=rows, ran=ran, ahead=ahead, **by_hand)[-1]
    assert check_params(said, fleet, rule, want)


LOST = "train: process 1 (device 1) ended before window {} was complete; 1 of 2 devices are left. "
RULE = "Windows that have no mean yet would have to run again, but {}. Resume from a checkpoint."
CANNOT = {
    "left early": "their loop has ended",
    "another state": STATE,
}


@pytest.mark.parametrize("how_else", CANNOT)
def test_what_cannot_run_again_is_an_error(how_else):
    job = json.dumps((THREE, TOTAL, {1: ("average", 6)}, how_else, "host"))
    said, _ = jobs.run("losing_pending.py", (1, 1), job, killed=[1])
    rule = RULE.format(CANNOT[how_else])
    assert said == {"processes": [1], "error": LOST.format(5) + rule}


def test_steps_of_an_earlier_loop_are_not_lost_in_silence():
    """They go with the first delivery of a loop, and the state before it has none."""
    how_else = "steps of an earlier loop"
    job = json.dumps(("Local SGD, three pending", TOTAL, {1: ("average", 4)}, how_else, "host"))
    said, _ = jobs.run("losing_pending.py", (1, 1), job, killed=[1])
    assert said == {"processes": [1], "error": LOST.format(3) + RULE.format(STATE)}


@pytest.mark.parametrize("exchange", ["ahead", "host"])
def test_a_trainer_goes_on_and_saves(exchange, tmp_path):
    rule = "mean gradient" if exchange == "ahead" else "one pending"
    names = rule, tmp_path, exchange
    first, second, _ = jobs.run("losing_trainer.py", (1, 1, 1), *names, killed=[2])
    check_fit(first, second, rule, tmp_path, exchange)
