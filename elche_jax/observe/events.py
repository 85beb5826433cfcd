"""The events of a run, as a timeline records them and its file holds them.

To add a kind of event, derive a dataclass of numbers, strings and tuples of them from `Event`,
and enter it in `EVENTS`. Its last field is `at`, which the timeline fills in.

How long a window's devices were busy, what its synchronisation cost and how far apart the
devices arrived at it (the skew) are fields of the window's own event, `WindowEvent`; they
have no events of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Self, cast

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement


def _plain(kind: type, where: str, name: str, value: object) -> Any:
    """Return a value of the given type as a plain one; any other is an error."""
    value = value.item() if isinstance(value, np.generic) else value
    check.instance(where, name, value, kind)
    return value


def _strings(where: str, name: str, values: object) -> tuple[str, ...]:
    entries = check.items(where, name, values, "strings")
    return tuple(_plain(str, where, f"{name}[{at}]", entry) for at, entry in enumerate(entries))


# The types that fields of an event may have, and how their values are checked and made plain.
FIELDS: Final[Mapping[Any, Callable[[str, str, object], Any]]] = {
    bool: partial(_plain, bool),
    str: partial(_plain, str),
    int: check.integer,
    float: check.real,
    tuple[int, ...]: check.integers,
    tuple[float, ...]: check.reals,
    tuple[str, ...]: _strings,
}


class Event:
    """Base of the events.

    Attributes:
        at: Seconds since the timeline began.
    """

    __slots__ = ()

    at: float

    def validate(self) -> Self:
        """Returns the event with plain Python values: a caller, or some file, gave them.

        Raises:
            TypeError: A value is not of its field's type.
            ValueError: A number is not finite.
        """
        where = type(self).__name__
        for field in fields(cast(Any, self)):
            value = FIELDS[field.type](where, field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        return self


class _Metrics(Event):
    """An event with `names` and the `values` they have."""

    __slots__ = ()

    names: tuple[str, ...]
    values: tuple[float, ...]

    def validate(self) -> Self:
        Event.validate(self)
        if len(self.names) != len(self.values):
            rule = f"have one entry per name ({len(self.names)})"
            raise ValueError(check.message(type(self).__name__, "values", rule, len(self.values)))
        return self

    @property
    def metrics(self) -> dict[str, float]:
        """The values by their names."""
        return dict(zip(self.names, self.values, strict=True))


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    """A run begins or is resumed: what follows is one segment of the file.

    Attributes:
        devices: Names of the devices, in rank order.
        cadence: What sizes the windows, as it prints.
        overhead_target: Share of a window that synchronising may cost; 0 if the cadence has
            no such target.
        windows: Number of the first window.
        exchange_bytes: Bytes that each device has to exchange in a window, before any are
            left out on the wire; 0 with one device.
        frozen_bytes: Bytes that frozen parameters would add to it.
        at: Seconds since the timeline began; if another process continues the file, they
            begin at 0 again.
    """

    devices: tuple[str, ...]
    cadence: str
    overhead_target: float
    windows: int
    exchange_bytes: int
    frozen_bytes: int
    at: float


@dataclass(frozen=True, slots=True)
class WindowEvent(WindowMeasurement, Event):
    """A finished window: its record, which `plot_run` and the like take, and its time.

    Attributes:
        at: Seconds since the timeline began, at which it was reported.
    """

    at: float

    def validate(self) -> Self:
        Event.validate(self)
        devices = len(self.counts)
        if self.busy_ms or devices > 1:
            check.per_device("WindowEvent", "busy_ms", len(self.busy_ms), devices)
        return self


@dataclass(frozen=True, slots=True)
class SkipEvent(Event):
    """An update that was dropped, or an average that was taken without a device.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        reason: Why.
        at: Seconds since the timeline began, at which it was reported.
    """

    window: int
    epoch: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class VerdictEvent(Event):
    """What a guard's verdict told the cadence: every *nudge down*, and every change.

    Attributes:
        window: Number of the window after which it was given.
        epoch: Its epoch.
        action: `"stable"`, `"hold_growth"` or `"nudge_down"`.
        factor: What the anchor was to be multiplied by; 1 except for `"nudge_down"`.
        at: Seconds since the timeline began, at which it was reported.
    """

    window: int
    epoch: int
    action: str
    factor: float
    at: float


@dataclass(frozen=True, slots=True)
class CompileEvent(Event):
    """A program that was compiled.

    Attributes:
        program: Which one: "accumulate", "combine", "window", ...
        seconds: How long it took.
        ahead: Whether that was in the background, so that training did not wait for it.
        at: Seconds since the timeline began, at which it was ready.
    """

    program: str
    seconds: float
    ahead: bool
    at: float


@dataclass(frozen=True, slots=True)
class AnchorEvent(Event):
    """The anchor changed.

    Attributes:
        window: Number of the window after which it changed.
        epoch: Its epoch.
        before: The anchor until then.
        anchor: The anchor from then on.
        at: Seconds since the timeline began, at which it was reported.
    """

    window: int
    epoch: int
    before: int
    anchor: int
    at: float


@dataclass(frozen=True, slots=True)
class LossEvent(Event):
    """A window's loss. A loss that is not finite is not recorded: it becomes a `SkipEvent`.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        loss: Mean loss over the window's data.
        at: Seconds since the timeline began, at which it was read. A trainer reads several at
            once, when its loop is already at another window.
    """

    window: int
    epoch: int
    loss: float
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationEvent(_Metrics):
    """A finished evaluation.

    Attributes:
        window: Number of the last window before it.
        epoch: Its epoch.
        seconds: How long it took.
        names: Names of the metrics.
        values: The metrics, in the order of the names; all finite.
        at: Seconds since the timeline began, at which it was over.
    """

    window: int
    epoch: int
    seconds: float
    names: tuple[str, ...]
    values: tuple[float, ...]
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointEvent(Event):
    """A checkpoint that has reached the disk.

    Attributes:
        window: Number of the last window in it.
        epoch: Its epoch.
        seconds: How long saving it took.
        size: Its size in bytes.
        path: Where it is.
        at: Seconds since the timeline began, at which it was complete.
    """

    window: int
    epoch: int
    seconds: float
    size: int
    path: str
    at: float


@dataclass(frozen=True, slots=True)
class EpochEvent(_Metrics):
    """A finished epoch.

    Attributes:
        epoch: Its number.
        window: Number of its last window.
        windows: How many windows it had.
        examples: Valid examples trained on.
        seconds: How long it took.
        names: Names of its metrics, `"loss"` among them.
        values: The metrics, in the order of the names; only finite ones.
        at: Seconds since the timeline began, at which it was over.
    """

    epoch: int
    window: int
    windows: int
    examples: int
    seconds: float
    names: tuple[str, ...]
    values: tuple[float, ...]
    at: float


EVENTS: Final[Mapping[str, type[Event]]] = {
    "run": RunEvent,
    "window": WindowEvent,
    "skip": SkipEvent,
    "verdict": VerdictEvent,
    "compile": CompileEvent,
    "anchor": AnchorEvent,
    "loss": LossEvent,
    "evaluation": EvaluationEvent,
    "checkpoint": CheckpointEvent,
    "epoch": EpochEvent,
}
"""The events by their names in a file."""

NAMES: Final[Mapping[type[Event], str]] = {kind: name for name, kind in EVENTS.items()}
"""The names of the events."""
