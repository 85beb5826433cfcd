"""QSR, PostLocal, AdaComm: the rule sets the anchor, the speeds set the counts."""

import json
import math

import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from references import densest_counts

from elche_jax.cadence import (
    HOLD_GROWTH,
    QSR,
    AdaComm,
    PostLocal,
    Scheduler,
    WindowReport,
    nudge_down,
)

MS = (2.0, 4.0, 1.0)  # per microbatch


def report(counts, loss=None, ms=MS):
    return WindowReport([c * m for c, m in zip(counts, ms, strict=True)], counts, 0.1, loss)


def run(rule, windows, losses=None, verdicts=None):
    """Anchors and counts of some windows under steady speeds."""
    state, seen = rule.init(3), []
    for window in range(windows):
        seen.append((state.anchor, state.counts))
        loss = losses[window] if losses else None
        verdict = (verdicts or {}).get(window)
        told = (verdict,) if verdict else ()
        state = rule.update(state, report(state.counts, loss), *told)
    return [*seen, (state.anchor, state.counts)]


RULES = [QSR(0.1, 4, 0.05), PostLocal(3, 8), AdaComm(8, interval=2)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_counts_follow_the_speeds(rule):
    *_, (anchor, counts) = run(rule, 4, losses=[1.0] * 4)
    assert counts == densest_counts(anchor, MS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_states_go_through_json(rule):
    scheduler = Scheduler(rule)
    state = scheduler.init(3)
    for _ in range(5):
        state = scheduler.update(state, report(state.counts, 0.5))
        saved = json.loads(json.dumps(state.to_dict()))
        assert scheduler.from_dict(saved) == state


# QSR


def test_qsr_is_the_formula():
    """Independently: the schedule's value at the steps so far, floor of the square."""
    schedule = optax.cosine_decay_schedule(0.1, 3000)
    rule = QSR(alpha=0.2, base=2, learning_rate=schedule, max_anchor=100)
    state, steps = rule.init(2), 0
    anchors = []
    for _ in range(400):
        rate = 0.05 * (1 + math.cos(math.pi * min(steps, 3000) / 3000))
        want = 100 if rate < 1e-4 else min(100, max(2, math.floor((0.2 / rate) ** 2 + 1e-6)))
        assert abs(state.anchor - want) <= (want > 20), (steps, rate)
        anchors.append(state.anchor)
        steps += max(state.counts)
        state = rule.update(state, report(state.counts, ms=(3.0, 1.0)))
        assert state.steps == steps
    assert anchors == sorted(anchors) and anchors[0] == 4 and anchors[-1] == 100


@given(
    alpha=st.floats(1e-6, 1e3),
    rate=st.floats(1e-30, 1e3),
    base=st.integers(1, 50),
    more=st.integers(0, 500),
)
def test_qsr_stays_within_its_bounds(alpha, rate, base, more):
    anchor = QSR(alpha, base, rate, max_anchor=base + more).init(2).anchor
    assert base <= anchor <= base + more
    exact = (alpha / rate) ** 2
    if base + 1 < exact < base + more:
        assert anchor in (math.floor(exact), math.floor(exact * (1 + 2e-6)))


def test_a_rate_of_zero_asks_for_the_longest_window():
    assert QSR(0.1, 1, lambda step: 0.0, max_anchor=77).init(2).anchor == 77


# PostLocal


def test_one_microbatch_each_before_the_switch():
    seen = run(PostLocal(switch=3, anchor=5), 5)
    assert [counts for _, counts in seen[:3]] == [(1, 1, 1)] * 3
    assert [counts for _, counts in seen[3:]] == [(10, 5, 20)] * 3


def test_without_a_switch_it_is_a_fixed_anchor():
    assert PostLocal(switch=0, anchor=5).init(2).counts == (5, 5)


# AdaComm


@pytest.mark.parametrize(("shrink", "anchor"), [(0.07, 7), (0.14, 14), (0.55, 55), (0.075, 8)])
def test_a_product_that_is_an_integer_is_not_rounded_up(shrink, anchor):
    *_, (got, _) = run(AdaComm(anchor=100, interval=1, shrink=shrink), 2, [1.0] * 2)
    assert got == anchor


def test_adacomm_is_the_formula():
    losses = [4.0, 4.0, 2.0, 2.0, 1.9, 1.9, 0.3, 0.1]
    seen = run(AdaComm(anchor=16, interval=2, shrink=0.5), 8, losses)
    after = [anchor for anchor, _ in seen][2::2]
    # F0 = 4: sqrt(2 / 4) * 16 = 11.3; sqrt(1.9 / 4) * 16 = 11.03 makes 12 again, so half of
    # it; sqrt(0.2 / 4) * 16 = 3.6
    assert after == [16, 12, 6, 4]


def test_adacomm_ends_at_one():
    seen = run(AdaComm(anchor=4, interval=1), 8, [1.0] * 8)
    assert [anchor for anchor, _ in seen] == [4, 4, 2, 1, 1, 1, 1, 1, 1]


def test_adacomm_of_a_loss_of_zero():
    assert run(AdaComm(anchor=4, interval=1), 3, [0.0] * 3)[-1][0] == 1


@pytest.mark.parametrize("loss", [None, -0.5])
def test_adacomm_needs_a_loss(loss):
    rule = AdaComm()
    with pytest.raises(
        ValueError, match=rf"^AdaComm\.update: report must have a loss of at least 0, got {loss}\.$"
    ):
        rule.update(rule.init(2), report((1, 1), loss, ms=(1.0, 1.0)))


# verdicts


def test_hold_growth_holds_and_growth_goes_on_after_it():
    grows = QSR(1.0, 1, lambda step: 1 / math.sqrt(2 + step // 8))
    seen = run(grows, 6, verdicts={2: HOLD_GROWTH, 3: HOLD_GROWTH})
    anchors = [anchor for anchor, _ in seen]
    assert anchors[2] == anchors[3] == anchors[4] < anchors[5]
    assert run(PostLocal(0, 8), 3, verdicts={1: HOLD_GROWTH})[-1][0] == 8


def test_nudge_down_nudges_and_the_rule_comes_back_step_by_step():
    seen = run(PostLocal(switch=0, anchor=8), 8, verdicts={1: nudge_down(0.5), 3: HOLD_GROWTH})
    assert [anchor for anchor, _ in seen] == [8, 8, 4, 5, 5, 6, 7, 8, 8]


# errors


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: QSR(0, 4, 0.1), ValueError, r"QSR: alpha must be above 0, got 0\.$"),
        (lambda: QSR(0.1, 0, 0.1), ValueError, r"QSR: base must be at least 1, got 0\.$"),
        (lambda: QSR(0.1, 2**31, 0.1), ValueError, r"QSR: base must be at most 2147483647, got "),
        (lambda: QSR(0.1, 4, 0.1, 3), ValueError, r"QSR: max_anchor must be at least 4, got 3\.$"),
        (lambda: QSR(0.1, 4, 0.0), ValueError, r"QSR: learning_rate must be above 0, got 0\.0\.$"),
        (lambda: QSR(0.1, 4, "x"), TypeError, r"QSR: learning_rate must be a number, got 'x' "),
        (
            lambda: QSR(0.1, 4, lambda step: math.nan).init(2),
            ValueError,
            r"QSR: learning_rate\(0\) must be finite, got nan\.$",
        ),
        (
            lambda: QSR(0.1, 4, lambda step: -1.0).init(2),
            ValueError,
            r"QSR: learning_rate\(0\) must be at least 0, got -1\.0\.$",
        ),
        (
            lambda: QSR(0.1, 4, lambda step: np.full(1, 0.1)).init(2),
            TypeError,
            r"QSR: learning_rate\(0\) must be a number, got array\(\[0\.1\]\) \(ndarray\)\.$",
        ),
        (lambda: PostLocal(-1), ValueError, r"PostLocal: switch must be at least 0, got -1\.$"),
        (lambda: PostLocal(1, 0), ValueError, r"PostLocal: anchor must be at least 1, got 0\.$"),
        (lambda: PostLocal(1, 2**53 + 1), ValueError, r"PostLocal: anchor must be at most 9007199"),
        (lambda: AdaComm(10**400), ValueError, r"AdaComm: anchor must be at most 90071992547409"),
        (lambda: AdaComm(0), ValueError, r"AdaComm: anchor must be at least 1, got 0\.$"),
        (lambda: AdaComm(2, 0), ValueError, r"AdaComm: interval must be at least 1, got 0\.$"),
        (lambda: AdaComm(2, 2, 0), ValueError, r"AdaComm: shrink must be above 0, got 0\.$"),
        (lambda: AdaComm(2, 2, 2), ValueError, r"AdaComm: shrink must be at most 1, got 2\.$"),
        (lambda: PostLocal(1).init(0), ValueError, r"PostLocal\.init: world_size must be at lea"),
    ],
)
def test_errors(make, kind, message):
    with pytest.raises(kind, match="^" + message):
        make()


def test_a_loss_in_a_report_is_a_finite_number():
    with pytest.raises(ValueError, match=r"^WindowReport: loss must be finite, got nan\.$"):
        WindowReport([1.0], [1], 0.0, math.nan)


def test_a_warm_up_asks_for_no_long_window():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 100, 1000)
    assert QSR(0.2, 2, schedule).init(2).anchor == 1000
    rule = QSR(0.2, 2, schedule, warmup=100)
    state = rule.init(2)
    for _ in range(20):
        assert state.anchor == 4
        state = rule.update(state, report(state.counts, ms=(1.0, 1.0)))
    with pytest.raises(ValueError, match=r"^QSR: warmup must be at least 0, got -1\.$"):
        QSR(0.1, 1, 0.1, warmup=-1)


def test_windows_without_times_count_and_leave_the_estimates():
    scheduler = Scheduler(PostLocal(switch=2, anchor=4))
    state = scheduler.update(scheduler.init(3), report((1, 1, 1)))
    known = state.cadence.ms_per_batch
    state = scheduler.update(state, WindowReport((0.0,) * 3, (1, 1, 1), 0.0))
    assert state.cadence.windows == 2 and state.cadence.ms_per_batch == known
    assert state.counts == (8, 4, 16)
