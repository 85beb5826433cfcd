"""What becomes of windows when a process of the job ends: the devices that are left take over."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from elche_jax._processes import ProcessLostError
from elche_jax.cadence import apportion
from elche_jax.data.order import Cursor
from elche_jax.engine.job import Members
from elche_jax.train.feed import Feed
from elche_jax.train.in_flight import Window
from elche_jax.train.live_scheduler import LiveScheduler

logger = logging.getLogger("elche_jax")


class TakeOver:
    """Gives the work of devices that are lost to those that are left.

    A window is a range of microbatches, whoever computes them. One whose exchange was lost, and
    those that were planned before, keep their ranges: every example is used once, and all
    processes go on alike. Later windows are planned for the devices that are left.

    Args:
        feed: Loads windows.
        scheduler: Plans them.
        pending: Whether windows are pending in the state between two windows.
    """

    def __init__(self, feed: Feed, scheduler: LiveScheduler, pending: bool):
        self._feed, self._scheduler, self._job = feed, scheduler, feed.fleet.job
        self._pending = pending

    def present(self, window: Window, recorded: Callable[[], None]) -> Window:
        """Return a window without work for devices that are lost.

        Args:
            window: A window that is to be dispatched. If a process was lost since the last one,
                it is the same window in all processes.
            recorded: Waits until all windows before it are recorded.

        Raises:
            ProcessLostError: If its data cannot be read again, a recording is replayed, or windows
                are pending.
        """
        members = self._job.members
        if len(self._scheduler.lost) < len(members.lost):
            self._lose(members, window, recorded)
        if not any(window.counts[rank] for rank in members.lost):
            return window
        plan, counts = window.plan, taken_over(window.counts, members.lost)
        reader = self._feed.open_epoch(Cursor(plan.epoch, plan.first, plan.window))
        examples, calls = self._feed.load(counts, plan.first, reader)
        return replace(window, plan=replace(plan, counts=counts, examples=examples), calls=calls)

    def _lose(self, members: Members, window: Window, recorded: Callable[[], None]) -> None:
        ranks = [rank for rank in members.lost if rank not in self._scheduler.lost]
        processes = sorted({members.devices[rank].process_index for rank in ranks})
        said = lost_message(members, processes, ranks, window.index)
        if self._scheduler.cadence.scripted:
            raise ProcessLostError(f"{said} A recording needs all devices.", processes)
        if not self._feed.rereads:
            rule = "The data of a window must be read again, which an iterable cannot."
            raise ProcessLostError(f"{said} {rule} Resume from a checkpoint.", processes)
        if self._pending:
            rule = "What they had computed for pending windows is lost with them."
            raise ProcessLostError(f"{said} {rule} Resume from a checkpoint.", processes)
        logger.warning("elche: %s", said)
        recorded()
        self._scheduler.on_lost(ranks)


def lost_message(
    members: Members, processes: Sequence[int], ranks: Sequence[int], window: int
) -> str:
    """Return which processes were lost, for messages.

    Args:
        members: Those that are left.
        processes: Indices of those that were lost.
        ranks: Ranks of their devices.
        window: Number of the window that was to be trained.
    """
    several, names = len(processes) > 1, ", ".join(map(str, processes))
    of_devices = "devices" if len(ranks) > 1 else "device"
    return (
        f"train: process{'es' if several else ''} {names} ({of_devices} "
        f"{', '.join(map(str, ranks))}) ended before window {window} was complete; "
        f"{len(members.left)} of {len(members.devices)} devices are left."
    )


def taken_over(counts: Sequence[int], lost: Collection[int]) -> tuple[int, ...]:
    """Return the counts of a window in which the devices that are left run what others would have.

    They share it in proportion to their own counts, which follow their speeds; alike if none of
    them had work.

    Args:
        counts: Microbatches per device.
        lost: Ranks of the devices that are lost, not all of them.

    Examples:
        >>> taken_over((4, 2, 6), lost=[2])
        (8, 4, 0)
        >>> taken_over((0, 0, 3), lost=[2])
        (2, 1, 0)
    """
    left = [rank for rank in range(len(counts)) if rank not in lost]
    own = [counts[rank] for rank in left]
    # a device without work beside others that have some stays without
    working = [rank for rank, count in zip(left, own, strict=True) if count or not any(own)]
    times = [1.0 / max(1, counts[rank]) for rank in working]
    shares = dict(zip(working, apportion(sum(counts), times), strict=True))
    return tuple(shares.get(rank, 0) for rank in range(len(counts)))
