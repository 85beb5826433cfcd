"""Plots of runs as PNG files; matplotlib is imported when one is drawn."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from elche_jax import _check as check
from elche_jax.cadence import WindowMeasurement
from elche_jax.observe.report import device_reports

INK, FAINT = "#1f2933", "#c3ccd5"
BUSY = ("#f3f6f9", "#9cc9d9", "#2a86a8", "#0b4a6b")
LINES = ("#0b6e99", "#e0662f", "#4c9f50", "#8b5fbf", "#c23b6e", "#a67c00", "#20908d", "#6b7785")

LINE = 2.0  # points


def plot_run(
    records: Sequence[WindowMeasurement],
    path: str | PathLike[str],
    title: str = "",
    *,
    devices: Sequence[str] | None = None,
    baseline: Sequence[WindowMeasurement] | None = None,
    names: tuple[str, str] = ("this run", "baseline"),
) -> Path:
    """Plot the busy share of every device over time, and its count in every window.

    Args:
        records: Windows of one run, oldest first, at least one.
        path: The PNG file to write; missing folders are created.
        title: Title of the plot.
        devices: Names of the devices; None for `device 0`, `device 1`, ...
        baseline: Windows of another run on the same devices, plotted above with the same
            time axis.
        names: Names of the run and of the baseline.

    Returns:
        The path.

    Raises:
        TypeError: `path` is not a path.
        ValueError: `path`, `records` or `baseline` is empty; `path` is a folder; `records`,
            `baseline` and `devices` differ in the number of devices.

    Examples:
        >>> import tempfile
        >>> from elche_jax.observe.plots import plot_run
        >>> from elche_jax.cadence import WindowRecord
        >>> busy, wall = (80.0, 76.0), 82.0
        >>> windows = [WindowRecord(i, 0, (4, 16), 160, busy, wall, 1, 4, True) for i in range(9)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plot_run(windows, f"{folder}/run.png", "two devices").stat().st_size > 0
        True
    """
    target = check.file("plot_run", "path", path, "run.png")
    world_size = _check(records, baseline, devices)
    labels = [f"device {rank}" for rank in range(world_size)] if devices is None else devices
    runs = [(names[0], records)]
    if baseline is not None:
        runs.insert(0, (names[1], baseline))

    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = [0.7 + 0.3 * min(world_size, 12)] * len(runs) + [2.4]
    size = (9, 1.6 + sum(rows))
    # Not by pyplot, which keeps a current figure and may need a display.
    figure: Any = Figure(figsize=size, dpi=160, layout="constrained", facecolor="white")
    axes = figure.subplots(len(rows), 1, height_ratios=rows)
    figure.suptitle(title or None, fontsize=14, fontweight="bold", color=INK, x=0.01, ha="left")
    end = max(_edges(run)[-1] for _, run in runs)
    image: Any = None
    for axis, (name, run) in zip(axes, runs, strict=False):
        image = _busy_strips(axis, run, labels, end)
        _set_title(axis, f"{name}: done after {_edges(run)[-1]:.1f} s")
        axis.tick_params(labelbottom=axis is axes[-2])
    axes[-2].set_xlabel("seconds", color=INK)
    bar = figure.colorbar(image, ax=axes[: len(runs)], pad=0.01, fraction=0.025, aspect=30)
    bar.set_label("busy share of a window", color=INK)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
    bar.outline.set_visible(False)
    _count_lines(axes[-1], records, labels)
    _set_title(axes[-1], f"{names[0]}: counts per window")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png")
    return target


def _check(
    records: Sequence[WindowMeasurement],
    baseline: Sequence[WindowMeasurement] | None,
    devices: Sequence[str] | None,
) -> int:
    for argument, run in (("records", records), ("baseline", baseline)):
        if run is not None and not run:
            rule = "hold at least one window"
            raise ValueError(check.message("plot_run", argument, rule, "none"))
        numbers = sorted({len(record.counts) for record in run or ()})
        if len(numbers) > 1:
            rule, todo = "have the same number of devices in all windows", "Plot them separately."
            raise ValueError(check.message("plot_run", argument, rule, numbers, todo))
    world_size = len(records[0].counts)
    if devices is not None:
        check.per_device("plot_run", "devices", len(devices), world_size)
    if baseline is not None and len(baseline[0].counts) != world_size:
        rule = f"have as many devices as records ({world_size})"
        raise ValueError(check.message("plot_run", "baseline", rule, len(baseline[0].counts)))
    return world_size


def _edges(records: Sequence[WindowMeasurement]) -> list[float]:
    """Return the boundaries of the windows, in seconds since the first one began."""
    return [0.0, *accumulate(record.wall_ms / 1e3 for record in records)]


def _busy_strips(
    axis: Any, records: Sequence[WindowMeasurement], labels: Sequence[str], end: float
) -> Any:
    """Draw one strip per device, coloured by the busy share of each window."""
    from matplotlib.colors import LinearSegmentedColormap

    world_size, edges = len(labels), _edges(records)
    image = axis.pcolormesh(
        edges,
        range(world_size + 1),
        np.transpose([record.busy_share for record in records]),
        cmap=LinearSegmentedColormap.from_list("busy", BUSY),
        vmin=0,
        vmax=1,
    )
    for line in range(1, world_size):
        axis.axhline(line, color="white", linewidth=2.5)
    inside = edges[-1] > 0.9 * end  # no room for text to the right of the strips
    for rank, device in enumerate(device_reports(records, labels)):
        axis.text(
            edges[-1] + end * (-0.008 if inside else 0.008),
            rank + 0.5,
            f"{device.busy_share:.0%}",
            va="center",
            ha="right" if inside else "left",
            color="white" if inside and device.busy_share > 0.6 else INK,
            fontsize=9,
        )
    axis.set_xlim(0, end)
    axis.set_ylim(world_size, 0)
    axis.set_yticks([rank + 0.5 for rank in range(world_size)], labels)
    _style(axis)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    return image


def _count_lines(axis: Any, records: Sequence[WindowMeasurement], labels: Sequence[str]) -> None:
    """Draw one step line per device."""
    edges = [record.window for record in records] + [records[-1].window + 1]
    counts = np.transpose([record.counts for record in records])
    widths = np.transpose([_widths(record.counts) for record in records])
    for rank, label in enumerate(labels):
        color = LINES[rank % len(LINES)]
        axis.stairs(counts[rank], edges, baseline=None, color=color, linewidth=0.5, alpha=0.35)
        axis.hlines(counts[rank], edges[:-1], edges[1:], colors=color, linewidths=widths[rank])
        axis.plot([], [], color=color, linewidth=LINE, label=label)  # for the legend
    axis.set_xlim(edges[0], edges[-1])
    axis.set_ylim(0, 1.08 * max(1, counts.max()))
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("window", color=INK)
    axis.grid(axis="y", color=FAINT, linewidth=0.5)
    axis.set_axisbelow(True)
    if len(labels) <= 8:
        axis.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 0.98),
            ncols=len(labels),
            frameon=False,
            labelcolor=INK,
            fontsize=9,
            handlelength=1.2,
            columnspacing=1.2,
        )
    _style(axis)


def _widths(counts: Sequence[int]) -> list[float]:
    """Return line widths for a window: lines of equal counts get thinner, so that all show."""
    after: Counter[int] = Counter()
    widths: list[float] = []
    for count in reversed(counts):
        widths.append(LINE * (1 + min(after[count], 3)))
        after[count] += 1
    return widths[::-1]


def _set_title(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=10.5, color=INK)


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(FAINT)
    axis.tick_params(colors=INK, color=FAINT)
