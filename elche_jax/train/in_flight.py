"""A window with its data on the devices, and what is known of it while it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elche_jax.cadence import WindowPlan, WindowRecord
from elche_jax.data.order import Cursor
from elche_jax.engine.host.coordinator import Outcome
from elche_jax.engine.laned import StackedArray
from elche_jax.engine.runner import Call, Launch
from elche_jax.engine.state import TrainState
from elche_jax.engine.timing import WindowTimes


class Run:
    """Identity that the windows of one `windows` call share, by which a step recognises its own."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class Window:
    """The work between two synchronisations, its data on the devices.

    Attributes:
        plan: The window in plain numbers.
        cursor: The position in the data after this window; `windows(cursor=...)` resumes
            from there.
    """

    plan: WindowPlan
    cursor: Cursor
    calls: tuple[Call, ...] = field(repr=False)
    run: Run = field(repr=False)

    @property
    def index(self) -> int:
        """Number of the window in the run."""
        return self.plan.window

    @property
    def epoch(self) -> int:
        """Epoch of the window."""
        return self.plan.epoch

    @property
    def counts(self) -> tuple[int, ...]:
        """Microbatches per device."""
        return self.plan.counts

    @property
    def examples(self) -> int:
        """Valid examples of all devices."""
        return self.plan.examples


@dataclass
class InFlight:
    """A window that is being dispatched, or is dispatched and not yet complete.

    The loop fills in what the programs return; after that the watcher threads only read it.

    Attributes:
        plan: The window.
        requested: When the loop asked for it, in seconds of `time.perf_counter`.
        launch: Its dispatch.
        cold: Whether its programs run for the first time.
        token: A stacked array whose entry `d` is ready when device `d` is done, and says whether
            that device's own sums are finite.
        finite: Whether the window is finite, a bool or one per device; on the devices.
        sums: Checksums of the state after the window, or None.
        metrics: The window's metrics, on the devices, never donated.
        steady: Whether nothing was compiled for it.
        timed: Whether the devices' own times will be known.
        used: Whether its times are used: not if it would not be timed, but the program of untimed
            windows is still being compiled.
        tells: The previous window, which this one's exchange reports to the other processes; None
            unless windows are pending.
        rows: What this process reports of this window in the next one's exchange, see
            `elche_jax.train.telling.measured_rows`; None until it is complete.
        known: Fields of its record that all processes know.
        again: The window without its data, to be trained again if it is lost.
        donated: The state before the window if its buffers were donated, until a watcher thread has
            seen that the window is complete. That thread then frees these arrays while the devices
            go on; it would take the loop's thread as long as a dispatch.
    """

    plan: WindowPlan
    requested: float
    launch: Launch
    cold: bool = False
    token: Any = None
    finite: Any = True
    sums: StackedArray | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    steady: bool = True
    timed: bool = True
    used: bool = True
    tells: "InFlight | None" = None
    rows: np.ndarray | None = None
    known: Mapping[str, Any] = field(default_factory=dict)
    again: Window | None = None
    donated: TrainState | None = None

    def averaged(self, outcome: Outcome) -> "InFlight":
        """Return the window with the results of its exchange on the host."""
        average = outcome.average
        return replace(
            self,
            steady=self.steady and not outcome.late,
            finite=average.metrics["finite"],
            token=average.own,
            # reading the checksum of a device that is behind would wait for it
            sums=None if outcome.missing or outcome.late else self.sums,
            metrics=average.metrics,
        )

    def measured(
        self, times: WindowTimes, free: Sequence[float], ahead: bool, **known: Any
    ) -> WindowRecord:
        """Return the record of the window.

        Args:
            times: When the devices were done.
            free: When each device was done with its previous window.
            ahead: Whether devices went on without waiting for the combine.
            **known: Further fields of the record.
        """
        begun = max(self.requested, *free)
        ends = times.arrived if ahead else times.combined
        return self.plan.measured(
            busy_ms=times.busy_ms(free),
            wall_ms=1e3 * (max(ends) - begun),
            sync_ms=times.sync_ms,
            skew_ms=times.skew_ms,
            steady=self.steady and self.timed and self.used,
            cold=self.cold,
            **known,
        )
