"""Rest: tries out whether a job is faster without some of its devices, and lets them rest.

A device costs what the others wait for its contribution, and whatever it shares with them: memory
bandwidth, a power budget, the cores of a host. Only a trial shows the second. In a trial, blocks
of windows with the devices and without them alternate, and every second pair of blocks in the other
order, so that the drift of a machine's speed cancels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elche_jax import _check as check
from elche_jax.cadence.knobs import CheckedFields
from elche_jax.cadence.window import WindowRecord

CLEAR = 1.25
"""Ratio of two speeds after which a trial ends that would change nothing."""

FULL = 0.8
"""Share of the planned microbatches below which a window says nothing, see `WindowRecord`."""

PATIENCE = 10
"""Times the length of a block after which a trial ends in which that many windows say nothing."""

GROWTH = 1.25
"""Growth of windows after which the next trial waits: short windows say nothing of long ones."""

SHARE = 0.005
"""Share of the work that trials may cost in the long run."""


@dataclass(frozen=True)
class Trial:
    """A trial that has begun.

    Attributes:
        rests: Whether the devices rest in the present block.
        block: Microbatches per millisecond of the block's windows so far.
        speeds: Speeds of the blocks before it: a pair without and with the devices, a pair with
            and without them, and so on; the first block is the one that differs from before.
        other: Windows so far in which the devices were not as before the trial.
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
        wait: Steady windows until the next trial.
        pauses: For each group, windows from its last trial to its next one.
        group: The group that is tried next, or now.
        trial: The trial; None between two.
        gain: Speed without the group that was tried last over the speed with it; None
            before the first trial.
        largest: Microbatches of the window that windows have not grown beyond since.
    """

    resting: tuple[bool, ...]
    wait: int
    pauses: tuple[int, ...]
    group: int = 0
    trial: Trial | None = None
    gain: float | None = None
    largest: int = 0


@dataclass(frozen=True)
class Rest(CheckedFields):
    """Lets devices rest while the others are faster without them.

    With ``v`` the median over a block's windows of ``sum(counts) / wall_ms``, and the median
    over pairs of blocks,

        gain = median of v without the devices / v with them

    the devices rest if ``gain > 1 + margin``, and work if ``gain < 1 - margin``; in between they
    stay as they are. A pair beyond a ratio of 1.25 ends the trial if nothing would change. After a
    trial that changed nothing, the pause doubles, and is so long that trials cost at most 0.5 %
    of the work in the long run, unless it reached its bound.

    Attributes:
        groups: Ranks of the devices that rest together. One device at least is in none of them.
        first: Steady windows before the first trial of a run, at least 1, and after windows have
            grown by a quarter, as they do until the exchange takes a small share of them.
        pause: Steady windows after a trial that changed something, at least 1.
        longest: Largest pause.
        windows: Windows of a block that count, at least 1. One before them does not.
        pairs: Pairs of blocks in a trial, at least 1; an even number cancels drift.
        margin: Smallest gain that counts, at least 0.

    Raises:
        TypeError: If a rank or a number is of the wrong type.
        ValueError: If there is no group, a group is empty, a rank is below 0 or in two groups, or
            a number is out of range.

    Examples:
        Two devices share a core, so that one is as fast as both:

        >>> rest = Rest(groups=((1,),), first=1, windows=1, pairs=1)
        >>> state = rest.init()
        >>> for window in range(7):
        ...     counts = rest.plan(state, (4, 4))
        ...     wall_ms = 44.0 if counts[1] else 20.0
        ...     record = WindowRecord(window, 0, counts, 64, counts, wall_ms, 1.0, 0.0, True)
        ...     state = rest.update(state, record)
        >>> rest.plan(state, (4, 4)), round(state.gain, 2)
        ((4, 0), 1.1)
    """

    groups: tuple[tuple[int, ...], ...]
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
        ranks = [rank for group in groups for rank in group]
        if not all(groups) or not groups or len(set(ranks)) != len(ranks):
            rule = "hold at least one group, none of them empty, and no rank twice"
            raise ValueError(check.message("Rest", "groups", rule, groups))
        object.__setattr__(self, "groups", groups)

    def init(self) -> RestState:
        """Return the state before the first window: all devices work."""
        size = len(self.groups)
        return RestState((False,) * size, self.first, (self.pause,) * size)

    def begin(self, state: RestState) -> RestState:
        """Return the state at the start of a run, whose windows say nothing of the last one's."""
        return replace(state, trial=None, largest=0, wait=max(self.first, state.wait))

    def plan(self, state: RestState, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the counts with 0 for devices that rest, or that a trial goes without.

        If no work were left, all devices keep theirs.
        """
        left = list(counts)
        for group, ranks in enumerate(self.groups):
            if self._rests(state, group):
                for rank in ranks:
                    left[rank] = 0
        return tuple(left) if any(left) else tuple(counts)

    def update(self, state: RestState, record: WindowRecord) -> RestState:
        """Return the state after a window. Windows whose times say nothing change nothing."""
        cut_short = record.share < FULL
        if not record.steady or record.cold or record.wall_ms <= 0:
            return state
        if state.trial is not None:
            idle = not any(record.counts[rank] for rank in self.groups[state.group])
            # the second: planned before the block began
            if cut_short or idle != state.trial.rests:
                return self._ignored(state, state.trial)
            return self._continued(state, state.trial, record)
        if cut_short:
            return state
        size = sum(record.counts)
        if size > GROWTH * state.largest:
            return replace(state, wait=max(state.wait, self.first), largest=size)
        if state.wait > 1:
            return replace(state, wait=state.wait - 1)
        return replace(state, wait=0, trial=Trial(not state.resting[state.group]))

    def _rests(self, state: RestState, group: int) -> bool:
        if state.trial is not None and group == state.group:
            return state.trial.rests
        return state.resting[group]

    def _ignored(self, state: RestState, trial: Trial) -> RestState:
        """Count a window that says nothing; too many of them end the trial without a result."""
        if trial.ignored < PATIENCE * (self.windows + 1):
            return replace(state, trial=replace(trial, ignored=trial.ignored + 1))
        return self._paused(state, state.resting, min(2 * state.pauses[state.group], self.longest))

    def _continued(self, state: RestState, trial: Trial, record: WindowRecord) -> RestState:
        rested = state.resting[state.group]
        block = (*trial.block, sum(record.counts) / record.wall_ms)
        trial = replace(trial, block=block, other=trial.other + (trial.rests != rested))
        if len(block) <= self.windows:
            return replace(state, trial=trial)
        # in the first one, devices fall asleep or wake up
        speeds = (*trial.speeds, median(block[1:]))
        gains = _gains(speeds, rested)
        kept = [gain if rested else 1 / gain for gain in gains]  # above 1: better as before
        settles = len(speeds) % 2 == 0 and min(kept) > 1 and kept[-1] > CLEAR
        if len(gains) == self.pairs or settles:
            return self._decided(state, trial, median(gains))
        # off on, on off, off on, ...: two blocks in a row are alike
        rests = not trial.rests if len(speeds) % 2 else trial.rests
        return replace(state, trial=Trial(rests, (), speeds, trial.other))

    def _decided(self, state: RestState, trial: Trial, gain: float) -> RestState:
        group, rested = state.group, state.resting[state.group]
        rests = gain > 1 + self.margin or (rested and gain >= 1 - self.margin)
        pause = self.pause
        if rests == rested:
            # what a trial loses in the windows of the worse half
            lost = trial.other * (1 - min(gain, 1 / gain)) * len(self.groups)
            pause = min(max(2 * state.pauses[group], round(lost / SHARE)), self.longest)
        resting = list(state.resting)
        resting[group] = rests
        return self._paused(replace(state, gain=gain), tuple(resting), pause)

    def _paused(self, state: RestState, resting: tuple[bool, ...], pause: int) -> RestState:
        """Return the state after a trial; groups take turns."""
        pauses, groups = list(state.pauses), len(self.groups)
        pauses[state.group] = pause
        return replace(
            state, resting=resting, wait=max(1, pause // groups), pauses=tuple(pauses),
            group=(state.group + 1) % groups, trial=None,
        )  # fmt: skip


def _gains(speeds: Sequence[float], rested: bool) -> list[float]:
    """Return for every pair of blocks the speed without the devices over that with them."""
    gains = []
    for at in range(0, len(speeds) - 1, 2):
        changed, as_before = speeds[at : at + 2]
        if at % 4:  # the other order
            changed, as_before = as_before, changed
        gains.append(as_before / changed if rested else changed / as_before)
    return gains
