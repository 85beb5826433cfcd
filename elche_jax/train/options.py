"""What `build_train_step` was asked for, apart from loss, optimizer, devices and cadence."""

from dataclasses import dataclass, field
from typing import Any

import jax

from elche_jax.averaging.rules import AveragingRule, Compression
from elche_jax.cadence.guards import Guard
from elche_jax.config import Recorder
from elche_jax.engine.host.coordinator import Limits
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.merge import Merge
from elche_jax.engine.precision import Precision
from elche_jax.engine.trainable import Trainable
from elche_jax.train.finite import AVERAGES, GRADIENTS, FinitePolicy, FiniteWatch


@dataclass(frozen=True)
class Options:
    """Checked by `build_train_step`.

    Attributes:
        max_grad_norm: Clips each device's mean gradient before the exchange; or None.
        finite: What happens to windows that are not finite.
        trainable: Which parameters are trained; None for all.
        merge: How model state is merged; None for the rule that fits the dtype.
        precision: What the loss is computed in.
        loss_scale: The first dynamic scale of the loss, or None.
        compression: Type in which gradients, or what the devices' steps did, travel.
        delay: Windows that may be pending.
        ahead: Whether nobody waits for a mean, however late it is.
        world_size: Number of devices.
        averaging: How the devices' own steps are joined; None for gradients.
        guard: Opinions on how far the devices drift apart; or None.
        verify_every: Windows between two comparisons of the replicas; None for never.
        timeline: Told of every window; or None.
        hint: Log one line when devices of one kind turn out to be unequally fast.
        emulate: Makes devices slower on purpose; or None.
        host: How long an exchange on the host waits; None for one on the devices.
    """

    max_grad_norm: float | None = None
    finite: FinitePolicy = field(default_factory=FinitePolicy)
    trainable: Trainable | None = None
    merge: Merge | None = None
    precision: Precision = field(default_factory=Precision)
    loss_scale: Any = None
    compression: Compression | None = None
    delay: int = 0
    ahead: bool = False
    world_size: int = 1
    averaging: AveragingRule | None = None
    guard: Guard | None = None
    verify_every: int | None = None
    timeline: Recorder | None = None
    hint: bool = False
    emulate: LoopHook | None = None
    host: Limits | None = None

    def finite_watch(self, devices: tuple[jax.Device, ...]) -> FiniteWatch:
        """What looks at windows that are not finite."""
        return FiniteWatch(self.finite, devices, GRADIENTS if self.averaging is None else AVERAGES)

    @property
    def late(self) -> bool:
        """Whether means are taken up after later windows have begun; one device has its own
        at once."""
        return self.world_size > 1 and (bool(self.delay) or self.ahead)

    @property
    def pending(self) -> int:
        """Windows whose mean is to come, in a state between two windows. What an exchange on
        the host has not averaged is part of no state."""
        return self.delay if self.late and self.host is None else 0
