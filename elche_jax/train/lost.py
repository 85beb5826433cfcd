"""Hands windows over to the devices that are left when a process of the job ends."""

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
    """Gives the work of lost devices to those that are left.

    A window is a range of microbatches, no matter which devices compute them. Windows whose
    exchange was lost, and those already planned, keep their ranges, so every example is used once
    and all processes continue alike. Later windows are planned for the devices that are left.
    """

    def shared(self, window: Window) -> Window:
        """Return a window for the devices that are left, with its data."""
        if window.calls and not any(window.counts[rank] for rank in self._scheduler.lost):
            return window
        plan, calls = self._shared_out(window.plan)
        return replace(window, plan=plan, calls=calls)

    def ended(self, window: int) -> ProcessLostError:
        """Return the error for losing a window and those after it once their loop has ended."""
        return self._loss_error(window, "their loop has ended")

    def _loss_error(
        self, window: int, why: str, which: str = "that have no mean yet"
    ) -> ProcessLostError:
        members = self._job.members
        said, processes = _loss_of(members, self._newly_lost or members.lost, window)
        rule = f"Windows {which} would have to run again, but {why}."
        return ProcessLostError(f"{said} {rule} Resume from a checkpoint.", processes)

    @property
    def _newly_lost(self) -> list[int]:
        """Ranks of lost devices that plans still include."""
        return [rank for rank in self._job.members.lost if rank not in self._scheduler.lost]

    def _shared_out(self, plan: WindowPlan) -> tuple[WindowPlan, tuple[Call, ...]]:
        """Return a window's plan without work for lost devices, and the calls with its data."""
        counts, lost = plan.counts, self._scheduler.lost
        if any(counts[rank] for rank in lost):
            counts = taken_over(counts, lost)
        reader = self._feed.open_epoch(Cursor(plan.epoch, plan.first, plan.window))
        examples, calls = self._feed.load(counts, plan.first, reader)
        return replace(plan, counts=counts, examples=examples), calls

    def lose(self, window: int, where: str = "train", again: bool = True) -> bool:
        """Plan without devices lost since the last call; return whether there were any.

        Args:
            window: Number of the window that was not complete, for the message.
            where: The function the user called, for messages.
            again: Whether the data must be read again.

        Raises:
            ProcessLostError: If the data cannot be read again, or a recording is replayed.
        """
        members, ranks = self._job.members, self._newly_lost
        if not ranks:
            return False
        said, processes = _loss_of(members, ranks, window, where)
        if self._scheduler.cadence.scripted:
            raise ProcessLostError(f"{said} A recording needs all devices.", processes)
        if again and not self._feed.rereads:
            rule = "The data of a window must be read again, which an iterable does not allow."
            todo = "Resume from a checkpoint; iterables must have the same length in every process."
            raise ProcessLostError(f"{said} {rule} {todo}", processes)
        PROCESSES.log_loss(processes, said)
        self._wait_for_records()
        self._scheduler.on_lost(ranks)
        return True


def _loss_of(
    members: Members, ranks: Sequence[int], window: int, where: str = "train"
) -> tuple[str, list[int]]:
    """Return the message for the loss of the processes of these devices, and their indices.

    Args:
        members: The live processes.
        ranks: Ranks of the devices that were lost.
        window: Number of the window that was not complete.
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
    """Return a window's counts after the devices that are left take over the work of lost ones.

    They share the work in proportion to their own counts, which follow their speeds, or equally
    if all of those are 0.

    Args:
        counts: Microbatches per device.
        lost: Ranks of the lost devices; must not be all devices.

    Examples:
        >>> taken_over((4, 2, 6), lost=[2])
        (8, 4, 0)
        >>> taken_over((0, 0, 3), lost=[2])
        (2, 1, 0)
    """
    left = [rank for rank in range(len(counts)) if rank not in lost]
    own = [counts[rank] for rank in left]
    # a device without work stays without, unless all that are left have none
    working = [rank for rank, count in zip(left, own, strict=True) if count or not any(own)]
    times = [1.0 / max(1, counts[rank]) for rank in working]
    shares = dict(zip(working, apportion(sum(counts), times), strict=True))
    return tuple(shares.get(rank, 0) for rank in range(len(counts)))
