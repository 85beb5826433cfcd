"""A run as a trace for Perfetto and Chrome."""

import gzip
import heapq
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Final, cast

from elche_jax import _check as check
from elche_jax.observe.atomic import replacing
from elche_jax.observe.events import NAMES, LossEvent
from elche_jax.observe.paths import given_file
from elche_jax.observe.run import PlacedWindow, Run

PROCESS: Final = 1
RUN_TRACK: Final = 1
SYNC_TRACK: Final = 2
FIRST_DEVICE: Final = 3
"""Number of the first device's track."""

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def write_trace(run: Run, path: str | PathLike[str]) -> Path:
    """Writes a run as a trace in the JSON object format of Chrome's trace viewer.

    There is a track per device with a bar for its busy time in each window, a track for the
    synchronisations and one for other events, and curves of the counts, the anchor and the
    loss. Times are microseconds.

    At which moments of a window a device was busy is not measured: a bar begins with the
    window, and the synchronisation ends with it.

    Args:
        run: What `read_run` returned.
        path: The file, written completely or not at all; missing folders are made. If its
            name ends in `.gz`, it is compressed.

    Returns:
        The path.

    Raises:
        TypeError: `run` is no `Run`, or `path` no path.
        ValueError: `path` is empty, a folder, or has a null byte in it.
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
    path = given_file("write_trace", "path", path, "trace.json.gz")
    tracks = _device_tracks(run)
    streams = [_bars(run, tracks), _instants(run), _losses(run), _anchors(run)]
    events = heapq.merge(*streams, key=lambda event: event["ts"])
    with replacing(path) as file:
        packed = (
            # Without name and time of the file, so that the same run gives the same bytes.
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
    """The track of each device that the run has had, by rank and name."""
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
    """An event at a time in seconds; curves have no track."""
    event = {"ph": phase, "ts": _ns(at) / 1e3, "pid": PROCESS, "name": name, "args": args}
    return event if track is None else event | {"tid": track}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, the resolution of viewers, so that bars do not overlap there."""
    return round(seconds * 1e9)


def _bar(name: str, track: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return _event("X", begin, name, args, track) | {"dur": (_ns(end) - _ns(begin)) / 1e3}


def _bars(run: Run, tracks: dict[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    """Changes of the counts, busy times and synchronisations, in the order of time."""
    shown: dict[str, int] = {}
    for window in run.windows:
        record, devices = window.record, run.segments[window.segment].devices
        counts = dict(zip(devices, record.counts, strict=True))
        if counts != shown:
            yield _event("C", window.begin, "counts", counts)
            shown = counts
        for rank, name in enumerate(devices):
            yield _busy_bar(window, rank, tracks[rank, name])
        begin = max(window.begin, window.end - max(0.0, record.sync_ms) / 1e3)
        args = {"window": record.window, "cost_ms": record.sync_ms, "skew_ms": record.skew_ms}
        yield _bar("synchronisation", SYNC_TRACK, begin, window.end, args)


def _busy_bar(window: PlacedWindow, rank: int, track: int) -> dict[str, Any]:
    record = window.record
    end = min(window.end, window.begin + max(0.0, window.busy_ms[rank]) / 1e3)
    args = {"count": record.counts[rank], "examples": record.examples, "epoch": record.epoch}
    return _bar(f"window {record.window}", track, window.begin, end, args)


def _instants(run: Run) -> Iterator[dict[str, Any]]:
    """Momentary events: all that are neither bars nor curves."""
    for event in run.events:
        if not isinstance(event, LossEvent):
            values = {field.name: getattr(event, field.name) for field in fields(cast(Any, event))}
            at = values.pop("at")
            yield _event("i", at, NAMES[type(event)], values, RUN_TRACK) | {"s": "t"}


def _losses(run: Run) -> Iterator[dict[str, Any]]:
    for event in run.losses:
        yield _event("C", event.at, "loss", {"loss": event.loss})


def _anchors(run: Run) -> Iterator[dict[str, Any]]:
    for at, anchor in run.anchor_steps:
        yield _event("C", at, "anchor", {"anchor": anchor})
