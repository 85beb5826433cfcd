"""The headline numbers of a run, computed from its records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elche_jax.cadence import WindowMeasurement


@dataclass(frozen=True)
class DeviceReport:
    """One device over the steady windows.

    Attributes:
        name: The device.
        ms_per_batch: Median milliseconds per microbatch; None if never measured.
        microbatches: Microbatches it ran.
        busy_share: Share of the time during which it worked, 0 to 1.
    """

    name: str
    ms_per_batch: float | None
    microbatches: int
    busy_share: float


@dataclass(frozen=True)
class RunReport:
    """What a run has done so far; `print` shows it as a table.

    Attributes:
        devices: A report for each device, in rank order.
        counts: The plan for the next window; for a run that was read back, the last plan
            that no end of an epoch cut short.
        windows: Windows the report covers: at most the last 1024 of the run.
        examples_per_s: Valid examples per second over the steady windows.
        limit_share: Microbatches per second over the sum of the devices' own speeds,
            `sum(counts) / (wall * sum(1 / ms_per_batch))`; None until all are measured.
        sync_ms: Median cost of a synchronisation.
        skew_ms: Median spread of the devices' arrivals at it.
        compile_hits: Program requests answered at once.
        compile_misses: Program requests that waited for a compile.
        compiled_ahead: Programs compiled in the background.
        compile_s: Seconds spent compiling.
        skipped: Windows of the run that were not finite: their update was dropped, or,
            under averaging, a device was left out of it.
        exchange_bytes: Bytes that each device has to exchange in a window, before any are
            left out on the wire; 0 with one device.
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
    compile_hits: int
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
        rows += [
            f"last {counted(self.windows, 'window')}: {self.examples_per_s:,.0f} examples/s, "
            f"{limit} of the limit, sync {self.sync_ms:.2f} ms, skew {self.skew_ms:.2f} ms",
            f"compiles: {self.compile_misses} waited for, {self.compiled_ahead} ahead, "
            f"{self.compile_hits} hits, {self.compile_s:.1f} s",
        ]
        if self.exchange_bytes:
            frozen = f" ({file_size(self.frozen_bytes)} frozen, left out)"
            left = frozen if self.frozen_bytes else ""
            rows.append(f"exchange: {file_size(self.exchange_bytes)} per device and window{left}")
        if self.skipped:
            windows = counted(self.skipped, "window")
            rows.append(f"not finite: {windows} (update dropped, or a device left out)")
        return "\n".join(rows)


def ms_per_batch(records: Sequence[WindowMeasurement], rank: int) -> float | None:
    """Median milliseconds per microbatch of a device; None if it ran none."""
    times = [_busy(r, rank) / r.counts[rank] for r in records if r.counts[rank] > 0]
    return median(times) if times else None


def limit_share(records: Sequence[WindowMeasurement]) -> float | None:
    """The share of the limit that these windows reached.

    Args:
        records: Windows of one run; every device must have run in some of them.

    Returns:
        `sum(counts) / (sum(wall_ms) * sum over devices of 1 / ms_per_batch)`.

    Examples:
        >>> from elche_jax.cadence import WindowRecord
        >>> from elche_jax.observe.report import limit_share
        >>> window = WindowRecord(0, 0, (4, 2), 60, (40.0, 40.0), 80.0, 1.0, 0.0, True)
        >>> limit_share([window])
        0.5
    """
    if not records:
        return None
    known = _known_ms(records)
    wall = sum(record.wall_ms for record in records)
    if len(known) < len(records[0].counts) or wall <= 0:
        return None
    done = sum(sum(record.counts) for record in records)
    return done / (wall * sum(1 / ms for ms in known))


def imbalance(records: Sequence[WindowMeasurement]) -> float:
    """The share of the machine that equal counts leave idle, 0 to 1.

    `1 - mean(ms) / max(ms)` over the devices' milliseconds per microbatch: with equal
    counts a window takes as long as the slowest device needs, and the others wait.
    """
    known = _known_ms(records) if records else []
    return 1 - sum(known) / len(known) / max(known) if known else 0.0


def device_reports(
    records: Sequence[WindowMeasurement], names: Sequence[str]
) -> list[DeviceReport]:
    """One `DeviceReport` per device over these windows."""
    wall = sum(record.wall_ms for record in records)
    return [
        DeviceReport(
            name,
            ms_per_batch(records, rank),
            sum(record.counts[rank] for record in records),
            min(1.0, sum(_busy(r, rank) for r in records) / wall) if wall else 0.0,
        )
        for rank, name in enumerate(names)
    ]


def _known_ms(records: Sequence[WindowMeasurement]) -> list[float]:
    """Milliseconds per microbatch of the devices that were measured."""
    times = [ms_per_batch(records, rank) for rank in range(len(records[0].counts))]
    return [ms for ms in times if ms]


def _busy(record: WindowMeasurement, rank: int) -> float:
    return record.busy_ms[rank] if record.busy_ms else record.wall_ms


def make_report(
    records: Sequence[WindowMeasurement],
    names: Sequence[str],
    counts: tuple[int, ...],
    compiles: Mapping[str, float],
    skipped: int = 0,
    exchange_bytes: int = 0,
    frozen_bytes: int = 0,
) -> RunReport:
    """Makes the report of the steady windows among some records.

    Args:
        records: Windows, oldest first.
        names: Names of the devices.
        counts: The plan for the next window.
        compiles: The fields of the compile cache's statistics.
        skipped: Windows whose update was dropped.
        exchange_bytes: Bytes each device has for an exchange.
        frozen_bytes: Bytes that frozen parameters would add.
    """
    steady = [record for record in records if record.steady]
    seconds = sum(record.wall_ms for record in steady) / 1e3
    return RunReport(
        devices=tuple(device_reports(steady, names)),
        counts=counts,
        windows=len(records),
        examples_per_s=sum(r.examples for r in steady) / seconds if seconds else 0.0,
        limit_share=limit_share(steady),
        sync_ms=median([r.sync_ms for r in steady]) if steady else 0.0,
        skew_ms=median([r.skew_ms for r in steady]) if steady else 0.0,
        compile_hits=int(compiles["hits"]),
        compile_misses=int(compiles["misses"]),
        compiled_ahead=int(compiles["ahead"]),
        compile_s=compiles["seconds"],
        skipped=skipped,
        exchange_bytes=exchange_bytes,
        frozen_bytes=frozen_bytes,
    )


def file_size(size: int) -> str:
    """A number of bytes, in a unit that suits it.

    Examples:
        >>> from elche_jax.observe.report import file_size
        >>> file_size(900), file_size(30_500)
        ('900 bytes', '30.50 kB')
    """
    from rich.filesize import decimal

    return decimal(size, precision=2)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things; give `plural` if it is not the noun with an s.

    Examples:
        >>> from elche_jax.observe.report import counted
        >>> counted(1, "device"), counted(2000, "device")
        ('1 device', '2,000 devices')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
