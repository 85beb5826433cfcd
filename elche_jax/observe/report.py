"""The key figures of a run, computed from its windows.

Page, plots, trace and `train.report()` all take their numbers from here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from elche_jax.cadence import WindowMeasurement


@dataclass(frozen=True)
class DeviceReport:
    """The figures of one device.

    Attributes:
        name: Name of the device.
        ms_per_batch: Median milliseconds per microbatch over the steady windows; None if never
            measured.
        microbatches: Number of microbatches it ran, in all windows.
        busy_share: Share of the steady windows in which it was busy, 0 to 1.
    """

    name: str
    ms_per_batch: float | None
    microbatches: int
    busy_share: float


@dataclass(frozen=True)
class RunReport:
    """The figures of a run so far; `print` shows them as a table.

    Attributes:
        devices: A report for each device, in rank order.
        counts: The plan for the next window; for a run read from its timeline, the last plan
            that was not cut short by the end of an epoch.
        windows: Number of windows covered; in a training step at most the last 1024 of the
            run.
        examples_per_s: Valid examples per second over the steady windows.
        limit_share: Microbatches per second over the sum of the devices' solo speeds,
            `sum(counts) / (wall * sum(1 / ms_per_batch))`; None until all are measured.
        sync_ms: Median cost of a synchronisation in milliseconds.
        skew_ms: Median spread of the devices' arrivals at it in milliseconds.
        compile_hits: Program requests answered at once; None for a run read from a file.
        compile_misses: Program requests that waited for a compilation.
        compiled_ahead: Programs compiled in the background.
        compile_s: Seconds spent compiling.
        skipped: Windows of the run that were not finite: their update was dropped or, under
            averaging, a device was left out.
        exchange_bytes: Bytes that each device exchanges per window, with nothing left out on
            the wire; 0 with one device.
        frozen_bytes: Bytes that frozen parameters would add to it, and to each device's
            sums.
    """

    devices: tuple[DeviceReport, ...]
    counts: tuple[int, ...]
    windows: int
    examples_per_s: float
    limit_share: float | None
    sync_ms: float
    skew_ms: float
    compile_hits: int | None
    compile_misses: int
    compiled_ahead: int
    compile_s: float
    skipped: int = 0
    exchange_bytes: int = 0
    frozen_bytes: int = 0

    def __str__(self) -> str:
        rows = ["device              ms/microbatch   counts   microbatches   busy"]
        for device, count in zip(self.devices, self.counts, strict=True):
            speed = "-" if device.ms_per_batch is None else f"{device.ms_per_batch:.2f}"
            rows.append(
                f"{device.name:<20}{speed:>13}{count:>9}{device.microbatches:>15}"
                f"{device.busy_share:>7.0%}"
            )
        limit = "-" if self.limit_share is None else f"{self.limit_share:.1%}"
        hits = "" if self.compile_hits is None else f"{self.compile_hits} hits, "
        rows += [
            f"last {counted(self.windows, 'window')}: {self.examples_per_s:,.0f} examples/s, "
            f"{limit} of the limit, sync {self.sync_ms:.2f} ms, skew {self.skew_ms:.2f} ms",
            f"compiles: {self.compile_misses} waited for, {self.compiled_ahead} ahead, "
            f"{hits}{self.compile_s:.1f} s",
        ]
        if self.exchange_bytes:
            frozen = f" ({file_size(self.frozen_bytes)} frozen, left out)"
            left = frozen if self.frozen_bytes else ""
            rows.append(f"exchange: {file_size(self.exchange_bytes)} per device and window{left}")
        if self.skipped:
            windows = counted(self.skipped, "window")
            rows.append(f"not finite: {windows} (update dropped, or a device left out)")
        return "\n".join(rows)


def busy_ms(record: WindowMeasurement) -> tuple[float, ...]:
    """Return the busy time per device; a single device is busy all the time."""
    return record.busy_ms or (record.wall_ms,)


def ms_per_batch(records: Sequence[WindowMeasurement], rank: int) -> float | None:
    """Return a device's median milliseconds per microbatch; None if it ran none."""
    times = [busy_ms(r)[rank] / r.counts[rank] for r in records if r.counts[rank] > 0]
    return median(times) if times else None


def limit_share(records: Sequence[WindowMeasurement]) -> float | None:
    """Return the share of the limit that some windows reached.

    Args:
        records: Windows of one run.

    Returns:
        `sum(counts) / (sum(wall_ms) * sum over devices of 1 / ms_per_batch)`; None if a device
        was not measured in any of the windows.

    Examples:
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.report import limit_share
        >>> window = WindowRecord(0, 0, (4, 2), 60, (40.0, 40.0), 80.0, 1.0, 0.0, True)
        >>> limit_share([window])
        0.5
    """
    known = _known_ms(records)
    wall = sum(record.wall_ms for record in records)
    if wall <= 0 or len(known) < len(records[0].counts):
        return None
    done = sum(sum(record.counts) for record in records)
    return done / (wall * sum(1 / ms for ms in known))


def imbalance(records: Sequence[WindowMeasurement]) -> float:
    """Return the share of the machine that equal counts leave idle, 0 to 1.

    `1 - mean(ms) / max(ms)` over the devices' milliseconds per microbatch: with equal
    counts a window takes as long as the slowest device needs, and the others wait.
    """
    known = _known_ms(records)
    return 1 - fmean(known) / max(known) if known else 0.0


def device_reports(
    records: Sequence[WindowMeasurement], names: Sequence[str]
) -> list[DeviceReport]:
    """Return one report per device over some windows."""
    steady = [record for record in records if record.steady]
    wall = sum(record.wall_ms for record in steady)
    # Busy times may add up to more than the wall time: the ends of windows are noted by
    # different threads.
    return [
        DeviceReport(
            name,
            ms_per_batch(steady, rank),
            sum(record.counts[rank] for record in records),
            min(1.0, sum(busy_ms(r)[rank] for r in steady) / wall) if wall else 0.0,
        )
        for rank, name in enumerate(names)
    ]


def _known_ms(records: Sequence[WindowMeasurement]) -> list[float]:
    """Return milliseconds per microbatch of the devices that were measured."""
    ranks = range(len(records[0].counts)) if records else ()
    # Also without 0, which a coarse clock may give: speeds are 1 / ms.
    return [ms for rank in ranks if (ms := ms_per_batch(records, rank))]


def make_report(
    records: Sequence[WindowMeasurement],
    names: Sequence[str],
    counts: tuple[int, ...],
    compiles: Mapping[str, float],
    skipped: int = 0,
    exchange_bytes: int = 0,
    frozen_bytes: int = 0,
) -> RunReport:
    """Return the report over some windows, whose times are those of the steady ones.

    Args:
        records: Windows, oldest first.
        names: Names of the devices.
        counts: The plan for the next window.
        compiles: The statistics of the compile cache: `misses`, `ahead`, `seconds`, and `hits` if
            known, which files do not record as they cost nothing.
        skipped: Number of windows that were not finite, see `RunReport`.
        exchange_bytes: Bytes that each device exchanges per window.
        frozen_bytes: Bytes that frozen parameters would add.
    """
    steady = [record for record in records if record.steady]
    seconds = sum(record.wall_ms for record in steady) / 1e3
    return RunReport(
        devices=tuple(device_reports(records, names)),
        counts=counts,
        windows=len(records),
        examples_per_s=sum(r.examples for r in steady) / seconds if seconds else 0.0,
        limit_share=limit_share(steady),
        sync_ms=median([r.sync_ms for r in steady]) if steady else 0.0,
        skew_ms=median([r.skew_ms for r in steady]) if steady else 0.0,
        compile_hits=int(compiles["hits"]) if "hits" in compiles else None,
        compile_misses=int(compiles["misses"]),
        compiled_ahead=int(compiles["ahead"]),
        compile_s=compiles["seconds"],
        skipped=skipped,
        exchange_bytes=exchange_bytes,
        frozen_bytes=frozen_bytes,
    )


def file_size(size: int) -> str:
    """Return a number of bytes as text, in a suitable decimal unit.

    Examples:
        >>> from elche_jax.observe.report import file_size
        >>> file_size(900), file_size(30_500)
        ('900 bytes', '30.50 kB')
    """
    from rich.filesize import decimal

    return decimal(size, precision=2)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number of things as text; `plural` defaults to the noun with an s.

    Examples:
        >>> from elche_jax.observe.report import counted
        >>> counted(1, "device"), counted(2000, "device")
        ('1 device', '2,000 devices')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
