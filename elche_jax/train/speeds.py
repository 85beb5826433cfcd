"""Throughput of the devices and their shares of the work.

Pure functions of a cadence's state and the records, called by `LiveScheduler`.
"""

import math
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any

from elche_jax import _check as check
from elche_jax.cadence import BalancedState, WindowRecord
from elche_jax.cadence.estimate import SHORTEST_MS, Times

RECENT = 32
"""Steady windows per device over which the median is taken."""


def throughput(state: Any, records: Sequence[WindowRecord], world_size: int) -> Times:
    """Return the microbatches per second of each device.

    If the cadence's state holds a smoothed estimate, it is

        1000 / ms_per_batch[d]    (`ElChe`, `FixedTotal`, user-defined cadences)
        1000 * throughput[d]      (`Balanced`, per millisecond)

    Otherwise, as for `EveryBatch` and `Replay`, it is the median over the last 32 steady
    windows in which the device had work,

        median(1000 * counts[d] / busy_ms[d])

    with `wall_ms` in place of `busy_ms` if there is only one device, whose cadence gets no
    reports.

    Args:
        state: State of the cadence.
        records: Windows, oldest first.
        world_size: Number of devices.

    Returns:
        Microbatches per second, one entry per device, above 0; None for a device that has
        not been measured yet.

    Raises:
        TypeError: The state's `ms_per_batch` are not numbers or None.
        ValueError: The state's `ms_per_batch` do not have one entry per device, or one is not
            above 0.

    Examples:
        >>> from elche_jax.cadence import ElCheState, EveryBatch
        >>> throughput(ElCheState(10, (10, 10), (8.0, None), False), [], world_size=2)
        (125.0, None)
        >>> record = WindowRecord(0, 0, (4, 1), 80, (8.0, 10.0), 11.0, 1.0, 2.0, True)
        >>> throughput(EveryBatch().init(2), [record], world_size=2)
        (500.0, 100.0)
    """
    known = _estimate(state, world_size)
    if any(rate is not None for rate in known):
        return known
    return tuple(_median_rate(records, rank) for rank in range(world_size))


def ratios(state: Any, records: Sequence[WindowRecord], counts: Sequence[int]) -> tuple[float, ...]:
    """Return the share of the work that each device should get.

    These are the state's own `ratios` if it has them (`Balanced`). Otherwise, with the
    throughput `v`, in which unmeasured devices get the mean of the measured ones,

        ratios[d] = v[d] / sum(v)

    Before any measurement the planned counts replace `v`, so that a speed hint takes effect.

    Args:
        state: State of the cadence.
        records: Windows, oldest first.
        counts: The plan for the next window, not all 0.

    Returns:
        One entry per device, not below 0; they sum to 1 up to rounding.

    Raises:
        TypeError: The state's `ratios` are not numbers.
        ValueError: The state's `ratios` do not have one entry per device, have one below 0,
            or are all 0.

    Examples:
        >>> from elche_jax.cadence import ElChe, ElCheState
        >>> hinted = ElChe(speed_hint=(1, 3.0)).init(2)
        >>> ratios(hinted, [], hinted.counts)
        (0.75, 0.25)
        >>> ratios(ElCheState(10, (10, 10, 10), (2.0, None, 6.0), False), [], (10, 10, 10))
        (0.5, 0.333, 0.167)
    """
    shares: Sequence[float] | None = getattr(state, "ratios", None)
    if shares is None:
        shares = _shares(throughput(state, records, len(counts))) or counts
    else:
        where, argument = "TrainStep.ratios", "ratios of the cadence's state"
        shares = check.reals(where, argument, shares, low=0)
        check.per_device(where, argument, len(shares), len(counts))
        if not any(shares):
            raise ValueError(check.message(where, argument, "have an entry above 0", shares))
    whole = math.fsum(shares)
    return tuple(share / whole for share in shares)


def carried_over(
    rates: Times, before: Sequence[tuple[str, str]], now: Sequence[tuple[str, str]]
) -> Times:
    """Return the speeds that devices are assumed to have, from those of a run that ended.

    A device gets the speed that its kind had at its place. If there is none, it gets the mean over
    its kind on its host, or else on all hosts; None if its kind has no known speed.

    Args:
        rates: Speeds in that run; None if unknown or if the device was lost.
        before: Place, see `Job.places`, and kind of each device in that run.
        now: The same for the devices of this run.

    Examples:
        >>> before = [("a//0", "cpu"), ("a//1", "cpu"), ("b//0", "cpu")]
        >>> now = [("b//0", "cpu"), ("a//2", "cpu"), ("c//0", "cpu"), ("c//1", "gpu")]
        >>> carried_over((2.0, 4.0, 9.0), before, now)
        (9.0, 3.0, 5.0, None)
    """
    known = [(*old, rate) for old, rate in zip(before, rates, strict=True) if rate is not None]
    there: dict[tuple[str, str], list[float]] = {}
    for place, kind, rate in known:
        there.setdefault((place, kind), []).append(rate)
    found: list[float | None] = []
    for place, kind in now:
        if there.get((place, kind)):  # several devices may share a place
            found.append(there[place, kind].pop(0))
            continue
        of_kind = [(old, rate) for old, its, rate in known if its == kind]
        near = [rate for old, rate in of_kind if _host(old) == _host(place)]
        alike = near or [rate for _, rate in of_kind]
        found.append(math.fsum(alike) / len(alike) if alike else None)
    return tuple(found)


def _host(place: str) -> str:
    return place.partition("/")[0]


def _estimate(state: Any, world_size: int) -> Times:
    """Return the estimate in a cadence's state, which may be a user's; empty if it has none."""
    if isinstance(state, BalancedState):
        return tuple(None if rate is None else 1e3 * rate for rate in state.throughput)
    where, argument = type(state).__name__, "ms_per_batch"
    times = check.items(where, argument, getattr(state, argument, ()), "numbers")
    if times:
        check.per_device(where, argument, len(times), world_size)
    return tuple(
        None if ms is None else 1e3 / check.real(where, f"{argument}[{rank}]", ms, above=0)
        for rank, ms in enumerate(times)
    )


def _median_rate(records: Sequence[WindowRecord], rank: int) -> float | None:
    rates = (
        1e3 * record.counts[rank] / ms
        for record in reversed(records)
        if record.steady
        for ms in [record.busy_ms[rank] if record.busy_ms else record.wall_ms]
        # below the resolution of a clock it is not a measurement, and the rate could overflow
        if record.counts[rank] > 0 and ms >= SHORTEST_MS * record.counts[rank]
    )
    last = list(islice(rates, RECENT))
    return median(last) if last else None


def _shares(rates: Times) -> list[float]:
    """Return the rates with gaps filled by their mean; empty if nothing was measured."""
    known = [rate for rate in rates if rate is not None]
    if not known:
        return []
    mean = math.fsum(known) / len(known)
    return [mean if rate is None else rate for rate in rates]
