"""The records: reports, verdicts, and the way of a state into JSON and back."""

import gc
import json
import weakref
from dataclasses import FrozenInstanceError, dataclass, field

import numpy as np
import pytest

from elche_jax.cadence import (
    HOLD_GROWTH,
    STABLE,
    ElChe,
    EveryBatchState,
    State,
    Verdict,
    WindowReport,
    nudge_down,
)


def test_another_default_of_a_field_keeps_its_bounds():
    @dataclass(frozen=True)
    class Mine(ElChe):
        anchor: int = 20

    assert Mine(np.int64(3)).anchor == 3 and type(Mine(np.int64(3)).anchor) is int
    with pytest.raises(ValueError, match=r"^Mine: anchor must be at least 1, got 0"):
        Mine(anchor=0)


def test_a_class_whose_fields_were_checked_is_let_go_of():
    def made():
        @dataclass(frozen=True)
        class Mine(ElChe):
            """Each run of a notebook's cell makes another one."""

        Mine()
        return weakref.ref(Mine)

    kept = made()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("make", [tuple, list, np.array])
def test_report_keeps_plain_tuples(make):
    report = WindowReport(make([10.0, 5.0]), make([2, 3]), np.float32(0.5))
    assert report == WindowReport((10.0, 5.0), (2, 3), 0.5)
    assert type(report.wall_ms) is tuple
    assert {type(ms) for ms in report.wall_ms} == {float}
    assert {type(count) for count in report.counts} == {int}
    assert type(report.sync_ms) is float
    assert hash(report) == hash(WindowReport((10.0, 5.0), (2, 3), 0.5))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (((), (), 0.0), ValueError, "wall_ms must have one entry per device, got none"),
        (((1.0,), (1, 1), 0.0), ValueError, r"counts must be as long as wall_ms \(1\)"),
        (((-1.0,), (1,), 0.0), ValueError, r"wall_ms\[0\] must be at least 0, got -1"),
        (((1.0,), (1,), 0.0, None, 0), ValueError, r"share must be above 0, got 0"),
        (((1.0,), (1,), 0.0, None, 1.5), ValueError, r"share must be at most 1, got 1.5"),
        (((float("nan"),), (1,), 0.0), ValueError, r"wall_ms\[0\] must be finite"),
        (((1.0,), (-1,), 0.0), ValueError, r"counts\[0\] must be at least 0, got -1"),
        (((1.0,), (1.0,), 0.0), TypeError, r"counts\[0\] must be an integer, got 1.0"),
        (((1.0,), (1,), -0.5), ValueError, "sync_ms must be at least 0, got -0.5"),
        (((1.0,), (1,), float("inf")), ValueError, "sync_ms must be finite, got inf"),
        (((1.0,), (1,), None), TypeError, "sync_ms must be a number, got None"),
        ((5.0, (1,), 0.0), TypeError, "wall_ms must be a sequence of numbers, got 5.0"),
    ],
)
def test_report_rejects(arguments, kind, text):
    with pytest.raises(kind, match=f"^WindowReport: {text}"):
        WindowReport(*arguments)


def test_verdicts():
    assert STABLE == Verdict() == Verdict("stable", None)
    assert Verdict("hold_growth") == HOLD_GROWTH
    assert nudge_down() == Verdict("nudge_down") == Verdict("nudge_down", 0.5)
    assert nudge_down(1).factor == 1.0
    with pytest.raises(FrozenInstanceError):
        STABLE.factor = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_verdict_errors():
    with pytest.raises(
        ValueError,
        match=r"^Verdict: action must be one of 'stable', 'hold_growth', "
        r"'nudge_down', got 'up'\.$",
    ):
        Verdict("up")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError,
        match=r"^Verdict: factor must be None for 'stable', got 0\.5\. "
        r"Only nudge_down has a factor\.$",
    ):
        Verdict("stable", 0.5)
    with pytest.raises(ValueError, match=r"^Verdict: factor must be above 0, got 0\.$"):
        nudge_down(0)
    with pytest.raises(ValueError, match=r"^Verdict: factor must be at most 1, got 2"):
        nudge_down(2)
    with pytest.raises(TypeError, match=r"^Verdict: factor must be a number, got '1'"):
        nudge_down("1")  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Nested(State):
    rows: tuple[tuple[int, ...], ...]
    ms: tuple[float | None, ...]
    on: bool


def test_state_through_json_is_equal():
    # 0.1 + 0.2 has no short decimal form: floats must survive to the last bit.
    state = Nested(((1, 2), (), (3,)), (0.1 + 0.2, None, 1e-300), True)
    values = state.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert Nested.from_dict(json.loads(json.dumps(values))) == state


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.arange(2.0), r"array\(\[0\., 1\.\]\) \(ndarray\)"),
        ((1, {2}), r"\{2\} \(set\)"),
        ({"a": 1}, r"\{'a': 1\} \(dict\)"),
    ],
)
def test_a_state_that_would_come_back_as_another_one_is_not_stored(value, got):
    """Twice an array is not twice the tuple that it would be after a resume."""
    message = (
        rf"^Nested\.to_dict: ms must be a number, a string, None or a tuple of these, got {got}\. "
        r"A checkpoint can keep nothing else; convert a list or an array with tuple\(\.\.\.\)\.$"
    )
    with pytest.raises(TypeError, match=message):
        Nested(((1,),), value, True).to_dict()


def test_state_of_another_cadence_is_rejected():
    with pytest.raises(
        ValueError,
        match=r"^EveryBatchState\.from_dict: values must have the keys \['counts'\], "
        r"got \['anchor', 'counts'\]\. Resume with the cadence that wrote the state\.$",
    ):
        EveryBatchState.from_dict({"anchor": 1, "counts": [1]})
    rule = r"^EveryBatchState\.from_dict: values must be a dict of `to_dict`, got list\.$"
    with pytest.raises(TypeError, match=rule):
        EveryBatchState.from_dict([("counts", [1])])


@dataclass(frozen=True)
class Bounded(State):
    counts: tuple[int, ...]
    total: int = field(metadata={"low": 0})
    ms: tuple[float, ...] = field(default=(), metadata={"low": 0})


def test_fields_with_a_default_and_a_bound_may_be_missing_from_a_state():
    assert Bounded.from_dict({"counts": [1, 2], "total": 3}) == Bounded((1, 2), 3)
    with pytest.raises(ValueError, match=r"must have the keys \['counts', 'ms', 'total'\], got "):
        Bounded.from_dict({"counts": [1, 2]})
    with pytest.raises(
        ValueError, match=r"^Bounded\.from_dict: ms\[1\] must be at least 0, got -1"
    ):
        Bounded.from_dict({"counts": [1, 2], "total": 3, "ms": [1.0, -1.0]})
    with pytest.raises(ValueError, match=r"ms must have one entry per device \(2\), got 1\.$"):
        Bounded.from_dict({"counts": [1, 2], "total": 3, "ms": [1.0]})


@pytest.mark.parametrize(
    ("slip", "hook"),
    [("udpate", "update"), ("recalibrat", "recalibrate"), ("count_at", "counts_at")],
)
def test_a_method_that_misspells_a_hook(slip, hook):
    message = (
        rf"^Slow: {slip} must not resemble a hook of Cadence, got a method of that name\. "
        rf"Did you mean {hook}\? If not, rename it\.$"
    )
    with pytest.raises(TypeError, match=message):
        type("Slow", (ElChe,), {slip: lambda self: None})


def test_methods_of_ones_own_are_no_hooks():
    class Slow(ElChe):
        def plan(self):
            return 1

        def estimate(self):
            return 1

        def update(self, state, report, verdict=STABLE):
            return super().update(state, report, verdict)

        def _udpate(self):
            return None

    assert Slow(anchor=2).init(2).counts == (2, 2)
