"""Self-contained HTML pages of runs."""

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path

from elche_jax import _check as check
from elche_jax.observe.atomic import replacing
from elche_jax.observe.page_data import METRICS, metric_names, page_data
from elche_jax.observe.report import RunReport, counted, file_size
from elche_jax.observe.run import LEFT_OUT, Run

ROWS = 200
"""Most rows of a table; if there are more, the last ones are shown."""


def write_page(run: Run, path: str | PathLike[str], title: str | None = None) -> Path:
    """Write a page about a run, with key figures, plots and tables.

    The page contains everything it needs and loads nothing, so that it can be kept, sent and
    opened offline. For a long run, only the last windows are shown one by one and curves are
    medians, as the page says. Key figures always cover the whole run, except that speeds and
    shares are those of the windows on the last devices, if devices have changed.

    Args:
        run: A run from `read_run`.
        path: The file, written completely or not at all; missing folders are created.
        title: Title of the page; None for the run's name.

    Returns:
        The path.

    Raises:
        TypeError: `run` is not a `Run`, `title` not a string, or `path` not a path.
        ValueError: `path` is empty, a folder, or contains a null byte.
        OSError: The file cannot be written.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from elche_jax.observe.page import write_page
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.run import read_run
        >>> from elche_jax.observe.timeline import Timeline
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Timeline(folder / "timeline.jsonl") as timeline:
        ...     timeline.window(WindowRecord(0, 0, (4, 2), 60, (40.0, 40.0), 80.0, 1.0, 0.0, True))
        >>> page = write_page(read_run(folder), folder / "report.html", "Two devices")
        >>> "<title>Two devices</title>" in page.read_text()
        True
    """
    check.instance("write_page", "run", run, Run)
    if title is not None:
        check.instance("write_page", "title", title, str)
    path = check.file("write_page", "path", path, "report.html")
    report = run.report()
    script, style = _read_part("page.js"), _read_part("page.css")
    parts = {
        # Only this script and this style may run; nothing is loaded from anywhere.
        "policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(script)}; style-src {_hash(style)}",
        "title": escape(run.name if title is None else title),
        "lead": escape(_subtitle(run)),
        "notes": "".join(f"<p class=note>{escape(note)}</p>" for note in _notes(run)),
        "figures": _figures(run, report),
        "devices": _device_table(report),
        "epochs": _epoch_table(run),
        "evaluations": _evaluation_table(run),
        "data": _json(page_data(run, report)),
        "style": style,
        "script": script,
    }
    # In one pass, so that placeholders in the inserted text are left alone.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read_part("page.html"))
    with replacing(path) as file:
        # File names that are not UTF-8 contain lone surrogates, which cannot be encoded.
        file.write(page.encode("utf-8", "backslashreplace"))
    return path


def _read_part(name: str) -> str:
    return files("elche_jax.observe").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: object) -> str:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _subtitle(run: Run) -> str:
    cadence = run.segments[-1].cadence.partition("(")[0] if run.segments else ""
    devices = counted(len(run.devices), "device")
    parts = [devices, counted(len(run.windows), "window"), _duration(run.seconds), cadence]
    return " · ".join(part for part in parts if part)


def _notes(run: Run) -> Iterable[str]:
    if not run.windows:
        yield "No window has finished yet."
    if len(run.segments) > 1:
        were = "was" if run.repeated == 1 else "were"
        again = f"; {counted(run.repeated, 'window')} {were} run twice" if run.repeated else ""
        yield f"The run has {len(run.segments)} parts, shown one after another{again}."
    if len(run.latest) < len(run.windows):
        latest = counted(len(run.latest), "window")
        yield f"Devices have changed: speeds and shares are those of the last {latest}."
    if (metrics := len(metric_names(run))) > METRICS:
        yield f"Curves are of the first {METRICS} of {metrics} metrics; the tables have all."


def _figures(run: Run, report: RunReport) -> str:
    waited = f"{report.compile_misses} waited for, {report.compiled_ahead} ahead"
    limit = report.limit_share
    figures = [
        ("Share of the limit", "-" if limit is None else f"{limit:.1%}", "of all devices' speeds"),
        ("Examples per second", f"{report.examples_per_s:,.0f}", "over the steady windows"),
        ("Windows", f"{len(run.windows):,}", f"in {_duration(run.seconds)}"),
        ("Devices", str(len(report.devices)), "in rank order below"),
        ("Synchronising", f"{report.sync_ms:.2f} ms", f"median; skew {report.skew_ms:.2f} ms"),
    ]
    if report.exchange_bytes:
        figures.append(("Exchange", file_size(report.exchange_bytes), "per device and window"))
    figures += [*_skips(run), ("Compiling", f"{report.compile_s:.1f} s", waited)]
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in figures
    )


def _skips(run: Run) -> list[tuple[str, str, str]]:
    """Return the figures of skipped windows by reason; dropped updates even if there are none."""
    reasons = Counter(skip.reason for skip in run.skips)
    dropped = {why: n for why, n in reasons.items() if not why.startswith(LEFT_OUT)}
    why = ", ".join(dropped) or "not finite"
    return [("Dropped updates", f"{sum(dropped.values()):,}", why)] + [
        ("Averaged without a device", f"{n:,}", f"windows; {why.removeprefix(LEFT_OUT)}")
        for why, n in reasons.items()
        if why not in dropped
    ]


def _device_table(report: RunReport) -> str:
    rows = [
        [
            device.name,
            "-" if device.ms_per_batch is None else f"{device.ms_per_batch:.2f}",
            str(count),
            f"{device.microbatches:,}",
            f"{device.busy_share:.1%}",
        ]
        for device, count in zip(report.devices, report.counts, strict=True)
    ]
    head = ["Device", "ms per microbatch", "Count", "Microbatches", "Busy"]
    caption = "Devices, with times of the steady windows"
    return _table(caption, head, rows, [{} for _ in rows], most=len(rows))


def _epoch_table(run: Run) -> str:
    head = ["Epoch", "Windows", "Examples", "Seconds", "Examples per second"]
    rows = [
        [
            str(epoch.epoch),
            f"{epoch.windows:,}",
            f"{epoch.examples:,}",
            f"{epoch.seconds:.2f}",
            f"{epoch.examples / epoch.seconds:,.0f}" if epoch.seconds > 0 else "-",
        ]
        for epoch in run.epochs
    ]
    return _table("Epochs", head, rows, [epoch.metrics for epoch in run.epochs])


def _evaluation_table(run: Run) -> str:
    events = run.evaluations
    rows = [[str(event.epoch), str(event.window), f"{event.seconds:.2f}"] for event in events]
    head = ["Epoch", "Window", "Seconds"]
    return _table("Evaluations", head, rows, [event.metrics for event in events])


def _table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    metrics: Sequence[dict[str, float]],
    most: int = ROWS,
) -> str:
    """Return a table of the last rows, with one more column per metric; nothing without rows."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for each in metrics for name in each))
    top = "".join(f"<th scope=col>{escape(name)}</th>" for name in [*head, *names])
    body = ""
    for (first, *rest), values in zip(rows[-most:], metrics[-most:], strict=True):
        rest += [f"{values[name]:.5g}" if name in values else "-" for name in names]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body += f"<tr><th scope=row>{escape(first)}</th>{cells}</tr>"
    if len(rows) > most:
        caption += f", the last {most} of {len(rows):,}"
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    # A wide table can be scrolled sideways; `tabindex` makes that possible by keyboard, too.
    box = f'<div class=wide tabindex=0 role=region aria-label="{escape(caption)}">{table}</div>'
    return f"<section><h2>{escape(caption)}</h2>{box}</section>"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
