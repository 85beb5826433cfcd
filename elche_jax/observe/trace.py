"""Traces of runs for Perfetto and Chrome's trace viewer."""

import gzip
import heapq
import json
from collections.abc import Iterator
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast

from elche_jax import _check as check
from elche_jax.observe.atomic import replacing
from elche_jax.observe.events import NAMES, LossEvent, values_of
from elche_jax.observe.run import Run

PROCESS: Final = 1
RUN_TRACK: Final = 1
SYNC_TRACK: Final = 2
FIRST_DEVICE: Final = 3
"""Track of the first device; the others follow."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def write_trace(run: Run, path: str | PathLike[str]) -> Path:
    """Write a run as a trace in the JSON object format of Chrome's trace viewer.

    The trace has a track per device with a bar for its busy time in each window, a track for
    synchronisations, one for other events, and curves of the counts, the anchor and the loss.
    Times are in microseconds.

    At what time within a window a device was busy is not measured: its bar begins with the window,
    and the bar of the synchronisation ends with it.

    Args:
        run: A run from `read_run`.
        path: The file, written completely or not at all; missing folders are created. It is
            compressed if its name ends in `.gz`.

    Returns:
        The path.

    Raises:
        TypeError: `run` is not a `Run`, or `path` not a path.
        ValueError: `path` is empty, a folder, or contains a null byte.
        OSError: The file cannot be written.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.run import read_run
        >>> from elche_jax.observe.timeline import Timeline
        >>> from elche_jax.observe.trace import write_trace
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Timeline(folder / "timeline.jsonl") as timeline:
        ...     timeline.window(WindowRecord(0, 0, (4, 2), 60, (40.0, 36.0), 50.0, 1.0, 0.0, True))
        >>> trace = json.loads(write_trace(read_run(folder), folder / "trace.json").read_text())
        >>> [event["dur"] for event in trace["traceEvents"] if event["name"] == "window 0"]
        [40000.0, 36000.0]
    """
    check.instance("write_trace", "run", run, Run)
    path = check.file("write_trace", "path", path, "trace.json.gz")
    tracks = _device_tracks(run)
    losses = (_event("C", event.at, "loss", {"loss": event.loss}) for event in run.losses)
    anchors = (_event("C", at, "anchor", {"anchor": anchor}) for at, anchor in run.anchor_steps)
    streams = [_bars(run, tracks), _instants(run), losses, anchors]
    # Each stream is in order of time. Merged lazily, as a long run has millions of events.
    events = heapq.merge(*streams, key=lambda event: event["ts"])
    with replacing(path) as file:
        packed = (
            # Without a file name and time, so that the same run gives the same bytes.
            gzip.GzipFile("", "wb", fileobj=file, mtime=0) if path.suffix == ".gz" else None
        )
        with cast(Any, packed or nullcontext(file)) as out:
            out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            out.write(",\n".join(map(_encode, _metadata(run, tracks))).encode())
            for event in events:
                out.write(b",\n" + _encode(event).encode())
            out.write(b"\n]}\n")
    return path


def _device_tracks(run: Run) -> dict[tuple[int, str], int]:
    """Return the track of each device that the run ever had, by rank and name."""
    tracks: dict[tuple[int, str], int] = {}
    for segment in run.segments:
        for device in enumerate(segment.devices):
            tracks.setdefault(device, FIRST_DEVICE + len(tracks))
    return tracks


def _metadata(run: Run, tracks: dict[tuple[int, str], int]) -> list[dict[str, Any]]:
    named = [(RUN_TRACK, "run"), (SYNC_TRACK, "synchronisation")]
    named += [(track, name) for (_, name), track in tracks.items()]
    events = [_event("M", 0, "process_name", {"name": run.name}, RUN_TRACK)]
    for track, name in named:
        events.append(_event("M", 0, "thread_name", {"name": name}, track))
        events.append(_event("M", 0, "thread_sort_index", {"sort_index": track}, track))
    return events


def _event(
    phase: str, at: float, name: str, args: dict[str, Any], track: int | None = None
) -> dict[str, Any]:
    """Return an event at a time in seconds; points of curves have no track."""
    event = {"ph": phase, "ts": _ns(at) / 1e3, "pid": PROCESS, "name": name, "args": args}
    return event if track is None else event | {"tid": track}


def _ns(seconds: float) -> int:
    """Round to nanoseconds, the resolution of viewers, in which bars must not overlap."""
    return round(seconds * 1e9)


def _bar(name: str, track: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return _event("X", begin, name, args, track) | {"dur": (_ns(end) - _ns(begin)) / 1e3}


def _bars(run: Run, tracks: dict[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    """Yield changes of the counts, busy times and synchronisations, in order of time."""
    last: dict[str, int] = {}
    for window in run.windows:
        record, devices = window.record, run.segments[window.segment].devices
        counts = dict(zip(devices, record.counts, strict=True))
        if counts != last:
            yield _event("C", window.begin, "counts", counts)
            last = counts
        # Due to measurement errors, busy times and costs may exceed the window or be below 0.
        for rank, name in enumerate(devices):
            end = min(window.end, window.begin + max(0.0, window.busy_ms[rank]) / 1e3)
            args = {"count": counts[name], "examples": record.examples, "epoch": record.epoch}
            track = tracks[rank, name]
            yield _bar(f"window {record.window}", track, window.begin, end, args)
        begin = max(window.begin, window.end - max(0.0, record.sync_ms) / 1e3)
        args = {"window": record.window, "cost_ms": record.sync_ms, "skew_ms": record.skew_ms}
        yield _bar("synchronisation", SYNC_TRACK, begin, window.end, args)


def _instants(run: Run) -> Iterator[dict[str, Any]]:
    """Yield all events that are neither bars nor curves."""
    for event in run.events:
        if not isinstance(event, LossEvent):
            values = values_of(event)
            at = values.pop("at")
            yield _event("i", at, NAMES[type(event)], values, RUN_TRACK) | {"s": "t"}
