"""Rest: trials of whether the others are faster without some devices."""

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies as st
from marks import slow

from elche_jax.cadence import (
    Controller,
    ControllerState,
    Divergence,
    ElChe,
    Guard,
    Replay,
    Rest,
    WindowRecord,
    WindowReport,
    clamp_counts,
    nudge_down,
)

PLAN = (6, 3, 2)
SPEEDS = (1.0, 0.5, 0.25)
"""Microbatches per millisecond of each device alone."""


@dataclass
class Job:
    """A job whose devices slow each other down, planned some windows ahead.

    Attributes:
        rest: What is tested.
        slowed: By how much a device slows down everything while it works.
        ahead: Windows that are planned before the oldest of them is measured.
    """

    rest: Rest
    slowed: tuple[float, ...] = (0.0, 0.0, 0.0)
    ahead: int = 2
    noise: object = None
    speeds: tuple[float, ...] = SPEEDS

    def run(self, windows):
        """Gives the counts of every window, and the states after it."""
        state, planned, seen, states = self.rest.init(len(self.speeds)), [], [], []
        for number in range(windows):
            planned.append(self.rest.plan(state, PLAN[: len(self.speeds)]))
            if len(planned) > self.ahead:
                counts = planned.pop(0)
                seen.append(counts)
                state = self.rest.update(state, self.record(number, counts))
                states.append(state)
        return seen, states

    def speed(self, number, counts):
        works = [count > 0 for count in counts]
        speed = sum(one for one, work in zip(self.speeds, works, strict=True) if work)
        for slowed, work in zip(self.slowed, works, strict=True):
            speed *= 1 - slowed if work else 1
        return speed * (1 if self.noise is None else self.noise(number))

    def record(self, number, counts):
        wall_ms = sum(counts) / self.speed(number, counts)
        busy = tuple(float(count > 0) * wall_ms for count in counts)
        return WindowRecord(number, 0, counts, 64, busy, wall_ms, 0.1, 0.0, True)


def tried(*groups, **options):
    """A rest for these groups; the other devices are one, too."""
    others = [rank for rank in range(3) if not any(rank in group for group in groups)]
    return Rest((*groups, others), **options)


def gain_without(slowed, device):
    """By how much all are faster without a device, while the others work."""
    rest = sum(SPEEDS) - SPEEDS[device]
    return rest / (sum(SPEEDS) * (1 - slowed))


def found(states, group=0):
    """What the first trial of a group has found."""
    return next(s.gain for s in states if s.trials[group])


@pytest.mark.parametrize("device", [1, 2])
@pytest.mark.parametrize("slowed", [0.0, 0.1, 0.2, 0.3, 0.4, 0.6])
def test_a_device_rests_exactly_if_the_others_are_faster_without_it(device, slowed):
    every = [0.0, 0.0, 0.0]
    every[device] = slowed
    _, states = Job(tried((device,)), tuple(every)).run(120)
    gain = gain_without(slowed, device)
    assert found(states) == pytest.approx(gain)
    assert states[-1].resting == (gain > 1.01, False)


def test_a_device_that_rests_gets_no_work_and_the_others_theirs():
    seen, states = Job(tried((1,)), (0, 0.5, 0)).run(100)
    assert states[-1].resting == (True, False) and seen[-1] == (6, 0, 2)
    assert set(seen) == {PLAN, (6, 0, 2)}


def test_devices_of_a_group_rest_together():
    seen, states = Job(tried((1, 2)), (0, 0.5, 0.5)).run(100)
    assert states[-1].resting == (True, False) and set(seen) == {PLAN, (6, 0, 0)}


def test_groups_are_tried_in_turn():
    _, states = Job(tried((1,), (2,)), (0, 0, 0.5)).run(300)
    assert states[-1].resting == (False, True, False)
    order = list(dict.fromkeys(state.group for state in states if state.trial is not None))
    assert order == [1, 0, 2], "the one with the least work first"


@pytest.mark.parametrize("groups", [((0,), (1,)), slow(((1,), (0,)))])
@given(
    speeds=st.tuples(st.floats(0.1, 1.0), st.floats(0.1, 1.0)),
    both=st.floats(0.3, 1.0),
)
def test_of_two_devices_those_work_that_are_fastest(groups, speeds, both):
    """One, the other, or both, which slow each other down."""
    job = Job(Rest(groups), (1 - both, 0.0), speeds=speeds)
    job.speed = lambda number, counts: {
        (True, True): both * sum(speeds), (True, False): speeds[0], (False, True): speeds[1]
    }[tuple(count > 0 for count in counts)]  # fmt: skip
    seen, states = job.run(1200)
    best = max(*speeds, both * sum(speeds))
    left = tuple(not rests for rests in states[-1].resting)
    works = left if groups[0] == (0,) else left[::-1]
    assert job.speed(0, works) >= best / 1.011
    assert all(any(counts) for counts in seen)


def test_the_one_at_work_takes_turns_with_another_that_is_faster():
    """It is tried in its place: none at all would be no job."""
    rest = Rest(((0,), (1,)))
    job = Job(rest, speeds=(1.0, 1.05))
    job.speed = lambda number, counts: (1.0 if counts[0] else 1.05) if sum(counts) < 9 else 0.9
    state, seen = replace(rest.init(2), resting=(False, True)), []
    for number in range(300):
        seen.append(rest.plan(state, (6, 3)))
        state = rest.update(state, job.record(number, seen[-1]))
    assert state.resting == (True, False)
    assert seen[0] == (6, 0) and seen[-1] == (0, 3) and (0, 0) not in seen


def test_it_works_again_once_that_is_faster():
    rest = tried((2,))
    _, states = Job(rest, (0, 0, 0.5)).run(120)
    state, number = states[-1], 120
    assert state.resting == (True, False)
    better = Job(rest)
    while state.resting == (True, False) and number < 1000:
        state = rest.update(state, better.record(number, rest.plan(state, PLAN)))
        number += 1
    assert state.resting == (False, False) and state.gain < 1


def test_nothing_is_tried_before_speeds_are_known():
    seen, _ = Job(tried((1,), first=30), ahead=0).run(32)
    assert seen[:31] == [PLAN] * 31 and seen[31] == (6, 0, 2)


def test_short_windows_say_nothing_about_long_ones():
    """While windows grow, the cost of an exchange is a large share of them."""
    rest = tried((1,), first=5)
    job, state = Job(rest, (0, 0.5, 0)), rest.init(3)
    for number in range(30):
        planned = tuple(count * (1 + min(number, 18)) for count in PLAN)
        counts = rest.plan(state, planned)
        assert all(counts) or number >= 18 + 5 - 2
        state = rest.update(state, job.record(number, counts))
    assert state.trial is not None and state.largest > 10 * sum(PLAN)
    grown = job.record(30, tuple(4 * count for count in planned))
    again = rest.update(replace(state, trial=None, waits=(2, 9)), grown)
    assert again.trial is None and again.waits == (5, 9) and again.largest == sum(grown.counts)


def test_the_others_may_do_more_in_a_trial():
    """As they do if the device slowed them down."""
    rest = tried((1,), first=2)
    job, state = Job(rest, (0, 0.5, 0)), rest.init(3)
    for number in range(40):
        planned = PLAN if number < 5 else (10, 3, 4)
        state = rest.update(state, job.record(number, rest.plan(state, planned)))
    assert state.resting == (True, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"steady": False},
        {"cold": True},
        {"wall_ms": 0.0},
        {"share": 0.79, "counts": (4, 2, 2)},
    ],
)
def test_windows_whose_times_say_nothing_change_nothing(changes):
    job = Job(tried((1,)))
    for state in job.run(14)[1]:
        for counts in (PLAN, (6, 0, 2)):
            assert job.rest.update(state, replace(job.record(0, counts), **changes)) == state


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_windows_planned_before_are_not_taken_for_the_block(ahead):
    """Each window counts for what it was, however far ahead it was planned."""
    _, states = Job(tried((1,)), (0, 0.3, 0), ahead).run(150)
    assert found(states) == pytest.approx(gain_without(0.3, 1))


@pytest.mark.parametrize("drift", [0.99, 1.01])
@pytest.mark.parametrize("gain", [0.96, 1.04])
def test_a_machine_that_becomes_slower_and_slower_or_faster_decides_nothing(drift, gain):
    """By 1 % with every window: 4 % between two blocks."""
    slowed = 1 - gain_without(0, 2) / gain
    job = Job(tried((2,)), (0, 0, slowed), noise=lambda number: drift**number)
    _, states = job.run(100)
    assert found(states) == pytest.approx(gain, rel=0.01)
    assert states[-1].resting == (gain > 1, False)


@pytest.mark.parametrize("lasts", [1, 2, 4])
def test_a_disturbance_decides_nothing(lasts):
    """A checkpoint that is written, or another process; the trial is of 16 windows."""
    rest = tried((2,))
    for begins in range(8, 70):
        job = Job(rest, noise=lambda number, at=begins: 0.05 if at <= number < at + lasts else 1.0)
        assert job.run(120)[1][-1].resting == (False, False)


def test_a_clear_pair_ends_a_trial_that_changes_nothing():
    def decided(job):
        _, states = job.run(100)
        return next(at for at, state in enumerate(states) if state.gain is not None)

    clear, unclear = Job(tried((1, 2))), Job(tried((2,)))  # 0.57 and 0.86 without them
    assert decided(clear) < decided(unclear) - 10
    changes = Job(tried((2,)), (0, 0, 0.5))  # 1.7: a change needs all pairs
    assert decided(changes) == decided(unclear)


@pytest.mark.parametrize("epoch", range(11, 40))
def test_ends_of_epochs_decide_nothing(epoch):
    """An exchange of 4 ms makes the short window at the end of every epoch slow."""
    rest = tried((2,))
    state, left, seen = rest.init(3), epoch, []
    for number in range(600):
        asked = rest.plan(state, PLAN)
        counts = clamp_counts(asked, left)
        left = left - sum(counts) or epoch
        work = sum(one for one, count in zip(SPEEDS, counts, strict=True) if count)
        wall_ms = sum(counts) / work + 4.0
        share = sum(counts) / sum(asked)
        record = WindowRecord(number, 0, counts, 64, counts, wall_ms, 4.0, 0.0, True, share=share)
        state = rest.update(state, record)
        seen.append(state.resting)
    assert set(seen) == {(False, False)}


@pytest.mark.parametrize(("exchange_ms", "rests"), [(0.0, False), (20.0, True)])
def test_epochs_shorter_than_a_plan(exchange_ms, rests):
    """All windows are cut short, so they are compared with each other."""
    rest, plan = Rest(((0,), (1,))), (4000, 400)
    state = rest.init(2)
    for number in range(80):
        asked = rest.plan(state, plan)
        counts = clamp_counts(asked, 110)
        wall_ms = max(counts[0] / 1.0, counts[1] / 0.1) + exchange_ms * all(counts)
        share = sum(counts) / sum(asked)
        record = WindowRecord(number, 0, counts, 64, counts, wall_ms, 0.1, 0.0, True, share=share)
        state = rest.update(state, record)
    assert state.resting == (False, rests)


def test_a_trial_that_learns_nothing_ends():
    """With the device at work, every window is cut short."""
    rest = tried((2,))
    job, state, seen = Job(rest), replace(rest.init(3), resting=(True, False)), []
    told: set[int] = set()
    for number in range(4000):
        counts = rest.plan(state, PLAN)
        counts, share = ((3, 2, 2), 7 / 11) if counts == PLAN else (counts, 1.0)
        before = state
        state = rest.update(state, replace(job.record(number, counts), share=share))
        told |= {state.group} if state.gain != before.gain else set()
        seen.append(counts)
    assert state.resting == (True, False) and state.pauses[0] == 3200 and 0 not in told
    assert sum(counts[2] > 0 for counts in seen) < 0.1 * len(seen)


def test_a_clear_pair_does_not_end_a_trial_in_which_another_one_differs():
    """The second block of the second pair is disturbed."""
    rest = tried((2,))
    slowed = 1 - gain_without(0, 2) / 1.1
    clean = Job(rest, (0, 0, slowed)).run(120)[1]
    pair = next(at for at, one in enumerate(clean) if one.trial and len(one.trial.speeds) == 3)
    job = Job(rest, (0, 0, slowed), noise=lambda n: 0.6 if pair <= n - 2 < pair + 4 else 1.0)
    assert job.run(120)[1][-1].resting == (True, False)


def test_a_new_run_is_not_compared_with_the_last_one():
    rest = tried((1,))
    job = Job(rest, (0, 0.5, 0))
    for state in job.run(120)[1]:
        new = rest.begin(state)
        assert new.trial is None and min(new.waits) >= rest.first and new.largest == 0
        assert new.resting == state.resting and new.pauses == state.pauses


def test_trials_cost_little():
    """Half a percent of the work in the long run, and first ones a few windows."""
    for group in ((1,), (2,), (1, 2)):
        job = Job(tried(group))
        seen, _ = job.run(6000)
        spent = sum(sum(counts) / job.speed(0, counts) for counts in seen)
        done = sum(map(sum, seen))
        assert done / spent > 0.99 * sum(SPEEDS)


def test_pauses_grow_while_nothing_changes():
    _, states = Job(tried((2,), longest=800)).run(6000)
    pauses = list(dict.fromkeys(state.pauses[0] for state in states))
    assert pauses == sorted(pauses) and len(pauses) > 1 and pauses[0] == 100


@given(
    counts=st.tuples(*[st.integers(0, 50)] * 4),
    resting=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_a_plan_takes_work_only_from_those_at_rest(counts, resting):
    rest = Rest(((1, 3), (2,), (0,)))
    planned = rest.plan(replace(rest.init(4), resting=resting), counts)
    asleep = {
        rank for rests, ranks in zip(resting, rest.groups, strict=True) if rests for rank in ranks
    }
    left = tuple(0 if rank in asleep else count for rank, count in enumerate(counts))
    assert planned == (left if any(left) else counts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 0}, "Rest: first must be at least 1, got 0"),
        ({"pause": 0}, "Rest: pause must be at least 1, got 0"),
        ({"windows": 0}, "Rest: windows must be at least 1, got 0"),
        ({"pairs": 0}, "Rest: pairs must be at least 1, got 0"),
        ({"margin": -0.1}, "Rest: margin must be at least 0, got -0.1"),
        ({"pause": 100, "longest": 99}, "Rest: longest must be at least 100, got 99"),
    ],
)
def test_numbers_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        tried((1,), **changes)


NONE = [(), ((),), ((0,),), ((0, 1), ()), ((0,), (2,)), ((0,), (0, 1)), ((0, 0), (1,))]


@pytest.mark.parametrize("groups", NONE)
def test_groups_that_are_none(groups):
    rule = "hold at least two groups, none of them empty, and each rank from 0 on once, got "
    with pytest.raises(ValueError, match=re.escape(f"Rest: groups must {rule}{groups}.")):
        Rest(groups)


def test_what_is_not_of_these_devices():
    rest = tried((1,))
    state, record = rest.init(3), Job(rest).record(0, PLAN)
    with pytest.raises(TypeError, match=r"^Controller: rest must be a Rest or None, got True"):
        Controller(ElChe(), rest=True)
    with pytest.raises(
        ValueError, match=r"^Rest\.plan: counts must have one entry per device \(3\), got 2"
    ):
        rest.plan(state, (1, 2))
    with pytest.raises(ValueError, match=r"^Rest.plan: counts\[1\] must be at least 0, got -1"):
        rest.plan(state, (1, -1, 1))
    with pytest.raises(TypeError, match=r"^Rest\.update: record must be .*WindowRecord, got "):
        rest.update(state, WindowReport((1.0,), (1,), 0.0))
    with pytest.raises(
        ValueError, match=r"^Rest\.update: record must have one entry per device \(3\)"
    ):
        rest.update(state, replace(record, counts=(1, 2)))


def test_groups_of_other_devices():
    message = r"Rest: groups must have one entry per device \(3\) in total, got \(\(0,\), \(1,\)\)."
    with pytest.raises(ValueError, match=message):
        Controller(ElChe(), rest=Rest(((0,), (1,)))).init(3)


def test_ranks_that_are_none():
    with pytest.raises(ValueError, match=r"Rest: groups\[0\] must be at least 0"):
        Rest(((-1,),))
    with pytest.raises(TypeError, match=r"Rest: groups\["):
        Rest((("cpu",),))


# -- in the controller


def drive(controller, job, windows):
    state = controller.init(3)
    for number in range(windows):
        counts = controller.plan(state, number)
        state = controller.observe(state, job.record(number, counts))
    return state


def test_the_controller_plans_without_devices_at_rest():
    rest = tried((2,))
    controller, job = Controller(ElChe(anchor=4), rest=rest), Job(rest, (0, 0, 0.5))
    state = drive(controller, job, 200)
    assert state.rest.resting == (True, False)
    assert controller.plan(state, 100)[2] == 0 < state.schedule.counts[2]
    assert min(state.schedule.counts) == 4, "the exchange costs less at rest: no shorter windows"
    without = drive(Controller(ElChe(anchor=4)), job, 200)
    assert without.rest is None and min(without.schedule.counts) > 0


def test_the_speed_of_windows_in_which_devices_rest_moves_no_anchor():
    """Their cost is no measurement: a slower machine, or a guard's nudge, must not add up."""
    rest = Rest(((0,), (1,)))
    controller = Controller(ElChe(anchor=10), rest=rest, guard=Nudges())
    state = controller.init(2)
    state = replace(state, rest=replace(state.rest, resting=(False, True)))
    anchors = []
    for number in range(60):
        ms = 20.0 if number % 12 > 9 else 10.0
        counts = (controller.plan(state, number)[0], 0)
        busy = (ms * counts[0], 0.0)
        apart = Divergence(number, counts, *[(0.1, 0.1)] * 4) if number == 30 else None
        record = WindowRecord(number, 0, counts, 64, busy, max(busy) + 9, 9.0, 0.0, True)
        record = replace(record, divergence=apart)
        state = controller.observe(state, record)
        state = replace(state, rest=replace(state.rest, resting=(False, True)))
        anchors.append(state.schedule.cadence.anchor)
    assert anchors == [10] * 30 + [5] * 30


class Nudges(Guard):
    """Says so of every divergence."""

    def verdict(self, history):
        return nudge_down(0.5)


@pytest.mark.parametrize("cut", [None, 1.5, 3.0, 10.0])
def test_windows_keep_their_length_while_devices_rest(cut):
    """Whatever the exchange costs then, and however short the last window of an epoch is."""
    controller = Controller(ElChe(anchor=2, overhead_target=0.1), rest=Rest(((1,), (0,))))
    state = controller.init(2)
    cadence = replace(
        state.schedule.cadence, anchor=40, counts=(400, 40), ms_per_batch=(1.0, 10.0),
        calibrated=True,
    )  # fmt: skip
    schedule = replace(state.schedule, settled=True, cadence=cadence)
    rest = replace(state.rest, resting=(True, False), waits=(999, 999))
    state = replace(state, schedule=schedule, rest=rest)
    for window in range(100):
        counts = controller.plan(state, window)
        if cut is not None and window % 10 == 9:
            counts = (int(counts[0] / cut), 0)
        wall_ms = float(counts[0])
        busy_ms = (wall_ms, 0.0)
        record = WindowRecord(window, 0, counts, 64, busy_ms, wall_ms + 1, 1.0, 0.0, True)
        state = controller.observe(state, record)
    assert state.schedule.cadence.anchor == 40 and controller.plan(state, 100) == (400, 0)


def test_counts_follow_the_others_while_a_device_rests():
    """A trial makes the others faster, so it begins with a shift."""
    rest = Rest(((0, 1), (2,)), first=5, windows=3, pairs=2)
    controller = Controller(ElChe(max_anchor=10), rest=rest)
    state, seen = controller.init(3), []
    for window in range(90):
        counts = controller.plan(state, window)
        slowed = 1.5 if counts[2] else 1.0
        ms = (slowed, slowed if window < 80 else 3.0, 4.0)
        busy = tuple(count * time for count, time in zip(counts, ms, strict=True))
        record = WindowRecord(window, 0, counts, 64, busy, max(busy) + 0.5, 0.5, 0.0, True)
        state = controller.observe(state, record)
        seen.append(counts)
    # two windows are slow before the plan has changed
    assert seen[60:81] == [(40, 40, 0)] * 21 and seen[82:] == [(40, 13, 0)] * 8
    assert state.schedule.cadence.ms_per_batch == (1.0, 3.0, 4.0)


def test_a_script_is_followed_to_the_letter():
    rest = tried((2,))
    controller, job = Controller(Replay([PLAN] * 100), rest=rest), Job(rest, (0, 0, 0.5))
    state: ControllerState = controller.init(3)
    for number in range(100):
        assert controller.plan(state, number) == PLAN
        state = controller.observe(state, job.record(number, PLAN))
