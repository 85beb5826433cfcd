"""What becomes of windows when a process of the job ends: the devices that are left take over."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from elche_jax._processes import PROCESSES, ProcessLostError
from elche_jax.cadence import WindowPlan, apportion
from elche_jax.data.order import Cursor
from elche_jax.engine.job import Members
from elche_jax.engine.runner import Call
from elche_jax.train.in_flight import Window
from elche_jax.train.planning import Planning, R


class TakeOver(Planning[R]):
    """Gives the work of devices that are lost to those that are left.

    A window is a range of microbatches, whoever computes them. One whose exchange was lost, and
    those that were planned before, keep their ranges: every example is used once, and all
    processes go on alike. Later windows are planned for the devices that are left.
    """

    def shared(self, window: Window) -> Window:
        """Return a window for the devices that are left, with its data."""
        if window.calls and not any(window.counts[rank] for rank in self._scheduler.lost):
            return window
        plan, calls = self._shared_out(window.plan)
        return replace(window, plan=plan, calls=calls)

    def ended(self, window: int) -> ProcessLostError:
        """Return the error that a window and those after it are lost, and their loop has ended."""
        return self._loss_error(window, "their loop has ended")

    def _loss_error(
        self, window: int, why: str, which: str = "that have no mean yet"
    ) -> ProcessLostError:
        members = self._job.members
        said, processes = _loss_of(members, self._newly_lost or members.lost, window)
        rule = f"Windows {which} would have to run again, and {why}."
        return ProcessLostError(f"{said} {rule} Resume from a checkpoint.", processes)

    @property
    def _newly_lost(self) -> list[int]:
        """Ranks of the devices that are lost and that are still planned for."""
        return [rank for rank in self._job.members.lost if rank not in self._scheduler.lost]

    def _shared_out(self, plan: WindowPlan) -> tuple[WindowPlan, tuple[Call, ...]]:
        """Return a window's plan without work for devices that are lost, and its data."""
        counts, lost = plan.counts, self._scheduler.lost
        if any(counts[rank] for rank in lost):
            counts = taken_over(counts, lost)
        reader = self._feed.open_epoch(Cursor(plan.epoch, plan.first, plan.window))
        examples, calls = self._feed.load(counts, plan.first, reader)
        return replace(plan, counts=counts, examples=examples), calls

    def lose(self, window: int, where: str = "train", again: bool = True) -> bool:
        """Plan without devices that were lost since the last call; return whether any was.

        Args:
            window: Number of the window that was not complete, for the message.
            where: The function the user called, for messages.
            again: Whether data have to be read again.

        Raises:
            ProcessLostError: If they cannot, or a recording is replayed.
        """
        members, ranks = self._job.members, self._newly_lost
        if not ranks:
            return False
        said, processes = _loss_of(members, ranks, window, where)
        if self._scheduler.cadence.scripted:
            raise ProcessLostError(f"{said} A recording needs all devices.", processes)
        if again and not self._feed.rereads:
            rule = "The data of a window must be read again, which an iterable cannot."
            todo = "Resume from a checkpoint; iterables must be as long in every process."
            raise ProcessLostError(f"{said} {rule} {todo}", processes)
        PROCESSES.log_loss(processes, said)
        self._wait_for_records()
        self._scheduler.on_lost(ranks)
        return True


def _loss_of(
    members: Members, ranks: Sequence[int], window: int, where: str = "train"
) -> tuple[str, list[int]]:
    """Return the message that processes with devices of these ranks were lost, and which.

    Args:
        members: The processes that are left.
        ranks: Ranks of the devices that were lost.
        window: Number of the window that was to run.
        where: The function the user called.
    """
    processes = sorted({members.devices[rank].process_index for rank in ranks})
    several, names = len(processes) > 1, ", ".join(map(str, processes))
    of_devices = "devices" if len(ranks) > 1 else "device"
    said = (
        f"{where}: process{'es' if several else ''} {names} ({of_devices} "
        f"{', '.join(map(str, ranks))}) ended before window {window} was complete; "
        f"{len(members.left)} of {len(members.devices)} devices are left."
    )
    return said, processes


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
