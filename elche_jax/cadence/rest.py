"""Rest: tests whether a job is faster without some of its devices, and if so lets them rest.

A device costs the others the time that they wait for its contribution, and whatever they share
with it: memory bandwidth, a power budget, the cores of a host. Only a trial shows the latter. A
trial alternates blocks of windows with and without the devices, in reversed order in every second
pair of blocks, so that a drift of the machine's speed cancels. If no other devices work, the trial
replaces these devices by those that rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elche_jax import _check as check
from elche_jax.cadence.window import WindowRecord

CLEAR = 1.25
"""Ratio of two speeds beyond which a trial that would change nothing ends early."""

FULL = 0.8
"""Share below which a window says nothing, both of the planned microbatches (see `WindowRecord`)
and of the largest window. In epochs shorter than a plan, no window has all that was planned."""

PATIENCE = 10
"""Multiple of a block's length: a trial ends after that many windows of a block say nothing."""

GROWTH = 1.25
"""Growth of windows that delays the next trial: short windows say nothing about long ones."""

SHARE = 0.005
"""Share of the work that trials may cost in the long run."""


@dataclass(frozen=True)
class Trial:
    """A trial in progress.

    Attributes:
        rests: Whether the devices rest in the current block.
        block: Microbatches per millisecond of each window of the block so far.
        speeds: Speeds of the previous blocks, in pairs: changed and as before the trial, as before
            and changed, and so on.
        other: Windows of changed blocks so far.
        ignored: Windows since the block began that say nothing about it.
    """

    rests: bool
    block: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    other: int = 0
    ignored: int = 0


@dataclass(frozen=True)
class RestState:
    """State of `Rest`.

    Attributes:
        resting: For each group of devices, whether it rests.
        waits: For each group, steady windows until its next trial.
        pauses: For each group, windows from its last trial to its next one.
        trials: For each group, the number of its trials so far.
        group: The group that was tried last or is being tried.
        trial: The trial in progress, or None.
        gain: Speed without the group that was tried last, divided by the speed with it; None
            before the first trial with a result. A trial without one leaves it as it is.
        largest: Microbatches of the largest window, not updated for growth of up to a quarter.
    """

    resting: tuple[bool, ...]
    waits: tuple[int, ...]
    pauses: tuple[int, ...]
    trials: tuple[int, ...]
    group: int = 0
    trial: Trial | None = None
    gain: float | None = None
    largest: int = 0


@dataclass(frozen=True)
class Rest(check.CheckedFields):
    """Lets devices rest while the others are faster without them.

    With ``v`` the median over a block's windows of ``sum(counts) / wall_ms``, and the median
    over pairs of blocks,

        gain = median of v without the devices / v with them

    the devices rest if ``gain > 1 + margin``, and work if ``gain < 1 - margin``; in between nothing
    changes. If all pairs are in favour of no change, a pair with a ratio above 1.25 ends the trial
    early. After a trial that changed nothing, the group's pause at least doubles, and is long
    enough for trials to cost at most 0.5 % of the work in the long run, unless it reaches its
    bound ``longest``.

    The group with the least work is tried first. At least one group always works: while the last
    working group is tried, all others work.

    Attributes:
        groups: Ranks of the devices that rest together, at least two groups. Every device of the
            job is in exactly one of them.
        first: Steady windows before the first trial of a run, at least 1. Trials also wait that
            long after windows have grown by more than a quarter, as they do until the exchange
            takes a small share of them.
        pause: Steady windows after a trial that changed something, at least 1.
        longest: Largest pause, at least ``pause``.
        windows: Windows of a block that count, at least 1; one more before them does not.
        pairs: Pairs of blocks in a trial, at least 1; an even number cancels drift.
        margin: Smallest relative gain that counts, at least 0.

    Raises:
        TypeError: If a rank or a number is of the wrong type.
        ValueError: If there are fewer than two groups, a group is empty, the groups do not hold
            each rank from 0 on exactly once, or a number is out of range.

    Examples:
        Two devices share a core, so that one alone is faster than both:

        >>> rest = Rest(groups=((0,), (1,)), first=1, windows=1, pairs=1)
        >>> state = rest.init(2)
        >>> for window in range(7):
        ...     counts = rest.plan(state, (5, 4))
        ...     wall_ms = 44.0 if all(counts) else 20.0
        ...     record = WindowRecord(window, 0, counts, 64, counts, wall_ms, 1.0, 0.0, True)
        ...     state = rest.update(state, record)
        >>> rest.plan(state, (5, 4)), round(state.gain, 2)
        ((5, 0), 1.22)
    """

    groups: tuple[tuple[int, ...], ...]
    # with 10, the exchange still took half of a window, and every device seemed indispensable
    first: int = field(default=20, metadata={"low": 1})
    pause: int = field(default=100, metadata={"low": 1})
    longest: int = field(default=3200, metadata={"low": 1})
    windows: int = field(default=3, metadata={"low": 1})
    pairs: int = field(default=4, metadata={"low": 1})
    margin: float = field(default=0.01, metadata={"low": 0})

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = check.items("Rest", "groups", self.groups, "sequences of ranks")
        groups = tuple(check.integers("Rest", "groups", ranks, low=0) for ranks in groups)
        ranks = sorted(rank for group in groups for rank in group)
        if len(groups) < 2 or not all(groups) or ranks != list(range(len(ranks))):
            rule = "hold at least two groups, none of them empty, and each rank from 0 on once"
            raise ValueError(check.message("Rest", "groups", rule, groups))
        object.__setattr__(self, "groups", groups)
        check.integer("Rest", "longest", self.longest, low=self.pause)

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return sum(map(len, self.groups))

    def init(self, world_size: int) -> RestState:
        """Return the state before the first window: all devices work.

        Raises:
            ValueError: If the groups are of a different number of devices.
        """
        size = len(self.groups)
        if world_size != self.world_size:
            rule = f"have one entry per device ({world_size}) in total"
            raise ValueError(check.message("Rest", "groups", rule, self.groups))
        return RestState((False,) * size, (self.first,) * size, (self.pause,) * size, (0,) * size)

    def begin(self, state: RestState) -> RestState:
        """Return the state at the start of a run, without the last run's trial and window size."""
        return self._waiting(replace(state, trial=None, largest=0))

    def plan(self, state: RestState, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the counts with 0 for devices that rest or that a trial leaves out.

        If no work would be left, all devices keep theirs.

        Raises:
            TypeError: If a count is not an integer.
            ValueError: If there is not one count per device, or one is below 0.
        """
        counts = check.integers("Rest.plan", "counts", counts, low=0)
        check.per_device("Rest.plan", "counts", len(counts), self.world_size)
        left, trial = list(counts), state.trial
        resting = state.resting if trial is None else _with(state, trial.rests)
        for ranks, rests in zip(self.groups, resting, strict=True):
            for rank in ranks if rests else ():
                left[rank] = 0
        # a cadence may have no work for the others, and a window needs some
        return tuple(left) if any(left) else tuple(counts)

    def update(self, state: RestState, record: WindowRecord) -> RestState:
        """Return the state after a window.

        Windows whose times say nothing are ignored, but too many of them may end a trial.

        Raises:
            TypeError: If the record is not a `WindowRecord`.
            ValueError: If it is for a different number of devices.
        """
        where = "Rest.update"
        check.instance(where, "record", record, WindowRecord)
        check.per_device(where, "record", len(record.counts), self.world_size)
        size = sum(record.counts)
        cut_short = record.share < FULL and size < FULL * state.largest
        if not record.steady or record.cold or record.wall_ms <= 0:
            return state
        if state.trial is not None:
            idle = not any(record.counts[rank] for rank in self.groups[state.group])
            # the second condition: the window was planned before the block began
            if cut_short or idle != state.trial.rests:
                return self._ignored(state, state.trial)
            return self._continued(state, state.trial, record)
        if cut_short:
            return state
        if size > GROWTH * state.largest:
            return self._waiting(replace(state, largest=size))
        state = replace(state, waits=tuple(max(0, wait - 1) for wait in state.waits))
        if all(state.waits):
            return state
        work = [sum(record.counts[rank] for rank in ranks) for ranks in self.groups]
        due = [group for group, wait in enumerate(state.waits) if not wait]
        # by trials first, or the group with the least work would go before the others every time
        group = min(due, key=lambda group: (state.trials[group], work[group]))
        return replace(state, group=group, trial=Trial(not state.resting[group]))

    def _waiting(self, state: RestState) -> RestState:
        """Return the state with trials delayed until windows have settled."""
        return replace(state, waits=tuple(max(self.first, wait) for wait in state.waits))

    def _ignored(self, state: RestState, trial: Trial) -> RestState:
        """Count a window that says nothing; too many of them end the trial without a result."""
        # all windows of a block may be cut short: the trial would never end
        if trial.ignored < PATIENCE * (self.windows + 1):
            return replace(state, trial=replace(trial, ignored=trial.ignored + 1))
        return self._paused(state, min(2 * state.pauses[state.group], self.longest))

    def _continued(self, state: RestState, trial: Trial, record: WindowRecord) -> RestState:
        rested = state.resting[state.group]
        block = (*trial.block, sum(record.counts) / record.wall_ms)
        trial = replace(trial, block=block, other=trial.other + (trial.rests != rested))
        if len(block) <= self.windows:
            return replace(state, trial=trial)
        # in a block's first window, devices fall asleep or wake up
        speeds = (*trial.speeds, median(block[1:]))
        gains = _gains(speeds, rested)
        kept = [gain if rested else 1 / gain for gain in gains]  # above 1: better as before
        # every pair must agree: a disturbed pair, however clear, must not overrule the others
        settles = len(speeds) % 2 == 0 and min(kept) > 1 and kept[-1] > CLEAR
        if len(gains) == self.pairs or settles:
            # a median, as writing a checkpoint or another process may disturb one pair
            return self._decided(state, trial, median(gains))
        # off on, on off, off on, ...: two blocks in a row are alike
        rests = not trial.rests if len(speeds) % 2 else trial.rests
        return replace(state, trial=Trial(rests, (), speeds, trial.other))

    def _decided(self, state: RestState, trial: Trial, gain: float) -> RestState:
        group, rested = state.group, state.resting[state.group]
        rests = gain > 1 + self.margin or (rested and gain >= 1 - self.margin)
        state = replace(state, gain=gain)
        if rests == rested:
            # what a trial loses in the worse half of its windows; the trials of all groups add up
            lost = trial.other * (1 - min(gain, 1 / gain)) * len(self.groups)
            pause = max(2 * state.pauses[group], round(lost / SHARE))
            return self._paused(state, min(pause, self.longest))
        # what was found out about the other groups is no longer valid
        pauses = (self.pause,) * len(self.groups)
        state = replace(state, resting=_with(state, rests), pauses=pauses, waits=pauses)
        return self._paused(state, self.pause)

    def _paused(self, state: RestState, pause: int) -> RestState:
        """Return the state after a trial of its group."""
        waits, pauses, trials = list(state.waits), list(state.pauses), list(state.trials)
        waits[state.group] = pauses[state.group] = pause
        trials[state.group] += 1
        return replace(
            state, waits=tuple(waits), pauses=tuple(pauses), trials=tuple(trials), trial=None
        )


def _with(state: RestState, rests: bool) -> tuple[bool, ...]:
    """Return which groups rest if the group that is tried rests or works; never all."""
    resting = [*state.resting[: state.group], rests, *state.resting[state.group + 1 :]]
    if all(resting):
        # all others work in its place: with two groups, every choice is then one trial away
        resting = [group == state.group for group in range(len(resting))]
    return tuple(resting)


def _gains(speeds: Sequence[float], rested: bool) -> list[float]:
    """Return, for every pair of blocks, the speed without the devices divided by that with them."""
    gains = []
    for at in range(0, len(speeds) - 1, 2):
        changed, as_before = speeds[at : at + 2]
        if at % 4:  # reversed order
            changed, as_before = as_before, changed
        gains.append(as_before / changed if rested else changed / as_before)
    return gains
