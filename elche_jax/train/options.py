"""What `build_train_step` was asked for, apart from loss, optimizer, devices and cadence."""

from dataclasses import dataclass, field
from typing import Any

import jax

from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient
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
        rule: What a window does to the parameters.
        world_size: Number of devices.
        guard: Opinions on how far the devices drift apart; or None.
        verify_every: Windows between two comparisons of the replicas; None for never.
        timeline: Told of every window; or None.
        hint: Log one line when devices of one kind turn out to be unequally fast.
        emulate: Makes devices slower on purpose; or None.
        exchange: The exchange on the host; None for one on the devices.
    """

    max_grad_norm: float | None = None
    finite: FinitePolicy = field(default_factory=FinitePolicy)
    trainable: Trainable | None = None
    merge: Merge | None = None
    precision: Precision = field(default_factory=Precision)
    loss_scale: Any = None
    rule: AveragingRule | MeanGradient = field(default_factory=MeanGradient)
    world_size: int = 1
    guard: Guard | None = None
    verify_every: int | None = None
    timeline: Recorder | None = None
    hint: bool = False
    emulate: LoopHook | None = None
    exchange: HostExchange | None = None

    def finite_watch(self, devices: tuple[jax.Device, ...]) -> FiniteWatch:
        """What looks at windows that are not finite."""
        return FiniteWatch(self.finite, devices, GRADIENTS if self.averaging is None else AVERAGES)

    @property
    def averaging(self) -> AveragingRule | None:
        """How the devices' own steps are joined; None for gradients."""
        return self.rule if isinstance(self.rule, AveragingRule) else None

    @property
    def may_be_late(self) -> bool:
        """Whether means are applied after later windows have begun, on several devices."""
        return self.rule.delay > 0 or (self.exchange is not None and self.exchange.run_ahead)

    @property
    def late(self) -> bool:
        """The same on these devices; one device has its own mean at once."""
        return self.world_size > 1 and self.may_be_late

    @property
    def host(self) -> Limits | None:
        """How an exchange on the host waits; None where there is none."""
        exchange = self.exchange
        if exchange is None or self.world_size == 1:
            return None
        bounds = exchange.max_overshoot, exchange.max_batch_diff
        return Limits(exchange.timeout, self.may_be_late, self.rule.delay or None, *bounds)

    @property
    def pending(self) -> int:
        """Windows whose mean is to come, in a state between two windows. What an exchange on
        the host has not averaged is part of no state."""
        return self.rule.delay if self.late and self.exchange is None else 0
