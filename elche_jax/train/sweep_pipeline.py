"""The windows of a sweep over several processes, which exchange times after some of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from elche_jax.cadence import WindowRecord
from elche_jax.engine.job import Job
from elche_jax.engine.sweep import SweepRunner
from elche_jax.engine.talk import Talk
from elche_jax.train.in_flight import InFlight, Window
from elche_jax.train.pipeline import Pipeline

T = TypeVar("T")


class SweepPipeline(Pipeline[SweepRunner]):
    """The windows of a sweep, see `Pipeline`; in one process the same.

    A window of a sweep has no exchange in which times could travel. So each process keeps the
    records of its own devices until all exchange them, in rounds that double in length, and plans
    the windows of a round from the records of those before: all plan alike.
    """

    combines = False
    _own: tuple[WindowRecord, ...] = ()  # the other processes do not know these yet
    _told = -1  # the last window that all know

    def ends_round(self, window: int) -> bool:
        """Return whether the processes exchange what they know after this window."""
        return not self._job.one_process and told_before(window + 1) == window

    def begin(self, where: str) -> None:
        """Plan without devices that are lost; `where` is the function the user called."""
        if self._take_over.lose(0, self._wait_for_records, where, again=False):
            self._scheduler.restart()

    def again(self, window: Window) -> Window:
        """Return a window with its data, without work for devices that are lost."""
        return self._take_over.shared(window)

    def told(
        self, talk: Talk, where: str, found: list[T], again: Callable[[], list[T]]
    ) -> list[list[T]]:
        """Tell the other processes what is read of the last windows, and their times.

        Args:
            talk: Tells them.
            where: The function the user called, for messages.
            found: What is read.
            again: Runs these windows again without work for devices that are lost.

        Returns:
            What each process has read.
        """
        if self._job.one_process:
            return [found]
        self.finish()
        records = self._own
        told = talk.tell((found, records))
        # what a process had read that ended meanwhile is lost with it
        while self._take_over.lose(self._told + 1, self._wait_for_records, where):
            told = talk.tell((again(), records))
        for of_window in zip(*(records for _, records in told), strict=True):
            self._scheduler.observe(joined_record(self._job, of_window))
        with self._changed:
            self._own, self._told = (), self._told + len(records)
            self._changed.notify_all()
        return [values for values, _ in told]

    def _record(self, window: InFlight, record: WindowRecord, at: int | None = None) -> None:
        if self._job.one_process:
            super()._record(window, record, at)
        else:
            self._own += (record,)

    def _may_plan(self, window: int, below: int) -> bool:
        if self._job.one_process:
            return super()._may_plan(window, below)
        oldest = min(self._open, default=window)
        return self._told >= told_before(window) and oldest > window - below

    def _known_at(self, window: int, ahead: int) -> int:
        del ahead
        return told_before(window)


def told_before(window: int) -> int:
    """Return the last window of a sweep whose record the plan for another one takes into account.

    Processes exchange times after windows 0, 1, 3, 7 and so on: often while speeds are hardly
    known, and seldom later.

    Examples:
        >>> [told_before(window) for window in range(9)]
        [-1, 0, 1, 1, 3, 3, 3, 3, 7]
    """
    return (1 << window.bit_length() >> 1) - 1


def joined_record(job: Job, told: Sequence[WindowRecord]) -> WindowRecord:
    """Return the record of a window of a sweep from that of each process's devices."""
    return replace(
        told[0],
        busy_ms=job.by_rank([record.busy_ms for record in told], 0.0),
        wall_ms=max(record.wall_ms for record in told),
        sync_ms=min(record.sync_ms for record in told),
        skew_ms=max(record.skew_ms for record in told),
        steady=all(record.steady for record in told),
        cold=any(record.cold for record in told),
    )
