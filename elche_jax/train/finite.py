"""What happens to windows whose gradients are not finite."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.train.pace import Measured

NONFINITE = ("raise", "skip", "ignore")

MAX_SKIPS = 20
"""Windows in a row that may be dropped: enough for a loss scale to fall from 2**16 to 2**-4."""


class NonFiniteError(RuntimeError):
    """The gradient or the loss of a window was not finite; its update was dropped."""


@dataclass(frozen=True)
class FinitePolicy:
    """The user's choice.

    Attributes:
        action: `"raise"` at the first such window, `"skip"` it, or `"ignore"` that it is.
        max_skips: Raise after so many dropped windows in a row; None for never.

    Raises:
        ValueError: An unknown action, or a number below 1.
        TypeError: `max_skips` is not an integer.
    """

    action: str = "raise"
    max_skips: int | None = MAX_SKIPS

    def __post_init__(self) -> None:
        where = "build_train_step"
        if self.action not in NONFINITE:
            rule = f"be one of {', '.join(map(repr, NONFINITE))}"
            raise ValueError(check.message(where, "nonfinite", rule, repr(self.action)))
        if self.max_skips is not None:
            check.integer(where, "max_skips", self.max_skips, low=1)

    @property
    def drops(self) -> bool:
        """Whether the update of such a window is dropped."""
        return self.action != "ignore"


class FiniteWatch:
    """Counts dropped windows, and says when it is too much.

    Attributes:
        skipped: Windows dropped so far.

    Args:
        policy: The user's choice.
        devices: The devices, in rank order.
    """

    def __init__(self, policy: FinitePolicy, devices: Sequence[jax.Device]):
        self._policy, self._devices = policy, devices
        self.skipped = 0
        self._in_a_row = 0

    def see(self, measured: Measured, finite: bool, own: jax.Array) -> NonFiniteError | None:
        """Takes note of a window; gives the error to raise, if it is time for one.

        Args:
            measured: The window.
            finite: Whether it was finite.
            own: For each device whether its own sums were; read only where needed.
        """
        if finite or not self._policy.drops:
            self._in_a_row = 0
            return None
        self.skipped += 1
        self._in_a_row += 1
        if self._policy.action == "raise":
            return NonFiniteError(
                "train: loss, gradient, weight, update and model state of every window must "
                f"be finite, those of {_name(measured)} were not: {self._culprits(measured, own)}. "
                "Its update was dropped; lower the learning rate, or pass nonfinite='skip' to "
                "drop such windows and go on."
            )
        if self._in_a_row == self._policy.max_skips:
            return NonFiniteError(
                f"train: fewer than {self._in_a_row} windows in a row may be dropped as not "
                f"finite (max_skips), the last one was {_name(measured)}: "
                f"{self._culprits(measured, own)}. Lower the learning rate, look at the data, or "
                "raise max_skips."
            )
        return None

    def _culprits(self, measured: Measured, own: jax.Array) -> str:
        """The devices whose own sums were not finite, and what they had worked on."""
        ends = np.cumsum(measured.counts) + measured.first
        bad = np.flatnonzero(~np.asarray(own)).tolist()
        if not bad:
            return "each device's sums were, what they combine to was not"
        return "; ".join(
            f"device {rank} ({self._devices[rank]}), microbatches "
            f"{ends[rank] - measured.counts[rank]} to {ends[rank] - 1} of the epoch"
            for rank in bad
        )


def _name(measured: Measured) -> str:
    return f"window {measured.window} (epoch {measured.epoch}, counts {measured.counts})"
