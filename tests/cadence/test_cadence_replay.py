"""Replay: the recorded counts, and an error that says where they end."""

import json

import numpy as np
import pytest

from elche_jax.cadence import Replay, ReplayState, WindowReport

RECORDING = ((4, 4), (0, 8), (2, 6))


def report(counts):
    return WindowReport((1.0,) * len(counts), counts, 0.0)


def test_windows_in_order():
    cadence = Replay(RECORDING)
    state = cadence.init(2)
    seen = []
    for _ in RECORDING:
        seen.append(state.counts)
        state = cadence.update(state, report(state.counts))
    assert tuple(seen) == RECORDING
    assert state.window == 3


def test_the_run_may_end_with_the_recording_but_not_go_on():
    cadence = Replay(RECORDING)
    state = cadence.init(2)
    for _ in RECORDING:
        state = cadence.update(state, report((1, 1)))
    text = (
        r"^Replay: the recording has 3 windows, but the data asks for window 3 "
        r"\(counted from 0\); record a longer run or replay less data\.$"
    )
    with pytest.raises(ValueError, match=text):
        _ = state.counts
    with pytest.raises(ValueError, match=text):
        cadence.update(state, report((1, 1)))
    with pytest.raises(ValueError, match=text):
        cadence.counts_at(3)
    assert ReplayState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_any_sequence_of_sequences(make):
    cadence = Replay(make(RECORDING))
    assert cadence == Replay(RECORDING)
    assert cadence.counts_per_window == RECORDING
    assert hash(cadence) == hash(Replay(RECORDING))


def test_counts_at():
    cadence = Replay(RECORDING)
    assert [cadence.counts_at(window) for window in range(3)] == list(RECORDING)
    with pytest.raises(
        ValueError, match=r"^Replay\.counts_at: window must be at least 0, got -1\.$"
    ):
        cadence.counts_at(-1)


@pytest.mark.parametrize(
    ("recording", "kind", "text"),
    [
        ((), ValueError, "counts_per_window must have at least one window, got none"),
        (
            ((1, 1), (0, 0)),
            ValueError,
            r"counts_per_window\[1\] must have a count above 0, got \(0, 0\)\.$",
        ),
        (
            ((1, 1), (1,)),
            ValueError,
            r"counts_per_window\[1\] must have one entry per device \(2\), got 1\.$",
        ),
        (
            ((1, -1),),
            ValueError,
            r"counts_per_window\[0\]\[1\] must be at least 0, got -1\.$",
        ),
        (
            ((1, 2**53 + 1),),
            ValueError,
            r"counts_per_window\[0\]\[1\] must be at most 9007199254740992, got 9007199254740993",
        ),
        (((1, 1.0),), TypeError, r"counts_per_window\[0\]\[1\] must be an integer"),
        ((1, 2), TypeError, r"counts_per_window\[0\] must be a sequence of integers"),
        (3, TypeError, "counts_per_window must be a sequence of windows, got 3"),
    ],
)
def test_recording_errors(recording, kind, text):
    with pytest.raises(kind, match=f"^Replay: {text}"):
        Replay(recording)


def test_world_size_is_that_of_the_recording():
    assert Replay([[3], [5]]).init(1).counts == (3,)
    with pytest.raises(
        ValueError,
        match=r"^Replay\.init: world_size must be that of the recording \(2\), got 3\. "
        r"Replay on as many devices as were recorded\.$",
    ):
        Replay(RECORDING).init(3)
