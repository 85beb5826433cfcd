"""A run read back from its timeline: windows and events on one time axis."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from os import PathLike
from typing import Any, TypeVar, cast

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
from elche_jax.observe.paths import given_path
from elche_jax.observe.report import RunReport, make_report
from elche_jax.observe.timeline import TIMELINE, Timeline

LEFT_OUT = "left out: "
"""How the reason of a `SkipEvent` begins if an average was taken without a device."""

LATE = f"{LEFT_OUT}late"
"""The reason if the device was too late."""

_Kind = TypeVar("_Kind", bound=Event)


@dataclass(frozen=True, slots=True)
class PlacedWindow:
    """A window and its place on the run's time axis, in seconds.

    Windows follow one another: `begin` is never before the `end` of the one before.

    Attributes:
        record: What was measured.
        segment: Index of its segment.
        begin: When it began: `wall_ms` before its end, or the longest `busy_ms` if that is
            more. Between two windows is the time that the loop spent on other things.
        end: When it was over: when it was reported, or earlier if the next one began earlier.
    """

    record: WindowEvent
    segment: int
    begin: float
    end: float

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Busy time per device; a single device is busy all the time."""
        return self.record.busy_ms or (self.record.wall_ms,)


@dataclass(frozen=True)
class Run:
    """A run as read from its timeline; the `at` of its events is on the run's time axis.

    Attributes:
        name: Name of the folder, or of the file.
        segments: The event with which each part of the run begins, oldest first; a part is
            what one process did on one set of devices. Names of devices are unique: those
            that were not have their rank in front. A part whose beginning was not recorded
            has an event without a cadence, and zeros.
        windows: All windows, including those that were done again after a kill.
        events: All other events, oldest first.
        seconds: End of the time axis, which begins at 0.
    """

    name: str
    segments: list[RunEvent]
    windows: list[PlacedWindow]
    events: list[Event]
    seconds: float

    def of(self, kind: type[_Kind]) -> list[_Kind]:
        """The events of a kind, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def losses(self) -> list[LossEvent]:
        """Losses of windows."""
        return self.of(LossEvent)

    @property
    def evaluations(self) -> list[EvaluationEvent]:
        """Evaluations."""
        return self.of(EvaluationEvent)

    @property
    def epochs(self) -> list[EpochEvent]:
        """Epochs that are over."""
        return self.of(EpochEvent)

    @property
    def skips(self) -> list[SkipEvent]:
        """Updates that were dropped, and averages that were taken without a device."""
        return self.of(SkipEvent)

    @property
    def anchor_steps(self) -> list[tuple[float, int]]:
        """The anchor over time, each with the seconds since when; empty if none was recorded."""
        steps: list[tuple[float, int]] = []
        begins = [segment.at for segment in self.segments]
        last = 0  # segments that have a step
        for event in self.of(AnchorEvent):
            segment = bisect_right(begins, event.at)
            if segment > last:
                steps.append((begins[segment - 1], event.before))
                last = segment
            steps.append((event.at, event.anchor))
        return steps

    @property
    def repeated(self) -> int:
        """Number of windows that were done again, as a kill had lost their result.

        A segment that begins with window 0 continues nothing, and is counted on its own. So
        are windows of an older segment that come in between.
        """
        again, segment = 0, -1
        seen: set[int] = set()
        for window in self.windows:
            number = window.record.window
            if window.segment < segment:
                continue
            if window.segment > segment:
                segment = window.segment
                seen = seen if number else set()
            again += number in seen
            seen.add(number)
        return again

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the last segment's devices."""
        return self.segments[-1].devices if self.segments else ()

    @property
    def latest(self) -> list[PlacedWindow]:
        """The windows on the devices that the run had last: those that a report can cover."""
        first = len(self.segments)
        while first and self.segments[first - 1].devices == self.devices:
            first -= 1
        return [window for window in self.windows if window.segment >= first]

    def report(self) -> RunReport:
        """The run's report over its `latest` windows, and all of its compiles and skips.

        The counts are those of the last window that no end of an epoch cut short. A window
        that was averaged without a late device is not among the skips: it dropped nothing.
        """
        records = [window.record for window in self.latest]
        compiles = self.of(CompileEvent)
        last = self.segments[-1] if self.segments else None
        return make_report(
            records,
            self.devices,
            _uncut(records) if records else (0,) * len(self.devices),
            {
                "hits": 0,  # no event: they cost nothing
                "misses": sum(not event.ahead for event in compiles),
                "ahead": sum(event.ahead for event in compiles),
                "seconds": sum(event.seconds for event in compiles),
            },
            skipped=sum(skip.reason != LATE for skip in self.skips),
            exchange_bytes=last.exchange_bytes if last else 0,
            frozen_bytes=last.frozen_bytes if last else 0,
        )


def read_run(path: str | PathLike[str]) -> Run:
    """Reads a run from its timeline.

    In a timeline that several processes have continued, times begin at 0 with each of them;
    here they follow one another. The time between two processes is unknown, and left out.

    Args:
        path: A timeline, or the folder of a run, with a `timeline.jsonl` in it.

    Returns:
        The run. If no `RunEvent` names as many devices as a window has, as in a loop of your
        own, they are called `device 0`, `device 1`, ...

    Raises:
        TypeError: `path` is no path.
        ValueError: A line is no event; `path` is empty or has a null byte in it.
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
    path = given_path("read_run", "path", path)
    file = path / TIMELINE if path.is_dir() else path
    name = path.resolve().name if path.is_dir() else path.stem
    run = Run(name, [], [], [], 0.0)
    for _, clock in groupby(_with_clock(Timeline.read(file)), key=lambda pair: pair[0]):
        run = _extended(run, [event for _, event in clock])
    return run


def _with_clock(events: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """Each event with the number of its clock: there is a new one whenever `at` goes back."""
    clock, last = 0, 0.0
    for event in events:
        clock, last = clock + (event.at < last), event.at
        yield clock, event


def _extended(run: Run, events: Sequence[Event]) -> Run:
    """The run with the events of one more clock, all after what is there.

    A loss is reported when it is read, which a trainer does for several windows at once; it
    is placed at its window.
    """
    places = _places([event for event in events if isinstance(event, WindowEvent)])
    zero = run.seconds - min(0.0, places[0][0] if places else 0.0)
    place = iter(places)
    newest: dict[int, int] = {}  # by number of devices, the segment on this clock
    others: list[Event] = []
    over: dict[int, float] = {}  # by window, when it was reported
    for event in events:
        at = zero + event.at
        if isinstance(event, WindowEvent):
            over[event.window] = at
            begin, end = (zero + moment for moment in next(place))
            devices = len(event.counts)
            if devices not in newest:
                newest[devices] = len(run.segments)
                names = tuple(f"device {rank}" for rank in range(devices))
                run.segments.append(RunEvent(names, "", 0.0, event.window, 0, 0, begin))
            run.windows.append(PlacedWindow(event, newest[devices], begin, end))
            continue
        if isinstance(event, RunEvent):
            newest[len(event.devices)] = len(run.segments)
            run.segments.append(replace(event, devices=_apart(event.devices), at=at))
        elif isinstance(event, LossEvent):
            at = over.pop(event.window, at)
        others.append(replace(cast(Any, event), at=at))
    run.events.extend(sorted(others, key=attrgetter("at")))
    return replace(run, seconds=max([run.seconds, *(zero + event.at for event in events)]))


def _apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """Unique names of devices: with their ranks if two are the same."""
    if len(set(names)) == len(names):
        return names
    return tuple(f"{rank}: {name}" for rank, name in enumerate(names))


def _uncut(records: Sequence[WindowMeasurement]) -> tuple[int, ...]:
    """Counts of the last window that is not the last of its epoch; if none, of the last."""
    for record, following in zip(records[-2::-1], records[:0:-1], strict=True):
        if record.epoch == following.epoch:
            return record.counts
    return records[-1].counts


def _places(windows: Sequence[WindowEvent]) -> list[tuple[float, float]]:
    """Begin and end of windows in seconds: as late as order and the reports allow.

    A window is reported when it is over or later, and its `wall_ms` begins at the end of the
    window before:

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
