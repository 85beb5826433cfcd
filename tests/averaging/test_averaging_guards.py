"""Guards: what they say, that cadences obey, and that silence does not let windows grow."""

import math
from functools import cache

import jax
import numpy as np
import optax
import pytest
from averaged import THREE, TX, train_on
from hypothesis import given, strategies as st
from marks import table
from reference import BATCH, LEARNING_RATE, MOMENTUM, data, gradient, loss_fn, params, run

import elche_jax as elche
from elche_jax.cadence import HOLD_GROWTH, STABLE, Controller, WindowPlan, nudge_down
from elche_jax.cadence.guards import Divergence, is_level, judge
from elche_jax.engine.runner import Runner
from elche_jax.observe.timeline import Timeline, VerdictEvent, WindowEvent
from elche_jax.train.timing import Timing

numbers = st.floats(0, 1) | st.just(math.nan)


def seen(*distances):
    return [
        Divergence(i, (1, 1), (0.0, d), (1.0, 1.0), (1.0, 1.0), (0.5, 0.5))
        for i, d in enumerate(distances)
    ]


@pytest.mark.parametrize(
    ("distances", "verdict"),
    [
        ((0.01,), STABLE),
        ((0.04, 0.05, 0.06), HOLD_GROWTH),
        ((0.03, 0.04, 0.05), STABLE),  # not above the threshold
        ((0.06, 0.05, 0.07), STABLE),  # does not rise
        ((0.05, 0.05, 0.06), STABLE),
        ((0.05, 0.06), STABLE),  # too few
        ((0.9, 0.9, 0.01, 0.02, 0.03), STABLE),
        ((0.1,), STABLE),  # not above twice the threshold
        ((0.11,), nudge_down(0.5)),
        ((0.05, 0.08, 0.12), nudge_down(0.5)),
    ],
)
def test_trend(distances, verdict):
    assert elche.TrendGuard(0.05).verdict(seen(*distances)) == verdict


def test_devices_that_were_left_out_are_not_looked_at():
    gone = [Divergence(0, (1, 1), (math.nan,) * 2, (0.0,) * 2, (0.0,) * 2, (0.0,) * 2)]
    assert elche.TrendGuard().verdict(gone) == elche.LevelGuard().verdict(gone) == STABLE
    assert judge(elche.TrendGuard(), gone) == HOLD_GROWTH
    (one,) = seen(math.nan)
    assert one.largest == 0.0


def test_a_device_without_work_is_not_looked_at():
    """Its distance is how far the others have moved."""
    one = Divergence(0, (2, 0, 1), (0.1, 0.9, 0.2), (0.0,) * 3, (0.0,) * 3, (0.5, 0.0, 0.5))
    assert one.largest == 0.2


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 4))
def test_level_is_a_mean(distances, windows):
    got = elche.LevelGuard(0.2, windows=windows, factor=0.7).verdict(seen(*distances))
    mean = np.mean(distances[-windows:])
    want = nudge_down(0.7) if mean > 0.4 else HOLD_GROWTH if mean > 0.2 else STABLE
    assert got == want or min(abs(mean - 0.4), abs(mean - 0.2)) < 1e-9


@pytest.mark.parametrize(
    ("distances", "level"),
    [
        ((), False),
        ((0.1, 0.1), False),
        ((0.1, 0.1, 0.1), True),
        ((0.1, 0.3, 0.11), True),
        ((0.1, 0.1, 0.12), False),
        ((9, 0.1, 0.1, 0.2), False),
        ((0.0, 0.0, 0.0), True),
    ],
)
def test_level_takes_evidence(distances, level):
    assert is_level(seen(*distances)) is level


class Silent:
    def verdict(self, history):
        return STABLE


def test_silence_is_not_stability():
    rising = seen(0.01, 0.02, 0.03)
    assert judge(Silent(), rising) == HOLD_GROWTH
    assert judge(Silent(), seen(0.01)) == HOLD_GROWTH
    assert judge(Silent(), seen(0.02, 0.02, 0.02)) == STABLE
    assert judge(elche.NoGuard(), rising) == STABLE
    assert judge(elche.TrendGuard(0.001), rising).action == "nudge_down"


@pytest.mark.parametrize(("guard", "grows"), [(Silent(), False), (elche.NoGuard(), True)])
def test_a_silent_guard_does_not_let_windows_grow_while_devices_drift_apart(guard, grows):
    """The overhead asks for ever longer windows, and the distance rises with them."""
    controller = Controller(elche.ElChe(anchor=4, max_anchor=1000), guard)
    state = controller.init(2)
    for window in range(50):
        plan = WindowPlan(window, 0, controller.plan(state, window), examples=0)
        (apart,) = seen(0.001 * 1.2**window)
        record = plan.measured((8.0, 8.0), 12.0, 4.0, 0.0, steady=True, divergence=apart)
        state = controller.observe(state, record)
    assert state.schedule.cadence.anchor == (1000 if grows else 4)


def test_a_verdict_that_is_none():
    class Wrong:
        def verdict(self, history):
            return "stable"

    with pytest.raises(
        TypeError, match=r"^Wrong: verdict must return a Verdict \(STABLE, .*\), got 'stable'"
    ):
        judge(Wrong(), seen(0.1))


# in a training step


def flat(p):
    return np.concatenate([np.ravel(np.asarray(p[name], np.float64)) for name in ("b", "v", "w")])


def alone_after(window, before, trace):
    """Every device's parameters after its steps of a window, before the average."""
    rows, rebuilt = data(), []
    at = sum(map(sum, THREE[:window]))
    for count in THREE[window]:
        p, mine = dict(before), dict(trace)
        for _ in range(count):
            piece = slice(at * BATCH, (at + 1) * BATCH)
            for name, grad in gradient(p, rows["x"][piece], rows["y"][piece]).items():
                mine[name] = grad + MOMENTUM * mine[name]
                p[name] = p[name] - LEARNING_RATE * mine[name]
            at += 1
        rebuilt.append(flat(p))
    return np.array(rebuilt)


@cache
def without_momentum():
    """Momentum is reset, so that a window needs only the parameters before it."""
    return train_on(elche.ParameterAveraging(optimizer_state="reset"), THREE)


@pytest.mark.parametrize("window", [0, 4, 7])
def test_distances_by_hand(window):
    _, metrics, _, train = without_momentum()
    after = [each[0] for each in run(THREE, optimizer_state="reset")]
    before = after[window - 1] if window else {n: np.float64(x) for n, x in params().items()}
    none = {n: np.zeros_like(leaf) for n, leaf in before.items()}
    alone = alone_after(window, before, none)
    new, said = flat(after[window]), metrics[window]
    distance = np.linalg.norm(alone - new, axis=1) / np.linalg.norm(new)
    np.testing.assert_allclose(said["distance"], distance, rtol=1e-3, atol=1e-6)
    moved, mean = flat(before) - alone, flat(before) - new
    norms = np.linalg.norm(moved, axis=1)
    np.testing.assert_allclose(said["update_norm"], norms, rtol=1e-3)
    size = np.where(norms > 0, norms * np.linalg.norm(mean), 1)
    np.testing.assert_allclose(said["cosine"], moved @ mean / size, rtol=1e-3, atol=1e-4)
    known = train.divergence
    assert [each.window for each in known] == list(range(10))
    assert [each.counts for each in known] == THREE
    np.testing.assert_array_equal(np.float32(known[window].distance), said["distance"])


def test_what_a_guard_says_reaches_the_cadence():
    """A guard that always nudges brings the windows of a rule that wants 8 down to 1."""

    class Always:
        def verdict(self, history):
            return nudge_down(0.5)

    timeline = Timeline()
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=elche.ParameterAveraging(),
        cadence=elche.PostLocal(0, 8), guard=Always(), config=elche.DDPConfig(timeline=timeline),
    )  # fmt: skip
    state = train.init(params())
    anchors = []
    with train.windows(data(), BATCH) as windows:
        for window in windows:
            state, _ = train(state, window)
            anchors.append(min(window.counts))
            if len(anchors) == 14:
                break
    assert anchors[0] == 8 and anchors[-1] == 1
    assert anchors == sorted(anchors, reverse=True)
    said = [event for event in timeline.events if isinstance(event, VerdictEvent)]
    assert {(event.action, event.factor) for event in said} == {("nudge_down", 0.5)}


def test_a_cadence_that_follows_the_loss():
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], averaging=elche.ParameterAveraging(),
        cadence=elche.AdaComm(8, interval=2), guard=elche.NoGuard(),
    )  # fmt: skip
    state, losses = train.init(params()), []
    with train.windows(data(), BATCH, epochs=None) as windows:
        for window in windows:
            state, metrics = train(state, window)
            losses.append(float(metrics["loss"]))
            if len(losses) == 14:  # however unequal a busy machine makes the devices
                break
    known = train.cadence_state.cadence
    np.testing.assert_allclose(known.first_loss, np.mean(losses[:2]), rtol=1e-6)
    assert known.anchor < 8


def test_one_device_that_owns_the_average_is_named(caplog):
    rule = elche.ParameterAveraging(exponent=3.0)
    train_on(rule, [(4, 2), (6, 2), (8, 2)])  # 8 / 9, 27 / 28
    said = [r.getMessage() for r in caplog.records if "share" in r.getMessage()]
    assert said == [
        f"elche: device 0 ({jax.devices()[0]}) has a share of 96 % in the average of window 1; "
        "the others' steps hardly count. A lower exponent gives them more."
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: elche.TrendGuard(0), r"TrendGuard: threshold must be above 0, got 0\.$"),
        (lambda: elche.TrendGuard(1, 0), r"TrendGuard: factor must be above 0, got 0\.$"),
        (lambda: elche.LevelGuard(-1), r"LevelGuard: level must be above 0, got -1\.$"),
        (lambda: elche.LevelGuard(1, 65), r"LevelGuard: windows must be at most 64, got 65\.$"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match="^" + message):
        make()


@pytest.mark.parametrize("guard", [elche.TrendGuard, 3])
def test_what_is_no_guard(guard):
    with pytest.raises(
        TypeError, match=r"^build_train_step: guard must be a guard such as TrendGuard\(\), got"
    ):
        elche.build_train_step(
            loss_fn, optax.sgd(0.1), averaging=elche.ParameterAveraging(), guard=guard
        )


def test_a_guard_without_averaging():
    with pytest.raises(
        ValueError, match=r"^build_train_step: guard must be None without averaging, .* NoGuard\.$"
    ):
        elche.build_train_step(loss_fn, optax.sgd(0.1), guard=elche.NoGuard())


@table(delay=[0, 1], world=[1, 2])
def test_a_cadence_that_counts_windows_hears_of_all_of_them(world, delay):
    """One device has no times, windows that overlap have none that count."""
    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:world], cadence=elche.PostLocal(switch=10, anchor=4),
        averaging=elche.ParameterAveraging(optimizer_state="keep", delay=delay),
        guard=elche.NoGuard(),
    )  # fmt: skip
    state, counts = train.init(params()), []
    with train.windows(data(), BATCH, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            counts.append(window.counts)
            if window.index == 17:
                break
    assert counts[:10] == [(1,) * world] * 10
    assert min(train.counts) >= 4  # what is planned: the last window of an epoch may be cut
    assert train.cadence_state.cadence.windows == 18


def test_a_verdict_waits_for_the_next_report(monkeypatch):
    """Windows that are not timed are not reported; what the guard says after them is not lost."""
    timed = (*range(6), 12)
    monkeypatch.setattr(Timing, "timed", lambda self, window, counts, epoch: window in timed)
    monkeypatch.setattr(Runner, "fuses", lambda self, payload: True)

    class Once:
        def verdict(self, history):
            return nudge_down(0.5) if history[-1].window == 8 else STABLE

    train = elche.build_train_step(
        loss_fn, TX, devices=jax.devices()[:2], cadence=elche.ElChe(8, max_anchor=8),
        averaging=elche.DiLoCo(optax.sgd(1.0), delay=1), guard=Once(),
    )  # fmt: skip
    state, anchors = train.init(params()), []
    with train.windows(data(), BATCH, epochs=None) as windows:
        for window in windows:
            state, _ = train(state, window)
            anchors.append(train.cadence_state.cadence.anchor)
            if window.index == 17:
                break
    # window 9 tells of window 8, and 12 is the next that is reported
    assert anchors[:12] == [8] * 12
    assert train.cadence_state.cadence.anchor == 4
    seen = train.divergence
    assert [each.window for each in seen] == list(range(17))
    assert seen[0].counts == (8, 8) and all(each.distance[0] >= 0 for each in seen)


def test_a_guard_may_look_at_the_training_step():
    """No lock is held that a reader waits for; and what it raises leaves no half window."""

    class Looking:
        def verdict(self, history):
            seen.append((train.counts, len(train.records), train.throughput, train.ratios))
            if len(seen) == 4:
                raise ValueError("enough")
            return STABLE

    seen, timeline = [], Timeline()
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.1), devices=jax.devices()[:2], averaging=elche.ParameterAveraging(),
        cadence=elche.ElChe(anchor=2), guard=Looking(), config=elche.DDPConfig(timeline=timeline),
    )  # fmt: skip
    state = train.init(params())
    with pytest.raises(ValueError, match="enough"):
        for window in train.windows(data(60), BATCH, epochs=None):
            state, _ = train(state, window)
    assert [number for _, number, _, _ in seen] == [0, 1, 2, 3]
    told = [event.window for event in timeline.events if isinstance(event, WindowEvent)]
    assert len(train.records) == 3 and told == [0, 1, 2]


def test_inner_steps_fix_the_windows():
    rule = elche.DiLoCo(optax.sgd(1.0), 6)
    train = elche.build_train_step(loss_fn, TX, devices=jax.devices()[:2], averaging=rule)
    assert isinstance(train._options.guard, elche.NoGuard)
    assert isinstance(
        elche.build_train_step(
            loss_fn, TX, devices=jax.devices()[:2], averaging=elche.DiLoCo(optax.sgd(1.0))
        )._options.guard,
        elche.TrendGuard,
    )
