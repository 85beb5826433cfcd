"""The numbers that a page plots, thinned out for long runs."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from math import ceil
from operator import attrgetter
from statistics import median, median_low
from textwrap import shorten
from typing import Any, TypeVar

from elche_jax.observe.events import (
    NAMES,
    CheckpointEvent,
    CompileEvent,
    EvaluationEvent,
    Event,
    RunEvent,
    SkipEvent,
    VerdictEvent,
)
from elche_jax.observe.report import RunReport, file_size, limit_share
from elche_jax.observe.run import LEFT_OUT, PlacedWindow, Run

POINTS = 600
"""Most points of a curve; with more windows, a point is the median of several."""

GANTT_NUMBERS = 60_000
"""Most numbers in the plot of single windows, which leaves out older windows."""

MARKS = 400
"""Most marks of a kind; if there are more, the last ones are shown."""

METRICS = 12
"""Most metrics that get a plot."""

_T = TypeVar("_T")


def page_data(run: Run, report: RunReport) -> dict[str, Any]:
    """Return the numbers behind the plots, as the page's script reads them.

    Times are seconds on the run's axis, durations milliseconds; windows are stored by column.
    """
    lanes = _lane_names(run)
    return {
        "seconds": _time(run.seconds),
        "devices": lanes,
        "begins": [_time(segment.at) for segment in run.segments[1:]],
        "target": run.segments[-1].overhead_target if run.segments else 0.0,
        "gantt": _gantt(run, len(lanes)),
        "curves": _curves(run, len(lanes)),
        "anchor": _columns(run.anchor_steps, median_low),  # an integer, like any anchor
        "metrics": _metrics(run),
        "shares": _shares(run, report),
        "marks": _marks(run),
    }


def _lane_names(run: Run) -> list[str]:
    """Return a name for each rank that the run ever had: that of its last device."""
    names: list[str] = []
    for segment in run.segments:
        names = [*segment.devices, *names[len(segment.devices) :]]
    return names


def _time(seconds: float) -> float:
    return round(seconds, 5)


def _short(value: float | None) -> float | None:
    """Round to six digits, more than a plot shows."""
    return None if value is None else float(f"{value:.6g}")


def _gantt(run: Run, lanes: int) -> dict[str, Any]:
    # A window has a busy time and a count per device, and eight other numbers.
    shown = run.windows[-max(50, GANTT_NUMBERS // (2 * lanes + 8)) :]
    records = [window.record for window in shown]
    return {
        "total": len(run.windows),
        "window": [record.window for record in records],
        "epoch": [record.epoch for record in records],
        "begin": [_time(window.begin) for window in shown],
        "ms": [_short((window.end - window.begin) * 1e3) for window in shown],
        "busy": [[_short(ms) for ms in window.busy_ms] for window in shown],
        "counts": [record.counts for record in records],
        "examples": [record.examples for record in records],
        "sync": [_short(record.sync_ms) for record in records],
        "skew": [_short(record.skew_ms) for record in records],
        "steady": [int(record.steady) for record in records],
    }


def _bucket_size(items: Sequence[object]) -> int:
    """Return how many items to merge into one point, for a curve of at most `POINTS`."""
    return max(1, ceil(len(items) / POINTS))


def _buckets(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _columns(
    points: Sequence[tuple[float, float]], middle: Callable[[Iterable[float]], float] = median
) -> dict[str, Any]:
    """Return columns of points over time: the first time and the median of each bucket."""
    buckets = _buckets(points, _bucket_size(points))
    return {
        "t": [_time(bucket[0][0]) for bucket in buckets],
        "v": [_short(middle(value for _, value in bucket)) for bucket in buckets],
    }


def _curves(run: Run, lanes: int) -> dict[str, Any]:
    """Return medians over buckets of windows: counts, share of the limit, overhead."""
    buckets: list[Sequence[PlacedWindow]] = []
    size = _bucket_size(run.windows)
    # A bucket stays within a segment: other segments may have other devices.
    in_segments = sorted(run.windows, key=attrgetter("segment"))
    for _, segment in groupby(in_segments, key=attrgetter("segment")):
        buckets += _buckets(list(segment), size)
    buckets.sort(key=lambda bucket: bucket[0].begin)
    return {
        "bucket": size,
        "t": [_time(bucket[0].begin) for bucket in buckets],
        "window": [bucket[0].record.window for bucket in buckets],
        "counts": [[_count(bucket, rank) for bucket in buckets] for rank in range(lanes)],
        "limit": [_short(_limit(bucket)) for bucket in buckets],
        "overhead": [_short(_overhead(bucket)) for bucket in buckets],
    }


def _count(bucket: Sequence[PlacedWindow], rank: int) -> int | None:
    counts = [window.record.counts for window in bucket]
    return median_low([each[rank] for each in counts]) if rank < len(counts[0]) else None


def _limit(bucket: Sequence[PlacedWindow]) -> float | None:
    return limit_share([window.record for window in bucket if window.record.steady])


def _overhead(bucket: Sequence[PlacedWindow]) -> float | None:
    """Return the median of `sync_ms / max(busy_ms)`, which a cadence compares with its target."""
    steady = [window for window in bucket if window.record.steady and max(window.busy_ms) > 0]
    shares = [window.record.sync_ms / max(window.busy_ms) for window in steady]
    return median(shares) if shares else None


def metric_names(run: Run) -> list[str]:
    """Return the names of all metrics, the loss first."""
    names = ["loss"] if run.losses else []
    names += [name for event in (*run.epochs, *run.evaluations) for name in event.names]
    return list(dict.fromkeys(names))


def _metrics(run: Run) -> list[dict[str, Any]]:
    """Return the values of the first `METRICS` metrics by window, epoch and evaluation."""
    series: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {} for name in metric_names(run)[:METRICS]
    }
    if run.losses:
        series["loss"]["window"] = [(event.at, event.loss) for event in run.losses]
    for label, events in (("epoch", run.epochs), ("evaluation", run.evaluations)):
        for event in events:
            for name in event.metrics.keys() & series.keys():
                series[name].setdefault(label, []).append((event.at, event.metrics[name]))
    return [
        {
            "name": name,
            "series": [{"label": label} | _columns(points) for label, points in lines.items()],
        }
        for name, lines in series.items()
    ]


def _shares(run: Run, report: RunReport) -> list[dict[str, Any]]:
    """Return each device's shares of the steady windows: busy, synchronising and idle; sum 1."""
    records = [window.record for window in run.latest if window.record.steady]
    wall = sum(record.wall_ms for record in records)
    sync = sum(record.sync_ms for record in records) / wall if wall > 0 else 0.0
    shares: list[dict[str, Any]] = []
    for device in report.devices:
        busy = device.busy_share
        exchanging = max(0.0, min(sync, 1 - busy))  # a part may be hidden behind computation
        idle = 1 - busy - exchanging if wall > 0 else 0.0
        parts = {"busy": _short(busy), "sync": _short(exchanging), "idle": _short(idle)}
        shares.append({"name": device.name} | parts)
    return shares


def _marks(run: Run) -> list[dict[str, Any]]:
    """Return events as marks with a text; the last `MARKS` of each kind."""
    marks: list[dict[str, Any]] = []
    for kind, describe in _TEXTS.items():
        events = run.of(kind)
        shown = events[-MARKS:]
        marks.append(
            {
                "kind": NAMES[kind],
                "total": len(events),
                "t": [_time(event.at) for event in shown],
                "text": [describe(event) for event in shown],
            }
        )
    return marks


def _compile(event: CompileEvent) -> str:
    how = "in the background" if event.ahead else "waited for"
    return f"{event.program} compiled in {event.seconds:.2f} s, {how}"


def _verdict(event: VerdictEvent) -> str:
    factor = f" by {event.factor:g}" if event.action == "nudge_down" else ""
    return f"{event.action.replace('_', ' ')}{factor} after window {event.window}"


def _evaluation(event: EvaluationEvent) -> str:
    values = ", ".join(f"{name} {value:.5g}" for name, value in event.metrics.items())
    return f"evaluated after window {event.window} in {event.seconds:.2f} s: {values}"


def _checkpoint(event: CheckpointEvent) -> str:
    size = file_size(event.size)
    return f"window {event.window} saved in {event.seconds:.2f} s, {size}: {event.path}"


def _skip(event: SkipEvent) -> str:
    if event.reason.startswith(LEFT_OUT):
        why = event.reason.removeprefix(LEFT_OUT)
        return f"window {event.window} averaged without a device: {why}"
    return f"update of window {event.window} dropped: {event.reason}"


def _run(event: RunEvent) -> str:
    # a `Replay` has the counts of all windows
    return f"starts or resumes at window {event.windows}, {shorten(event.cadence, 200)}"


_TEXTS: dict[type[Event], Callable[[Any], str]] = {
    RunEvent: _run,
    CompileEvent: _compile,
    EvaluationEvent: _evaluation,
    CheckpointEvent: _checkpoint,
    VerdictEvent: _verdict,
    SkipEvent: _skip,
}
