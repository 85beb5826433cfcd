"""Every rule over several processes, against NumPy."""

import json
from itertools import product

import jobs
import numpy as np
import pytest
from averaged import assert_history
from exchanged import train as by_hand_in_numpy
from marks import slow
from reference import LEAVES
from test_averaging_lanes import APART as EACH_PART, COUNTS
from test_averaging_table import TABLE, TOLERANCE

FLEETS = [(2, 1), slow((1, 1)), slow((2, 2)), slow((1, 1, 1))]
EXCHANGES = ["device", "host"]


def beyond(most):
    """Whether a device would begin too many microbatches beyond the oldest window."""
    return lambda pending, counts: (
        len(pending) > 3
        or (len(pending) > 0 and max(map(sum, zip(*pending[1:], counts, strict=True))) > most)
    )


AHEAD = {
    "ahead": lambda pending, counts: len(pending) > 1,
    "ahead by 5": beyond(5),
    "ahead by 4": lambda pending, counts: len(pending) > 1 or beyond(4)(pending, counts),
}
"""When a mean must be applied where devices run ahead, see `exchanged.train`."""
MAY_RUN_AHEAD = [
    name for name, (_, by_hand) in TABLE.items()
    if not by_hand.keys() & {"delay", "parts", "optimizer_state"}
]  # fmt: skip
ALL = [*product(TABLE, EXCHANGES), *product(MAY_RUN_AHEAD, AHEAD)]
QUICK = {(name, EXCHANGES[at % 2]) for at, name in enumerate(EACH_PART)} | {
    ("mean gradient", "ahead"), ("DiLoCo", "ahead by 5"), ("Local SGD, int8", "ahead by 4"),
    ("a rule of one's own", "ahead"),
}  # fmt: skip
ROWS = [row if row in QUICK else slow(*row) for row in ALL]
APART = [name for name, (_, by_hand) in TABLE.items() if by_hand.get("local") and (
    by_hand.get("delay") or by_hand.get("parts"))]  # fmt: skip


@pytest.fixture(scope="module", params=FLEETS, ids=lambda fleet: "+".join(map(str, fleet)))
def job(request):
    """What the processes say, and the number of devices of each."""
    rows = json.dumps(jobs.asked(request, "name", "exchange"))
    return jobs.run("every_rule.py", request.param, rows), request.param


@pytest.mark.parametrize(("name", "exchange"), ROWS)
def test_every_rule_over_processes(name, exchange, job):
    said, fleet = job
    _, by_hand = TABLE[name]
    counts, outer = COUNTS[sum(fleet)], by_hand.get("outer")
    want = by_hand_in_numpy(
        counts, **by_hand | ({"outer": outer()} if outer else {}), ahead=AHEAD.get(exchange)
    )
    rtol, atol = TOLERANCE[by_hand.get("kind")]
    first, *others = (process[exchange][name] for process in said)
    for process in said:
        mine = process[exchange][name]
        got = [{leaf: np.array(rows[leaf]) for leaf in LEAVES} for rows in mine["params"]]
        own = [[devices[rank] for rank in process["ranks"]] for devices in want]
        assert_history(got, own, rtol, atol)
        moved = np.abs(got[-1]["w"] - got[0]["w"]).max()
        assert moved > 20 * atol, "the tolerance must be small beside what training moves"
        assert mine["finite"]
    for other in others:  # they plan alike because they know the same
        assert repr(other["loss"]) == repr(first["loss"])  # NaN is equal to itself
        assert other["records"] == first["records"]
        assert len(first["records"]) == len(counts)


@pytest.mark.parametrize(
    ("name", "exchange"),
    [
        row if row in QUICK else slow(*row)
        for row in ALL
        if row[0] not in APART and not (TABLE[row[0]][1].get("local") and row[1] in AHEAD)
    ],
)
def test_replicas_are_bitwise_equal_across_processes(name, exchange, job):
    said, _ = job
    rows = [process[exchange][name]["params"] for process in said]
    for windows in zip(*rows, strict=True):
        for leaf in LEAVES:
            copies = [copy for own in windows for copy in own[leaf]]
            assert all(copy == copies[0] for copy in copies)


def test_every_rank_is_in_one_process(job):
    said, fleet = job
    assert sorted(rank for process in said for rank in process["ranks"]) == list(range(sum(fleet)))
