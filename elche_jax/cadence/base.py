"""Base of all cadences: reports, verdicts and states, and the hooks of the training loop.

A *cadence* decides how many microbatches each device computes in the next window. It is a
frozen config object with two pure methods, like an optax transformation: ``init`` returns
a state, and ``update`` returns the next state, given a report. States are plain numbers, so
that the plan is the same in every process, can be stored in a checkpoint as JSON, and can be
replayed.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar, cast, get_args

from elche_jax import _check as check
from elche_jax.cadence.state import State

MAX_TOTAL: Final = 2**53
"""Largest number of microbatches in a window: float64 represents every count up to it exactly."""


@dataclass(frozen=True)
class WindowReport(check.CheckedFields):
    """Measurements of one window.

    Sequences and arrays are converted to tuples of plain Python numbers.

    Attributes:
        wall_ms: Busy time of each device in milliseconds, one entry per device, finite and
            not negative; 0 means not measured.
        counts: Microbatches that each device actually ran, integers, not negative.
        sync_ms: Cost of the synchronisation in milliseconds: the smallest wait over the
            devices, finite and not negative.
        loss: Mean loss of the window, for cadences that follow it (`AdaComm`); or ``None``.
        share: Share of the planned microbatches that the window had, in ``(0, 1]``: below 1 if
            the end of the data cut it short. Estimates of speed are updated in this proportion.

    Raises:
        TypeError: If an entry is not a number, or a count not an integer.
        ValueError: If a time or count is negative or not finite, the share is out of range, the
            two sequences differ in length, or they are empty.

    Examples:
        >>> WindowReport(wall_ms=[120, 60.0], counts=[4, 4], sync_ms=3)
        WindowReport(wall_ms=(120.0, 60.0), counts=(4, 4), sync_ms=3.0, loss=None, share=1.0)
    """

    wall_ms: Sequence[float] = field(metadata={"low": 0})
    counts: Sequence[int] = field(metadata={"low": 0})
    sync_ms: float = field(metadata={"low": 0})
    # any finite number
    loss: float | None = field(default=None, metadata={"low": None})
    share: float = field(default=1.0, metadata={"above": 0, "high": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.wall_ms:
            rule = "have one entry per device"
            raise ValueError(check.message("WindowReport", "wall_ms", rule, "none"))
        if len(self.counts) != len(self.wall_ms):
            rule = f"be as long as wall_ms ({len(self.wall_ms)})"
            raise ValueError(check.message("WindowReport", "counts", rule, len(self.counts)))


Action = Literal["stable", "hold_growth", "nudge_down"]


@dataclass(frozen=True)
class Verdict:
    """Decision of a guard on the divergence of the devices, passed to the cadence.

    Attributes:
        action: ``"stable"``: no objection; ``"hold_growth"``: windows must not get longer;
            ``"nudge_down"``: windows must get shorter.
        factor: Factor for the anchor in ``(0, 1]``, 0.5 by default, for ``"nudge_down"``;
            ``None`` for the other actions.

    Raises:
        ValueError: If the action is none of the three, or the factor is out of range or
            given for another action.
        TypeError: If the factor is not a number.

    Examples:
        >>> Verdict("nudge_down")
        Verdict(action='nudge_down', factor=0.5)
    """

    action: Action = "stable"
    factor: float | None = None

    def __post_init__(self) -> None:
        check.one_of("Verdict", "action", self.action, get_args(Action))
        if self.action == "nudge_down":
            if self.factor is None:
                object.__setattr__(self, "factor", 0.5)
            check.keep_checked(self, "factor", check.real, above=0, high=1)
        elif self.factor is not None:
            rule = f"be None for {self.action!r}"
            todo = "Only nudge_down has a factor."
            raise ValueError(check.message("Verdict", "factor", rule, self.factor, todo))


STABLE: Final = Verdict("stable")
"""No objection: the cadence follows its own rule."""

HOLD_GROWTH: Final = Verdict("hold_growth")
"""The anchor must not be raised."""


def nudge_down(factor: float = 0.5) -> Verdict:
    """Return the verdict that multiplies the anchor by ``factor``.

    Args:
        factor: In ``(0, 1]``.

    Returns:
        The verdict.

    Raises:
        ValueError: If ``factor`` is out of range.
        TypeError: If ``factor`` is not a number.

    Examples:
        >>> nudge_down(0.75).factor
        0.75
    """
    return Verdict("nudge_down", factor)


def stronger(one: Verdict, other: Verdict) -> Verdict:
    """Return the stricter of two verdicts, the first if they are equally strict.

    Examples:
        >>> stronger(HOLD_GROWTH, nudge_down(0.9)).action
        'nudge_down'
    """
    leeway = {"hold_growth": 2.0, "stable": 3.0}  # a factor of *nudge down* is at most 1
    return min(one, other, key=lambda verdict: verdict.factor or leeway[verdict.action])


class CadenceState(Protocol):
    """Protocol of a cadence's state: the plan for the next window."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device in the next window."""
        ...


S = TypeVar("S", bound=CadenceState)


class Cadence(ABC, Generic[S]):
    """Base of all cadences; a subclass must define ``init`` and ``update``.

    ``S`` is the type of its states: immutable objects with ``counts`` (see `CadenceState`).
    The other members are hooks of the training loop, with defaults for a rule that follows
    reports and keeps no estimates of times. With one device there are no busy times, and
    ``update`` is called only if ``counts_windows`` is set.

    A method whose name is a misspelt hook (``udpate``) raises an error, since it would never
    be called.

    Attributes:
        state_type: Class of the states, derived from `State`; ``None`` for states that cannot
            be restored from a checkpoint.
        adaptive: Whether counts depend on reports. If not, windows are planned further ahead.
        scripted: Whether the counts of every window are known in advance, see `counts_at`.
        estimates: Whether states hold ``ms_per_batch``, a time or ``None`` per device, which
            `recalibrate` forgets and `replan` fits the counts to.
        uses_loss: Whether reports must hold the window's loss.
        counts_windows: Whether ``update`` is also called for windows whose times are unknown;
            the times of such a report are 0. It is called once per window: times of a late device
            that become known later change only ``ms_per_batch``, followed by `replan`; without
            ``estimates`` they are passed to `learn`.
        overhead_target: Share of a window that synchronisation may take; 0 for no target.
        rests: Whether the devices of a kind may get no work while they slow the others down, see
            `elche_jax.cadence.Rest`.

    Raises:
        TypeError: If a subclass defines a method whose name is almost the name of a hook.

    Examples:
        >>> from dataclasses import dataclass
        >>> from elche_jax.cadence import Cadence, State, STABLE
        >>> @dataclass(frozen=True)
        ... class TwosState(State):
        ...     counts: tuple[int, ...]
        >>> @dataclass(frozen=True)
        ... class Twos(Cadence[TwosState]):
        ...     state_type = TwosState
        ...
        ...     def init(self, world_size):
        ...         return TwosState((2,) * world_size)
        ...
        ...     def update(self, state, report, verdict=STABLE):
        ...         return state
        >>> Twos().init(3).counts
        (2, 2, 2)
    """

    state_type: ClassVar[type[State] | None] = None
    adaptive: ClassVar[bool] = True
    scripted: ClassVar[bool] = False
    estimates: ClassVar[bool] = False
    uses_loss: ClassVar[bool] = False
    counts_windows: ClassVar[bool] = False
    # these two are not class variables, as they are arguments of `ElChe`
    overhead_target: float = 0.0
    rests: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, value in vars(cls).items():
            if not inspect.isfunction(value) or any(hasattr(b, name) for b in cls.__bases__):
                continue  # not a method, or one that a base class declares
            # 0.82 finds two swapped letters or a missing one, and matches hardly any other word
            if near := get_close_matches(name, HOOKS, n=1, cutoff=0.82):
                rule, got = "not resemble a hook of Cadence", "a method of that name"
                todo = f"Did you mean {near[0]}? If not, rename it."
                raise TypeError(check.message(cls.__name__, name, rule, got, todo))

    @abstractmethod
    def init(self, world_size: int) -> S:
        """Return the state before the first window.

        Args:
            world_size: Number of devices.
        """

    @abstractmethod
    def update(self, state: S, report: WindowReport, verdict: Verdict = STABLE) -> S:
        """Return the state for the next window; ``state`` is not modified.

        Args:
            state: The current state.
            report: The measurements of a window.
            verdict: The guard's verdict.
        """

    def counts_at(self, window: int) -> tuple[int, ...]:
        """Return the counts of a window by its index, from 0; called if ``scripted``."""
        raise self._unwritten("counts_at", "scripted")

    @property
    def largest_count(self) -> int | None:
        """The largest count of any window, or ``None`` if it is not known in advance.

        It is read once per run. The first program is made for this count, and no larger one is
        compiled in advance.
        """
        return None

    def for_kinds(self, kinds: Sequence[str]) -> "Cadence[S]":
        """Return the cadence for devices of these kinds; called once, before ``init``.

        Args:
            kinds: The kind of every device, such as ``"cpu"`` or ``"NVIDIA L4"``.
        """
        del kinds
        return self

    def recalibrate(self, state: S) -> S:
        """Return the state as if no device had been measured.

        Called after a device's speed has changed, if ``estimates`` is set. If the state is a
        dataclass, devices that ran nothing although they had work get their estimates back.
        """
        raise self._unwritten("recalibrate", "estimates")

    def replan(self, state: S) -> S:
        """Return the state with counts that fit the estimates as well as possible.

        Called when the counts have not changed for a while, if ``estimates`` is set.
        """
        return state

    def aim(self, state: S) -> tuple[int, ...]:
        """Return the counts that the next windows move towards; by default the next counts.

        Called if ``estimates`` is set. The overhead of a synchronisation is judged by them.
        """
        return state.counts

    def learn(self, state: S, report: WindowReport) -> S:
        """Return the state updated with times that `update` did not have for a window.

        Called if ``counts_windows`` is set and ``estimates`` is not. By default the times are
        not used.
        """
        del report
        return state

    def without(self, state: S, ranks: Collection[int]) -> S:
        """Return the state for the remaining devices after some are lost.

        By default, if ``estimates`` is set, the entries of the remaining devices are kept and
        `replan` sets their counts; otherwise the cadence starts anew.

        Args:
            state: The current state; it is not modified.
            ranks: Ranks of the lost devices; at least one device remains.

        Examples:
            >>> from elche_jax.cadence import ElChe, ElCheState
            >>> ElChe().without(ElCheState(10, (10, 20, 40), (4.0, 2.0, 1.0), True), [0]).counts
            (10, 20)
        """
        left = [rank for rank in range(len(state.counts)) if rank not in ranks]
        return self.replan(entries_of(state, left)) if self.estimates else self.init(len(left))

    def anchor_of(self, state: S) -> int | None:
        """Return the anchor of a state; ``None`` for a rule without one."""
        del state
        return None

    def check_state(self, state: S) -> None:
        """Raise ``ValueError`` if a stored state does not fit this cadence's arguments."""

    def _unwritten(self, hook: str, flag: str) -> NotImplementedError:  # what a flag promises
        rule = f"be defined if {flag} is True"
        return NotImplementedError(check.message(type(self).__name__, hook, rule, "none"))


def entries_of(state: S, ranks: Sequence[int]) -> S:
    """Return a state with only some devices' entries in every field with one entry per device.

    Examples:
        >>> from elche_jax.cadence import FixedTotalState
        >>> entries_of(FixedTotalState((5, 3), (3.0, None)), [0])
        FixedTotalState(counts=(5,), ms_per_batch=(3.0,), idle=())
    """
    size = len(state.counts)
    # in a user's state these may be lists or arrays
    names = "counts", "ms_per_batch"
    always = {name for name in names if getattr(state, name, None) is not None}
    kept = {
        name: tuple(value[rank] for rank in ranks)
        for name, value in vars(state).items()
        if name in always or (isinstance(value, tuple) and len(value) == size)
    }
    return replace(cast(Any, state), **kept)


HOOKS: Final = [
    name for name, value in vars(Cadence).items() if inspect.isfunction(value) and name[0] != "_"
]
"""Methods that a subclass of `Cadence` may define for the loop."""


class CheckedCadence(check.CheckedFields, Cadence[S]):
    """Base of the library's cadences; it checks all arguments.

    A subclass declares the bounds of its fields as in `check.CheckedFields`, and defines ``_first``
    and ``_next``, which get the checked arguments of ``init`` and ``update``.
    """

    def init(self, world_size: int) -> S:
        """Return the state before the first window.

        Args:
            world_size: Number of devices, at least 1.

        Returns:
            The state.

        Raises:
            TypeError: If ``world_size`` is not an integer.
            ValueError: If it is below 1, or the cadence does not allow that many devices.

        Examples:
            >>> from elche_jax.cadence import FixedTotal
            >>> FixedTotal(8).init(world_size=3).counts
            (3, 3, 2)
        """
        where = f"{type(self).__name__}.init"
        return self._first(check.integer(where, "world_size", world_size, low=1))

    def update(self, state: S, report: WindowReport, verdict: Verdict = STABLE) -> S:
        """Return the state for the next window.

        Args:
            state: The current state; it is not modified.
            report: The measurements of a window. Its counts are those actually run, which
                may differ from the plan.
            verdict: The guard's verdict.

        Returns:
            The next state.

        Raises:
            TypeError: If the report or the verdict is of the wrong class.
            ValueError: If the report is for a different number of devices.

        Examples:
            >>> from elche_jax.cadence import FixedTotal
            >>> report = WindowReport((6.0, 2.0), (2, 2), sync_ms=0.1)
            >>> FixedTotal(4).update(FixedTotal(4).init(2), report).counts
            (1, 3)
        """
        where = f"{type(self).__name__}.update"
        check.instance(where, "report", report, WindowReport)
        check.instance(where, "verdict", verdict, Verdict)
        # reading the counts also raises an error if a replay is over
        check.per_device(where, "report", len(report.counts), len(state.counts))
        return self._next(state, report, verdict)

    @abstractmethod
    def _first(self, world_size: int) -> S:
        """Return the state before the first window."""

    @abstractmethod
    def _next(self, state: S, report: WindowReport, verdict: Verdict) -> S:
        """Return the state for the next window."""


@dataclass(frozen=True)
class ConstantTotal(CheckedCadence[S]):
    """Base of the cadences whose windows all have the same number of microbatches.

    Attributes:
        total: Microbatches per window over all devices, at least 1.
    """

    total: int = field(metadata={"low": 1, "high": MAX_TOTAL})

    def check_state(self, state: S) -> None:
        """Raise ``ValueError`` if a stored state has a different total."""
        if sum(state.counts) != self.total:
            where = f"{type(self).__name__}.check_state"
            rule = f"share out {self.total} microbatches"
            todo = "Start without the stored state."
            raise ValueError(check.message(where, "state", rule, sum(state.counts), todo))
