"""Runs read from their timelines, with windows and events on one time axis."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from os import PathLike
from typing import Any, TypeVar, cast

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement
from elche_jax.observe.events import (
    AnchorEvent,
    CompileEvent,
    EpochEvent,
    EvaluationEvent,
    Event,
    LossEvent,
    RunEvent,
    SkipEvent,
    WindowEvent,
)
from elche_jax.observe.report import RunReport, busy_ms, make_report
from elche_jax.observe.timeline import TIMELINE, Timeline

LEFT_OUT = "left out: "
"""Prefix of a `SkipEvent`'s reason if an average left a device out."""

LATE = f"{LEFT_OUT}late"
"""The reason if the device was late."""

_Kind = TypeVar("_Kind", bound=Event)


@dataclass(frozen=True, slots=True)
class PlacedWindow:
    """A window and its place on the run's time axis, in seconds.

    Windows do not overlap: `begin` is never before the `end` of the previous window.

    Attributes:
        record: The measured window.
        segment: Index of its segment.
        begin: Start time: `wall_ms` before its end, or the longest `busy_ms` if that is more.
            Gaps between windows are time that the loop spent on other things.
        end: End time: when it was reported, or earlier if the next window began earlier.
    """

    record: WindowEvent
    segment: int
    begin: float
    end: float

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Busy time per device; a single device is busy all the time."""
        return busy_ms(self.record)


@dataclass(frozen=True)
class Run:
    """A run as read from its timeline; the `at` of its events is on the run's time axis.

    Attributes:
        name: Name of the folder or of the file.
        segments: The event that begins each segment, oldest first. A segment is the work of
            one process on one set of devices. Device names are unique: duplicates are
            prefixed with their rank. A segment whose beginning was not recorded has an event
            with an empty cadence and zeros.
        windows: All windows, including those repeated after a kill.
        events: All other events, oldest first.
        seconds: End of the time axis, which begins at 0.
    """

    name: str
    segments: list[RunEvent]
    windows: list[PlacedWindow]
    events: list[Event]
    seconds: float

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the events of a class, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[LossEvent]:
        """Losses of windows, oldest first."""
        return self.of(LossEvent)

    @property
    def evaluations(self) -> list[EvaluationEvent]:
        """Evaluations, oldest first."""
        return self.of(EvaluationEvent)

    @property
    def epochs(self) -> list[EpochEvent]:
        """Finished epochs, oldest first."""
        return self.of(EpochEvent)

    @property
    def skips(self) -> list[SkipEvent]:
        """Updates that were dropped and averages that left a device out, oldest first."""
        return self.of(SkipEvent)

    @property
    def anchor_steps(self) -> list[tuple[float, int]]:
        """The anchor over time, as pairs of start time and anchor; empty if never recorded."""
        steps: list[tuple[float, int]] = []
        begin = None  # of a segment without a step so far
        for event in sorted([*self.segments, *self.of(AnchorEvent)], key=attrgetter("at")):
            if isinstance(event, RunEvent):
                begin = event.at
                continue
            if begin is not None:  # only changes are recorded: it began with the old anchor
                steps.append((begin, event.before))
                begin = None
            steps.append((event.at, event.anchor))
        return steps

    @property
    def repeated(self) -> int:
        """Number of windows that were repeated because a kill had lost their result.

        A segment that begins with window 0 is a new training and repeats nothing. Windows of an
        older segment in between belong to another training step.
        """
        repeated, segment = 0, -1
        seen: set[int] = set()
        for window in self.windows:
            number = window.record.window
            if window.segment < segment:
                continue
            if window.segment > segment:
                segment = window.segment
                if number == 0:
                    seen = set()
            repeated += number in seen
            seen.add(number)
        return repeated

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the last segment's devices."""
        return self.segments[-1].devices if self.segments else ()

    @property
    def latest(self) -> list[PlacedWindow]:
        """The windows on the run's last set of devices, which a report covers."""
        first = len(self.segments)
        while first and self.segments[first - 1].devices == self.devices:
            first -= 1
        return [window for window in self.windows if window.segment >= first]

    def report(self) -> RunReport:
        """Return a report over the `latest` windows and all compilations and skips.

        The counts are those of the last window that was not cut short by the end of an epoch.
        A window whose average left out a late device is not a skip, as nothing was dropped.
        """
        records = [window.record for window in self.latest]
        compiles = self.of(CompileEvent)
        last = self.segments[-1] if self.segments else None
        return make_report(
            records,
            self.devices,
            _planned_counts(records) if records else (0,) * len(self.devices),
            {
                "misses": sum(not event.ahead for event in compiles),
                "ahead": sum(event.ahead for event in compiles),
                "seconds": sum(event.seconds for event in compiles),
            },
            skipped=sum(skip.reason != LATE for skip in self.skips),
            exchange_bytes=last.exchange_bytes if last else 0,
            frozen_bytes=last.frozen_bytes if last else 0,
        )


def read_run(path: str | PathLike[str]) -> Run:
    """Read a run from its timeline.

    Processes that continued a timeline are placed one after another. The time between them is
    unknown and omitted.

    Args:
        path: A timeline, or the folder of a run that contains a `timeline.jsonl`.

    Returns:
        The run. If no `RunEvent` has as many devices as a window, as with windows that your
        own loop reports, the devices are called `device 0`, `device 1`, ...

    Raises:
        TypeError: `path` is not a path.
        ValueError: A line is not an event; `path` is empty or contains a null byte.
        OSError: The timeline cannot be read.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.run import read_run
        >>> from elche_jax.observe.timeline import Timeline
        >>> path = Path(tempfile.mkdtemp(), "timeline.jsonl")
        >>> with Timeline(path) as timeline:
        ...     timeline.window(WindowRecord(0, 0, (4, 2), 60, (40.0, 40.0), 80.0, 1.0, 0.0, True))
        >>> run = read_run(path)
        >>> run.devices, run.report().limit_share
        (('device 0', 'device 1'), 0.5)
    """
    path = check.path("read_run", "path", path)
    file = path / TIMELINE if path.is_dir() else path
    name = path.resolve().name if path.is_dir() else path.stem
    # one per process in files of older versions, whose times begin at 0 in each process
    clocks: list[list[Event]] = []
    for event in Timeline.read(file):
        if not clocks or event.at < clocks[-1][-1].at:
            clocks.append([])
        clocks[-1].append(event)
    run = Run(name, [], [], [], 0.0)
    for events in clocks:
        run = _append(run, events)
    return run


def _append(run: Run, events: Sequence[Event]) -> Run:
    """Return the run with the events of one more clock appended.

    A loss is placed at its window: a trainer reads and reports the losses of several windows at
    once.
    """
    places = _places([event for event in events if isinstance(event, WindowEvent)])
    # The first windows may begin before 0, as measured lengths are kept: shift the clock.
    zero = run.seconds - min(0.0, places[0][0] if places else 0.0)
    place = iter(places)
    # Alternating steps, as of a generator and its critic, are told apart by number of devices.
    newest: dict[int, int] = {}  # the segment on this clock, by number of devices
    unnamed: set[int] = set()  # those that no `RunEvent` began
    others: list[Event] = []
    reported: dict[int, float] = {}  # the time of each window's report
    for event in events:
        at = zero + event.at
        if isinstance(event, WindowEvent):
            reported[event.window] = at
            begin, end = (zero + moment for moment in next(place))
            devices = len(event.counts)
            if devices not in newest or (event.window == 0 and devices in unnamed):
                unnamed.add(devices)
                newest[devices] = len(run.segments)
                names = tuple(f"device {rank}" for rank in range(devices))
                run.segments.append(RunEvent(names, "", 0.0, event.window, 0, 0, begin))
            run.windows.append(PlacedWindow(event, newest[devices], begin, end))
            continue
        if isinstance(event, RunEvent):
            newest[len(event.devices)] = len(run.segments)
            unnamed.discard(len(event.devices))
            run.segments.append(replace(event, devices=_unique(event.devices), at=at))
        elif isinstance(event, LossEvent):
            at = reported.pop(event.window, at)
        others.append(replace(cast(Any, event), at=at))
    run.events.extend(sorted(others, key=attrgetter("at")))
    return replace(run, seconds=max([run.seconds, *(zero + event.at for event in events)]))


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return unique device names, prefixed with their ranks if two are the same."""
    if len(set(names)) == len(names):
        return names
    return tuple(f"{rank}: {name}" for rank, name in enumerate(names))


def _planned_counts(records: Sequence[WindowMeasurement]) -> tuple[int, ...]:
    """Return the counts of the last window that does not end its epoch, or of the last one."""
    for record, following in zip(records[-2::-1], records[:0:-1], strict=True):
        if record.epoch == following.epoch:
            return record.counts
    return records[-1].counts


def _places(windows: Sequence[WindowEvent]) -> list[tuple[float, float]]:
    """Return begin and end of each window in seconds, as late as order and reports allow.

    A window is reported when it ends or later, and cannot overlap the next one:

        end[i] = min(at[i], begin[i + 1])        begin[i] = end[i] - length[i]
    """
    places: list[tuple[float, float]] = []
    end = float("inf")
    for window in reversed(windows):
        end = min(window.at, end)
        begin = end - max(0.0, window.wall_ms, *window.busy_ms) / 1e3
        places.append((begin, end))
        end = begin
    return places[::-1]
