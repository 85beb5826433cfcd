"""The events of a run, as a timeline records and stores them.

To add a kind of event, derive a dataclass of numbers, strings and tuples of these from `Event`
and enter it in `EVENTS`. Its last field is `at`, which the timeline fills in.

Busy times, the cost of the synchronisation and the skew (how far apart the devices arrived at
it) have no events of their own: they are fields of `WindowEvent`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, Self, cast

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement


def _plain(kind: type, where: str, name: str, value: object) -> Any:
    """Return a value of the given type, unwrapped if it is a NumPy scalar."""
    value = value.item() if isinstance(value, np.generic) else value
    check.instance(where, name, value, kind)
    return value


def strings(where: str, name: str, values: object) -> tuple[str, ...]:
    """Return a sequence of strings as a tuple of plain ones."""
    entries = check.items(where, name, values, "strings")
    return tuple(_plain(str, where, f"{name}[{at}]", entry) for at, entry in enumerate(entries))


# The types that an event's fields may have, and the functions that check and convert values.
FIELDS: Final[Mapping[Any, Callable[[str, str, object], Any]]] = {
    bool: partial(_plain, bool),
    str: partial(_plain, str),
    int: check.integer,
    float: check.real,
    tuple[int, ...]: check.integers,
    tuple[float, ...]: check.reals,
    tuple[str, ...]: strings,
}


class Event:
    """Base class of the events.

    Attributes:
        at: Seconds since the timeline was opened.
    """

    __slots__ = ()

    at: float

    def validate(self) -> Self:
        """Convert the values, which come from a user or a file, to plain Python ones.

        Returns:
            The event itself.

        Raises:
            TypeError: A value does not have its field's type.
            ValueError: A number is not finite, or two fields differ in length.
        """
        where = type(self).__name__
        for field in fields(cast(Any, self)):
            value = FIELDS[field.type](where, field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)  # the events are frozen
        return self


class _Metrics(Event):
    """An event with named values."""

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
        """The values by name."""
        return dict(zip(self.names, self.values, strict=True))


@dataclass(frozen=True, slots=True)
class _OfWindow:
    """The window that an event belongs to."""

    window: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RunEvent(Event):
    """The start or resumption of a run, which begins a segment of the file.

    Attributes:
        devices: Names of the devices, in rank order.
        cadence: The `repr` of the cadence.
        overhead_target: Share of a window that synchronisation may cost; 0 if the cadence
            has no such target.
        windows: Number of the first window.
        exchange_bytes: Bytes that each device exchanges per window, with nothing left out on
            the wire; 0 with one device.
        frozen_bytes: Bytes that frozen parameters would add to it.
        at: Seconds since the timeline was opened. A process that continues the file goes on
            with the time of its last event.
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
    """A finished window: its measurement, which e.g. `plot_run` takes, and the time.

    Attributes:
        at: Seconds since the timeline was opened, when it was reported.
    """

    at: float

    def validate(self) -> Self:
        # Not `super()`, which would look for the class that `slots=True` has replaced.
        Event.validate(self)
        devices = len(self.counts)
        if self.busy_ms or devices > 1:  # a single device may leave it empty
            check.per_device("WindowEvent", "busy_ms", len(self.busy_ms), devices)
        return self


@dataclass(frozen=True, slots=True)
class SkipEvent(_OfWindow, Event):
    """An update that was dropped, or an average that left a device out.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        reason: The reason.
        at: Seconds since the timeline was opened, when it was reported.
    """

    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class VerdictEvent(_OfWindow, Event):
    """A guard's verdict: every `"nudge_down"`, and every change of verdict.

    Attributes:
        window: Number of the window after which it was given.
        epoch: Its epoch.
        action: `"stable"`, `"hold_growth"` or `"nudge_down"`.
        factor: Factor for the anchor; 1 except for `"nudge_down"`.
        at: Seconds since the timeline was opened, when it was reported.
    """

    action: str
    factor: float
    at: float


@dataclass(frozen=True, slots=True)
class CompileEvent(Event):
    """A finished compilation.

    Attributes:
        program: The program: "accumulate", "combine", "window", ...
        seconds: Duration.
        ahead: Whether it ran in the background, so that training did not wait for it.
        at: Seconds since the timeline was opened, when the program was ready.
    """

    program: str
    seconds: float
    ahead: bool
    at: float


@dataclass(frozen=True, slots=True)
class AnchorEvent(_OfWindow, Event):
    """A change of the anchor.

    Attributes:
        window: Number of the window after which it changed.
        epoch: Its epoch.
        before: The old anchor.
        anchor: The new anchor.
        at: Seconds since the timeline was opened, when it was reported.
    """

    before: int
    anchor: int
    at: float


@dataclass(frozen=True, slots=True)
class LossEvent(_OfWindow, Event):
    """The loss of a window, if finite; otherwise the window has a `SkipEvent`.

    Attributes:
        window: Number of the window in the run.
        epoch: Its epoch.
        loss: Mean loss over the window's data.
        at: Seconds since the timeline was opened, when it was read. A trainer reads several
            losses at once, when its loop has reached a later window.
    """

    loss: float
    at: float


@dataclass(frozen=True, slots=True)
class EvaluationEvent(_OfWindow, _Metrics):
    """A finished evaluation.

    Attributes:
        window: Number of the last window before it.
        epoch: Its epoch.
        seconds: Duration.
        names: Names of the metrics.
        values: The metrics, in the order of the names; all finite.
        at: Seconds since the timeline was opened, when it ended.
    """

    seconds: float
    names: tuple[str, ...]
    values: tuple[float, ...]
    at: float


@dataclass(frozen=True, slots=True)
class CheckpointEvent(_OfWindow, Event):
    """A checkpoint that was written to disk.

    Attributes:
        window: Number of the last window in it.
        epoch: Its epoch.
        seconds: How long saving took.
        size: Its size in bytes.
        path: Its path in the folder of the checkpoints: the number of windows trained.
        at: Seconds since the timeline was opened, when it was complete.
    """

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
        windows: Number of its windows.
        examples: Valid examples trained on.
        seconds: Duration.
        names: Names of its metrics, including `"loss"`.
        values: The metrics, in the order of the names; only finite ones.
        at: Seconds since the timeline was opened, when it ended.
    """

    epoch: int
    window: int
    windows: int
    examples: int
    seconds: float
    names: tuple[str, ...]
    values: tuple[float, ...]
    at: float


def values_of(event: Event) -> dict[str, Any]:
    """Return the values of an event's fields by name, `at` last."""
    return {field.name: getattr(event, field.name) for field in fields(cast(Any, event))}


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
"""Event classes by their names in a file."""

NAMES: Final[Mapping[type[Event], str]] = {kind: name for name, kind in EVENTS.items()}
"""Names in a file by event class."""
