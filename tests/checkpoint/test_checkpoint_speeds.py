"""What a run on other devices begins with: the speeds that are known of them."""

import json
import re
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.cadence import ElCheState, FixedTotalState
from elche_jax.train.speeds import carried_over

TIMES = (8.0, 4.0, 2.0)
"""Milliseconds per microbatch of the devices of the run that ended."""

STATES = {
    "ElChe": (elche.ElChe(anchor=4), ElCheState(4, (4, 8, 16), TIMES, True)),
    "FixedTotal": (elche.FixedTotal(28), FixedTotalState((4, 8, 16), TIMES)),
}
ANEW = (
    "elche: the number of devices is {}, the checkpoint's was 3: {}the guard's history and "
    "counts_history start over{}."
)
KNOWN = ", counts begin with the speeds that are known"


def build(cadence, devices, **options):
    train = elche.build_train_step(
        lambda params, batch, rng: batch["x"] @ params["w"],
        optax.sgd(0.1), devices=jax.devices()[:devices], cadence=cadence, **options,
    )  # fmt: skip
    train.init({"w": np.ones(2, "float32")})
    return train


def ended(name="ElChe"):
    """What is saved of a run whose devices have these speeds."""
    cadence, state = STATES[name]
    train = build(cadence, 3)
    train.cadence_state = replace(train.cadence_state, cadence=state)
    return json.loads(json.dumps(train.run_to_dict() | {"counts": []})) | {
        "counts": np.ones((1, 3), np.int64)
    }


def begun(saved, devices, name="ElChe"):
    train = build(STATES[name][0], devices)
    train.restore_run(saved)
    return train


@pytest.mark.parametrize(
    ("name", "devices", "counts"),
    [
        ("ElChe", 2, (4, 8)),
        # one that is new has the mean speed of its kind, 292 microbatches a second
        slow("ElChe", 4, (4, 8, 16, 9)),
        slow("FixedTotal", 2, (9, 19)),
        ("FixedTotal", 4, (3, 6, 12, 7)),
    ],
)
def test_another_number_of_devices(name, devices, counts, caplog):
    train = begun(ended(name), devices, name)
    assert train.counts == counts
    assert train.counts_history == []
    rates = [1e3 / ms for ms in TIMES]
    want = [*rates, sum(rates) / 3][:devices]
    assert train.throughput == pytest.approx(want)
    assert ANEW.format(devices, "", KNOWN) in caplog.messages


def test_the_same_devices_have_the_same_state(caplog):
    saved = ended()
    train = begun(saved, 3)
    assert train.cadence_state.to_dict() == saved["cadence"]
    assert caplog.messages == []


def moved(saved, *names):
    """The same, as if its devices had been those of other hosts and places."""
    own = saved["places"][0].partition("/")[0]
    return saved | {"places": [name.replace("here", own) for name in names]}


@pytest.mark.parametrize(
    ("places", "counts"),
    [
        (("other//0", "here//1", "here//0"), (8, 4, 6)),  # the third one is new
        slow(("here//0", "here//1", "other//0"), (4, 8, 6)),
    ],
)
def test_devices_are_known_by_their_places(places, counts, caplog):
    train = begun(moved(ended(), *places), 3)
    assert train.counts == counts
    assert caplog.messages == [
        "elche: the devices are not those that the checkpoint's run had in the end: counts begin "
        "with the speeds that are known."
    ]


def test_a_host_that_has_another_name(caplog):
    train = begun(moved(ended(), "other//0", "other//1", "other//2"), 3)
    assert (train.counts, caplog.messages) == ((4, 8, 16), [])


def test_a_device_that_was_lost_is_back():
    saved = ended()
    saved |= {"lost": [1], "throughput": [125.0, None, 500.0]}
    assert begun(saved, 3).counts == (4, 10, 16), "the mean of the others"


QSR = elche.QSR(alpha=0.1, base=4, learning_rate=lambda step: 0.1)


@pytest.mark.parametrize("cadence", [elche.EveryBatch(), elche.Balanced(12), QSR])
def test_cadences_that_begin_anew(cadence, caplog):
    train = build(cadence, 2)
    before = train.cadence_state
    train.restore_run(ended())
    assert train.cadence_state == before
    assert ANEW.format(2, "the cadence, ", "") in caplog.messages


NO_RUN = "saved must be the dict that run_to_dict returned, got "


@pytest.mark.parametrize(
    ("lacks", "got"),
    [
        (None, "NoneType."),
        (["left_out", "skipped"], "one without the keys ['left_out', 'skipped']."),
    ],
)
def test_what_is_no_run_changes_nothing(lacks, got):
    saved = lacks and {name: value for name, value in ended().items() if name not in lacks}
    changes_nothing(saved, NO_RUN + got)


DAMAGED = NO_RUN + "one whose divergence, unread, unreported or pending is damaged ({})."
WITH_COUNTS = NO_RUN + "one with counts of {} for 3 devices."


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"counts": "x"}, WITH_COUNTS.format("shape () and dtype <U1")),
        ({"counts": None}, WITH_COUNTS.format("shape () and dtype object")),
        ({"counts": [[1, 1, 1], [1]]}, WITH_COUNTS.format("rows of different lengths")),
        ({"counts": np.ones((2, 2), int)}, WITH_COUNTS.format("shape (2, 2) and dtype int64")),
        ({"counts": np.ones((1, 3))}, WITH_COUNTS.format("shape (1, 3) and dtype float64")),
        ({"skipped": "x"}, "saved['skipped'] must be an integer, got 'x' (str)."),
        ({"in_a_row": -1}, "saved['in_a_row'] must be at least 0, got -1."),
        ({"left_out": 3}, "saved['left_out'] must be a sequence of integers, got 3 (int)."),
        ({"next_window": "a"}, "saved['next_window'] must be an integer, got 'a' (str)."),
        ({"kinds": 3}, "saved['kinds'] must be a sequence of entries by rank, got 3 (int)."),
        ({"places": [None] * 3}, "saved['places'][0] must be of type str, got None (NoneType)."),
        ({"throughput": [1.0]}, "saved['throughput'] must have one entry per device (3), got 1."),
        ({"throughput": [None, 0, 1]}, "saved['throughput'][1] must be above 0, got 0."),
        ({"lost": 1}, "saved['lost'] must be a sequence of integers, got 1 (int)."),
        ({"unreported": 1}, DAMAGED.format("TypeError: 'int' object is not iterable")),
        ({"pending": 1}, DAMAGED.format("TypeError: 'int' object is not subscriptable")),
        ({"pending": {"step": 1}}, DAMAGED.format("KeyError: 'metrics'")),
    ],
)
def test_a_run_with_values_that_cannot_be_changes_nothing(changed, said):
    changes_nothing(ended() | {"skipped": 7} | changed, said)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"divergence": [1]}, "AttributeError: 'int' object has no attribute 'items'"),
        ({"divergence": [{"counts": None}]}, "TypeError: 'NoneType' object is not iterable"),
        ({"unread": [1]}, "TypeError: cannot unpack non-iterable int object"),
    ],
)
def test_a_run_with_averages_that_cannot_be_read_changes_nothing(changed, said):
    damaged = ended() | {"skipped": 7} | changed
    changes_nothing(damaged, DAMAGED.format(said), averaging=elche.ParameterAveraging())


def changes_nothing(saved, said, **options):
    train = build(STATES["ElChe"][0], 3, **options)
    train.restore_run(ended() | {"in_a_row": 1, "skipped": 3})
    before = train.run_to_dict()
    with pytest.raises(
        (TypeError, ValueError), match=f"^{re.escape('TrainStep.restore_run: ' + said)}$"
    ):
        train.restore_run(saved)
    np.testing.assert_equal(train.run_to_dict(), before)


@pytest.mark.parametrize("counts", [[], [[1, 2, 3], [4, 5, 6]]])
def test_a_run_that_went_through_json(counts):
    saved = ended() | {"counts": counts}
    assert begun(saved, 3).counts_history == list(map(tuple, counts))


def test_a_checkpoint_of_an_earlier_version(caplog):
    saved = ended()
    for name in ("places", "throughput", "lost"):
        del saved[name]
    assert begun(saved, 2).counts == (4, 4)
    assert ANEW.format(2, "the cadence, ", "") in caplog.messages


def test_nothing_is_known_of_any():
    assert carried_over((None, None), [("a//0", "cpu")] * 2, [("a//0", "cpu")]) == (None,)
