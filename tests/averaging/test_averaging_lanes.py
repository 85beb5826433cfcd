"""Every rule over several lanes, of two clients or of alike devices, against NumPy."""

import jax
import numpy as np
import pytest
from averaged import assert_history, train_on
from exchanged import train as by_hand_in_numpy
from marks import slow
from reference import LEAVES
from test_averaging_table import COUNTS, TABLE, TOLERANCE

import elche_jax as elche

COUNTS = COUNTS | {3: [(3, 1, 2), (2, 2, 1), (4, 0, 1), (1, 3, 2), (0, 0, 3), (3, 1, 1), (1, 1, 1),
                       (0, 2, 5)]}  # fmt: skip


def fleet(name, twins):
    """Devices, and which of them make a lane."""
    cpus = jax.devices("cpu")
    return {
        "1+1": ([twins[0], cpus[0]], None),
        "2+1": ([cpus[0], twins[0], cpus[1]], None),
        "2+2": ([twins[0], cpus[0], cpus[1], twins[1]], None),
        "1+3 alike": (cpus[:4], ((2,), (3, 0, 1))),
    }[name]


FLEETS = ["2+1", "1+1", "2+2", "1+3 alike"]
APART = [
    "mean gradient",
    "mean gradient, int8, three pending",
    "Local SGD",
    "Local SGD, three pending",
    "DiLoCo, fragments, int8",
    "DiLoCo, bfloat16",
    "a rule of one's own, moments averaged",
]
"""Rules that have all parts of a rule between them: what is kept, sent, pending and weighed."""
ONCE = [(name, FLEETS[at % len(FLEETS)]) for at, name in enumerate(APART)]
QUICK = [(APART[1], "1+3 alike"), ONCE[2], ONCE[4]]
"""A rule over each lanes of which one has several devices; `tests/train` has lanes of one device,
and mean gradients."""
MORE = [*ONCE, *((APART[0], lanes) for lanes in FLEETS)]
MORE += [(name, "2+2" if lanes == "1+1" else "1+1") for name, lanes in ONCE]
MORE += [(name, FLEETS[at % len(FLEETS)]) for at, name in enumerate(TABLE) if name not in APART]
ROWS = [*QUICK, *(slow(*row) for row in dict.fromkeys(MORE) if row not in QUICK)]
"""One rule over all lanes, the others APART over lanes of one device and of several."""


@pytest.mark.parametrize(("name", "lanes"), ROWS)
def test_every_rule_over_lanes(name, lanes, twins):
    rule, by_hand = TABLE[name]
    devices, parts = fleet(lanes, twins)
    counts = COUNTS[len(devices)]
    outer = by_hand.get("outer")
    want = by_hand_in_numpy(counts, **by_hand | ({"outer": outer()} if outer else {}))
    got, metrics, state, train = train_on(rule, counts, devices=devices, lanes=parts)
    rtol, atol = TOLERANCE[by_hand.get("kind")]
    assert_history(got, want, rtol, atol)
    assert all(said["finite"] for said in metrics) and train.skipped == 0
    elche.check_replicas(train.common(state))
    moved = np.abs(got[-1]["w"] - got[0]["w"]).max()
    assert moved > 20 * atol, "the tolerance must be small beside what training moves"
    apart = by_hand.get("delay") or len(by_hand.get("parts", "1")) > 1
    if not (by_hand.get("local") and apart):  # replicas are alike
        for stacked in got:
            for leaf in LEAVES:
                assert all(row.tobytes() == stacked[leaf][0].tobytes() for row in stacked[leaf])


@pytest.mark.parametrize("name", ["mean gradient", slow("DiLoCo, fragments")])
def test_float64_parameters_keep_their_digits_over_lanes(name, twins):
    rule, by_hand = TABLE[name]
    devices, _ = fleet("2+1", twins)
    outer = by_hand.get("outer")
    want = by_hand_in_numpy(COUNTS[3], **by_hand | ({"outer": outer()} if outer else {}))
    with jax.enable_x64(True):
        got, *_ = train_on(rule, COUNTS[3], devices=devices, wide=True)
    assert_history(got, want, *TOLERANCE["float64"])


@pytest.mark.slow  # test_every_rule_over_lanes has such lanes
@pytest.mark.parametrize("name", ["mean gradient", "Local SGD", "DiLoCo, fragments, int8"])
def test_lanes_of_alike_devices_change_no_more_than_the_order_of_sums(name):
    rule, _ = TABLE[name]
    one, metrics, *_ = train_on(rule, COUNTS[4])
    several, others, *_ = train_on(rule, COUNTS[4], lanes=((0, 1), (2,), (3,)))
    for a, b in zip(one, several, strict=True):
        for leaf in LEAVES:
            np.testing.assert_allclose(b[leaf], a[leaf], rtol=1e-6, atol=1e-7)
    for a, b in zip(metrics, others, strict=True):
        assert a.keys() == b.keys()
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)


@pytest.mark.slow  # test_a_run_in_which_a_lane_rests replays one
@pytest.mark.parametrize("name", ["mean gradient", "mean gradient, one pending", "Local SGD"])
def test_the_same_kinds_give_the_same_bits(name, twins):
    rule, _ = TABLE[name]
    devices, _ = fleet("2+1", twins)
    first, *_ = train_on(rule, COUNTS[3], devices=devices)
    again, *_ = train_on(rule, COUNTS[3], devices=devices)
    for a, b in zip(first, again, strict=True):
        assert all(a[leaf].tobytes() == b[leaf].tobytes() for leaf in LEAVES)
