"""Rest: tries out whether a job is faster without some of its devices, and lets them rest.

A device costs what the others wait for its contribution, and whatever it shares with them: memory
bandwidth, a power budget, the cores of a host. Only a trial shows the second. In a trial, blocks
of windows with the devices and without them take turns, so that a machine whose speed drifts
does not decide it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from elche_jax.cadence.knobs import CheckedFields
from elche_jax.cadence.window import WindowRecord

CLEAR = 1.25
"""Ratio of two speeds that needs no second pair of blocks."""

GROWTH = 1.25
"""Growth of windows after which the next trial waits: short windows say nothing of long ones."""

SHARE = 0.005
"""Share of the work that trials may cost."""


@dataclass(frozen=True)
class Trial:
    """A trial that has begun.

    Attributes:
        rests: Whether the devices rest in the present block.
        block: Microbatches per millisecond of the block's windows so far.
        gains: For every pair of blocks, the speed without the devices over that with them.
        other: Speed of the first block of a pair; None in that block.
        windows: Windows of the trial so far in which the devices were not as before it.
    """

    rests: bool
    block: tuple[float, ...] = ()
    gains: tuple[float, ...] = ()
    other: float | None = None
    windows: int = 0


@dataclass(frozen=True)
class RestState:
    """State of `Rest`.

    Attributes:
        resting: For each group of devices, whether it rests.
        wait: Steady windows until the next trial.
        pauses: For each group, windows between its last trial and the next one.
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
    stay as they are. A pair beyond a ratio of 1.25 decides alone. After a trial that changed
    nothing, the pause doubles; it is always long enough that the next trial costs about 0.5 % of
    the work.

    Attributes:
        groups: Ranks of the devices that rest together. One device at least is in none of them.
        first: Steady windows before the first trial, at least 1, and after windows have grown by
            a quarter, as they do until the exchange takes a small share of them.
        pause: Steady windows after a trial, at least 1.
        longest: Largest pause, except where a trial costs more.
        windows: Windows of a block that count, at least 1. One before them does not.
        pairs: Pairs of blocks in a trial, at least 1.
        margin: Smallest gain that counts, at least 0.

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
    pairs: int = field(default=3, metadata={"low": 1})
    margin: float = field(default=0.01, metadata={"low": 0})

    def init(self) -> RestState:
        """Return the state before the first window: all devices work."""
        size = len(self.groups)
        return RestState((False,) * size, self.first, (self.pause,) * size)

    def plan(self, state: RestState, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the counts with 0 for devices that rest, or that a trial goes without."""
        left = list(counts)
        for group, ranks in enumerate(self.groups):
            if self._rests(state, group):
                for rank in ranks:
                    left[rank] = 0
        return tuple(left)

    def update(self, state: RestState, record: WindowRecord) -> RestState:
        """Return the state after a window. Windows whose times say nothing change nothing."""
        if not record.steady or record.cold or record.wall_ms <= 0:
            return state
        if state.trial is not None:
            return self._continued(state, state.trial, record)
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

    def _continued(self, state: RestState, trial: Trial, record: WindowRecord) -> RestState:
        idle = not any(record.counts[rank] for rank in self.groups[state.group])
        if idle != state.resting[state.group]:
            trial = replace(trial, windows=trial.windows + 1)
        if idle != trial.rests:  # planned before the block began
            return replace(state, trial=trial)
        trial = replace(trial, block=(*trial.block, sum(record.counts) / record.wall_ms))
        if len(trial.block) <= self.windows:
            return replace(state, trial=trial)
        speed = median(trial.block[1:])  # in the first one, devices fall asleep or wake up
        if trial.other is None:
            other = replace(trial, rests=not trial.rests, block=(), other=speed)
            return replace(state, trial=other)
        gain = speed / trial.other if trial.rests else trial.other / speed
        gains = (*trial.gains, gain)
        if len(gains) < self.pairs and 1 / CLEAR < gain < CLEAR:
            # the second block of a pair is that before the trial, so the next begins as the first
            again = Trial(not trial.rests, (), gains, None, trial.windows)
            return replace(state, trial=again)
        return self._decided(state, trial, median(gains))

    def _decided(self, state: RestState, trial: Trial, gain: float) -> RestState:
        group, rested = state.group, state.resting[state.group]
        rests = gain > 1 + self.margin or (rested and gain >= 1 - self.margin)
        # what a trial loses in the windows of the worse half
        lost = trial.windows * (1 - min(gain, 1 / gain))
        pause = self.pause if rests != rested else min(2 * state.pauses[group], self.longest)
        pause = max(pause, round(lost / SHARE))
        resting, pauses = list(state.resting), list(state.pauses)
        resting[group], pauses[group] = rests, pause
        return RestState(
            tuple(resting),
            # groups take turns
            wait=max(1, pause // len(self.groups)),
            pauses=tuple(pauses),
            group=(group + 1) % len(self.groups),
            gain=gain,
            largest=state.largest,
        )
