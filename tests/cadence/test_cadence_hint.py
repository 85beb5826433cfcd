"""The two forms of a speed hint, and that ElChe and Balanced read them alike."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.cadence import Balanced, ElChe
from elche_jax.cadence.hint import WIDEST, checked_hint, hinted_speeds

laws = settings(deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize(
    ("hint", "plain", "speeds"),
    [
        # a tuple of two, int first, is (slow_rank, ratio)
        ((1, 2.5), (1, 2.5), (2.5, 1.0)),
        ((0, 3), (0, 3.0), (1.0, 3.0)),
        ((np.int64(1), np.float32(2.5)), (1, 2.5), (2.5, 1.0)),
        # anything else is one speed per device
        ([1, 2.5], (1.0, 2.5), (1.0, 2.5)),
        ((1.0, 2.5), (1.0, 2.5), (1.0, 2.5)),
        (np.array([1, 2]), (1.0, 2.0), (1.0, 2.0)),
    ],
)
def test_forms(hint, plain, speeds):
    checked = checked_hint("Here", hint)
    assert checked == plain
    assert [type(entry) for entry in checked] == [type(entry) for entry in plain]
    assert checked_hint("Here", checked) == checked, "it keeps its meaning"
    assert hinted_speeds("Here", checked, 2) == speeds


@laws
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.floats(0.1, 10.0))
def test_only_the_proportions_of_speeds_matter(speeds, scale):
    a = Balanced(64, speed_hint=speeds).init(len(speeds))
    b = Balanced(64, speed_hint=[scale * speed for speed in speeds]).init(len(speeds))
    assert a.ratios == pytest.approx(b.ratios)


@pytest.mark.parametrize(
    ("cadence", "counts"), [(ElChe(anchor=6), (15, 15, 6)), (Balanced(total=12), (5, 5, 2))]
)
def test_a_slow_rank_is_short_for_its_speeds(cadence, counts):
    short = replace(cadence, speed_hint=(2, 2.5)).init(3)
    assert short == replace(cadence, speed_hint=[2.5, 2.5, 1.0]).init(3)
    assert short.counts == counts


@pytest.mark.parametrize("speed", [5e-324, 1e308])
def test_extreme_speeds(speed):
    assert ElChe(speed_hint=[speed, speed]).init(2).counts == (10, 10)
    assert Balanced(8, speed_hint=[speed, speed]).init(2).counts == (4, 4)


TWO = (
    r"\. A tuple of two that starts with an int means \(slow_rank, ratio\); write the "
    r"speeds of two devices as a list\.$"
)


@pytest.mark.parametrize(
    ("hint", "kind", "text"),
    [
        (2.3, TypeError, r"speed_hint must be a sequence of numbers, got 2\.3 \(float\)\.$"),
        ("12", TypeError, r"speed_hint must be a sequence of numbers, got '12' \(str\)\.$"),
        ([], ValueError, r"speed_hint must have one entry per device, got none\.$"),
        ((-1, 2.0), ValueError, r"speed_hint slow_rank must be at least 0, got -1" + TWO),
        ((True, 2.0), TypeError, r"slow_rank must be an integer, got True \(bool\)" + TWO),
        ((1, 0.5), ValueError, r"speed_hint ratio must be at least 1, got 0\.5" + TWO),
        ((1, "2"), TypeError, r"speed_hint ratio must be a number, got '2' \(str\)" + TWO),
        ((1, 1e16), ValueError, rf"speed_hint ratio must be at most {WIDEST}, got 1e\+16" + TWO),
        ([1.0, 0.0], ValueError, r"speed_hint\[1\] must be above 0, got 0\.0\.$"),
        ((1.0, "2"), TypeError, r"speed_hint\[1\] must be a number, got '2' \(str\)\.$"),
        ([1.0, float("nan")], ValueError, r"speed_hint\[1\] must be finite, got nan\.$"),
        (
            [1.0, 1e16, 1.0],
            ValueError,
            rf"speed_hint must have no speed more than {WIDEST} times another, got \(1\.0, 1e\+16",
        ),
        ([5e-324, 1e308], ValueError, "speed_hint must have no speed more than"),
    ],
)
def test_errors(hint, kind, text):
    with pytest.raises(kind, match=f"^Here: .*{text}"):
        checked_hint("Here", hint)


def test_errors_that_depend_on_the_devices():
    with pytest.raises(
        ValueError,
        match=r"^Here\.init: speed_hint slow_rank must be below world_size \(2\), got 2" + TWO,
    ):
        hinted_speeds("Here.init", (2, 2.0), 2)
    with pytest.raises(
        ValueError, match=r"^Here\.init: speed_hint must have one entry per device \(4\), got 3\.$"
    ):
        hinted_speeds("Here.init", (1.0, 2.0, 3.0), 4)
