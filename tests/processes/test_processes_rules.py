"""Every rule over several processes, against NumPy."""

import json
from functools import cache
from itertools import product

import jobs
import numpy as np
import pytest
from averaged import assert_history
from exchanged import train as by_hand_in_numpy
from marks import pairs, slow
from reference import LEAVES
from test_averaging_lanes import COUNTS
from test_averaging_table import DIGITS_KEPT, TABLE, TOLERANCE

FLEETS = {"2+1": (2, 1), "1+1": (1, 1), "2+2": (2, 2), "1+1+1": (1, 1, 1)}
"""Devices of each process."""
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
WIDE = [*product(DIGITS_KEPT, ["device, float64", "host, float64"])]
"""Rows with float64 parameters."""
QUICK = {
    ("2+1", "mean gradient, int8, three pending", "host"),
    ("2+1", "Local SGD, one pending", "host, float64"),
    ("2+1", "DiLoCo, fragments, int8", "device"),
    ("2+1", "DiLoCo, bfloat16", "ahead by 5"),
}
"""Each exchange, with rules that send fragments, fewer bits and float64. Lanes of one process show
the parts of a rule; the plain mean of gradients is that of `test_processes_train_as_one`."""
ROWS = pairs(((fleet, *row) for fleet, row in product(FLEETS, [*ALL, *WIDE])), first=QUICK)
"""Each rule with each exchange, both in each fleet; `make test` has one fleet."""
APART = [name for name, (_, by_hand) in TABLE.items() if by_hand.get("local") and (
    by_hand.get("delay") or by_hand.get("parts"))]  # fmt: skip


def marked(rows):
    return [row if row in QUICK else slow(*row) for row in rows]


@pytest.fixture(scope="module")
def job(request):
    """What the processes of a fleet say, each fleet run once."""
    asked = jobs.asked(request, "fleet", "name", "exchange")

    @cache
    def said(fleet):
        rows = [row for at, *row in asked if at == fleet]
        return jobs.run("every_rule.py", FLEETS[fleet], json.dumps(rows))

    return said


@pytest.mark.parametrize(("fleet", "name", "exchange"), marked(ROWS))
def test_every_rule_over_processes(fleet, name, exchange, job):
    said = job(fleet)
    _, by_hand = TABLE[name]
    counts, outer = COUNTS[sum(FLEETS[fleet])], by_hand.get("outer")
    want = by_hand_in_numpy(
        counts, **by_hand | ({"outer": outer()} if outer else {}), ahead=AHEAD.get(exchange)
    )
    rtol, atol = TOLERANCE["float64" if "float64" in exchange else by_hand.get("kind")]
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
    ("fleet", "name", "exchange"),
    marked(
        row
        for row in ROWS
        if row[1] not in APART and not (TABLE[row[1]][1].get("local") and row[2] in AHEAD)
    ),
)
def test_replicas_are_bitwise_equal_across_processes(fleet, name, exchange, job):
    rows = [process[exchange][name]["params"] for process in job(fleet)]
    for windows in zip(*rows, strict=True):
        for leaf in LEAVES:
            copies = [copy for own in windows for copy in own[leaf]]
            assert all(copy == copies[0] for copy in copies)


@pytest.mark.parametrize("fleet", ["2+1", *map(slow, [*FLEETS][1:])])
def test_every_rank_is_in_one_process(fleet, job):
    ranks = [rank for process in job(fleet) for rank in process["ranks"]]
    assert sorted(ranks) == list(range(sum(FLEETS[fleet])))


def test_processes_have_hashes_of_their_own(job):
    """As in a job of a user, where what is in the order of a set differs between processes."""
    assert len({process["hash"] for process in job("2+1")}) == 2
