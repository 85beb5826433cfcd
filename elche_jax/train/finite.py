"""Policy for windows whose gradients are not finite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.cadence import WindowPlan

MAX_SKIPS = 20
"""Default number of dropped windows in a row that raises an error: enough for a dynamic loss scale
to fall from 2**16 to 2**-4."""


class NonFiniteError(RuntimeError):
    """The gradient or the loss of a window was not finite; its update was dropped.

    Attributes:
        window: Number of the window.
        epoch: Epoch of the window.
        microbatches: For each rank whose own sums were not finite, the range of the epoch's
            microbatches that it ran.
    """

    def __init__(self, text: str, window: int, epoch: int, microbatches: dict[int, range]):
        super().__init__(text)
        self.window, self.epoch, self.microbatches = window, epoch, microbatches

    # by default an exception is unpickled from its message alone, which `__init__` rejects
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.window, self.epoch, self.microbatches)


@dataclass(frozen=True)
class FinitePolicy:
    """The user's choice for windows that are not finite.

    Attributes:
        action: `"raise"` at the first such window, `"skip"` its update, or `"ignore"` it.
        max_skips: Raise after this many skipped windows in a row; None for never.

    Raises:
        ValueError: `action` is unknown, or `max_skips` is below 1 or without effect.
        TypeError: `max_skips` is not an integer.
    """

    action: str = "raise"
    max_skips: int | None = MAX_SKIPS

    def __post_init__(self) -> None:
        where = "build_train_step"
        check.one_of(where, "nonfinite", self.action, ("raise", "skip", "ignore"))
        if self.max_skips is not None:
            check.integer(where, "max_skips", self.max_skips, low=1)
        if self.action != "skip" and self.max_skips != MAX_SKIPS:
            rule = f"be left out with nonfinite={self.action!r}"
            raise ValueError(check.message(where, "max_skips", rule, self.max_skips))

    @property
    def drops(self) -> bool:
        """Whether updates that are not finite are dropped."""
        return self.action != "ignore"


@dataclass(frozen=True)
class Wording:
    """Message templates about windows that are not finite.

    Attributes:
        rule: Error under `"raise"`.
        many: Error after too many windows in a row.
        together: Replaces the list of devices if no single device is the cause.
        event: Reason in the timeline.
    """

    rule: str
    many: str
    together: str
    event: str


GRADIENTS = Wording(
    "loss, gradient, weight (not negative), update and model state of every window must be finite, "
    "but those of "
    "{name} were not: {culprits}. Its update was dropped; look at the data, lower the learning "
    "rate, or pass nonfinite='skip' to drop such windows and go on.",
    "{dropped} windows in a row were dropped as not finite (max_skips), the last one {name}: "
    "{culprits}. Look at the data, lower the learning rate, or raise max_skips.",
    "each device's sums were finite, but their total or the optimizer's update was not, or the "
    "window weighs less than 2**-100",
    "not finite",
)

AVERAGES = Wording(
    "loss, weight, parameters and model state of every device must be finite after its steps, "
    "but those of {name} were not: {culprits}. Only the others were averaged; look at the data, "
    "lower the learning rate, or pass nonfinite='skip' to leave such devices out and go on.",
    "in {dropped} windows in a row a device was left out of the average as not finite (max_skips), "
    "the last one {name}: {culprits}. Look at the data, lower the learning rate, or raise "
    "max_skips.",
    "no device, but their average, or the rule's weights (weigh, exponent) are negative, not "
    "finite or all 0, or the window weighs less than 2**-100",
    "left out: not finite",
)


class FiniteWatch:
    """Counts windows that were not finite, and decides when to raise.

    Attributes:
        skipped: Windows so far whose update was dropped, or whose average left out a device
            that was not finite.
        left_out: For each device, the number of windows in which it was not finite (counted
            under averaging, and for windows that raised an error) or was left out as late.
        in_a_row: Windows that were not finite since the last finite one.
        event: Reason for a skipped window, for the timeline.

    Args:
        policy: The user's choice.
        devices: The devices, in rank order.
        wording: The messages.
    """

    def __init__(
        self,
        policy: FinitePolicy,
        devices: Sequence[jax.Device],
        wording: Wording = GRADIENTS,
    ):
        self._policy, self._devices, self._wording = policy, devices, wording
        self.event = wording.event
        self.restore(0, [0] * len(devices), 0)

    def restore(self, skipped: int, left_out: Sequence[int], in_a_row: int) -> None:
        """Set the counts to those of a restored run."""
        self.skipped, self.left_out, self.in_a_row = skipped, list(left_out), in_a_row

    def observe(self, plan: WindowPlan, finite: bool, own: Any) -> NonFiniteError | None:
        """Count a window; return the error to raise, if any.

        Args:
            plan: The window.
            finite: Whether it was finite.
            own: For each device, whether its own sums were finite; an array on the devices that
                is read only if needed.
        """
        if finite or not self._policy.drops:
            self.in_a_row = 0
            return None
        self.skipped += 1
        self.in_a_row += 1
        raises = self._policy.action == "raise"
        most = self._policy.max_skips
        # a restored run may have dropped more windows in a row than this run's max_skips
        too_many = most is not None and self.in_a_row >= most
        if not raises and not too_many and self._wording is GRADIENTS:
            return None
        bad = self._culprits(plan, own)
        if raises:
            return self._error(plan, bad, self._wording.rule)
        if too_many:
            error = self._error(plan, bad, self._wording.many)
            self.in_a_row = 0  # a loop that catches the error is warned again
            return error
        logger.warning(
            "elche: left out of the average of %s, as not finite: %s.",
            _name(plan),
            self._names(bad) or self._wording.together,
        )
        return None

    def on_late(self, plan: WindowPlan, ranks: Sequence[int]) -> None:
        """Count devices that were too late for the average of a window."""
        for rank in ranks:
            self.left_out[rank] += 1
            logger.warning(
                "elche: device %d (%s) was left out of the average of %s, as it did not deliver "
                "in time; it gets no work until it has.",
                rank,
                self._devices[rank],
                _name(plan),
            )

    def _culprits(self, plan: WindowPlan, own: Any) -> dict[int, range]:
        """Count and return the ranks that were not finite, with their microbatches."""
        ends = np.cumsum(plan.counts) + plan.first
        # the entry of a device at rest is a copy of the lead's
        ranks = [rank for rank in np.flatnonzero(~np.asarray(own)).tolist() if plan.counts[rank]]
        for rank in ranks:
            self.left_out[rank] += 1
        return {rank: range(int(ends[rank]) - plan.counts[rank], int(ends[rank])) for rank in ranks}

    def _names(self, bad: dict[int, range]) -> str:
        return "; ".join(
            f"device {rank} ({self._devices[rank]}), {_microbatches(work)} of the epoch"
            for rank, work in bad.items()
        )

    def _error(self, plan: WindowPlan, bad: dict[int, range], text: str) -> NonFiniteError:
        culprits = self._names(bad) or self._wording.together
        text = "train: " + text.format(name=_name(plan), culprits=culprits, dropped=self.in_a_row)
        return NonFiniteError(text, plan.window, plan.epoch, bad)


def _microbatches(work: range) -> str:
    if len(work) == 1:
        return f"microbatch {work.start}"
    return f"microbatches {work.start} to {work.stop - 1}"


def _name(plan: WindowPlan) -> str:
    return f"window {plan.window} (epoch {plan.epoch}, counts {plan.counts})"
