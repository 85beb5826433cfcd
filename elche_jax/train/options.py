"""Options of a training step, apart from loss, optimizer, devices and cadence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from elche_jax._settings import setting
from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient
from elche_jax.cadence.guards import Guard
from elche_jax.config import Recorder
from elche_jax.engine.digests import Described, settings_of
from elche_jax.engine.host.limits import Limits
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.merge import Merge
from elche_jax.engine.metric_names import DEVICES, LOCAL_STEPS, SCALE, Reserved
from elche_jax.engine.precision import Precision
from elche_jax.engine.trainable import Trainable
from elche_jax.train.finite import AVERAGES, GRADIENTS, FinitePolicy, FiniteWatch
from elche_jax.train.recording import EpochRecorder


@dataclass(frozen=True)
class Options:
    """Options of a training step, checked by `build_train_step`.

    Attributes:
        max_grad_norm: Clips each device's mean gradient before the exchange; or None.
        finite: Policy for windows with non-finite values.
        trainable: Which parameters are trained; None for all.
        merge: How model state is merged; None for the default of each dtype.
        precision: Precision of the loss computation.
        loss_scale: The initial dynamic loss scale, or None.
        rule: What a window does to the parameters.
        world_size: Number of devices.
        guard: Judges how far the devices drift apart; or None.
        verify_every: Windows between two comparisons of the replicas; None for the default.
        timeline: Records every window; or None.
        hint: Whether to log a line if devices of the same kind turn out to differ in speed.
        emulate: Slows devices down on purpose; or None.
        exchange: The exchange on the host; None for an exchange on the devices.
        split: Parts of a microbatch by kind of device, see `checked_split`.
        device_loss: Whether the metrics include each device's own loss.
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
    split: Mapping[str, int | Literal["auto"]] = field(default_factory=dict)
    device_loss: bool = False

    def shared(self) -> dict[str, Any]:
        """Return the options that all processes of a job must set alike, by argument name."""
        scale: float | Described = self.precision.scale
        if self.loss_scale is not None:  # dynamic: by its initial value
            scale = Described.of(repr(jax.device_get(self.loss_scale)))
        return {
            "averaging": settings_of(self.rule),
            "exchange": settings_of(self.exchange),
            "nonfinite": settings_of(self.finite),
            "guard": settings_of(self.guard),
            "max_grad_norm": self.max_grad_norm,
            "compute_dtype": self.precision.compute_dtype,
            "loss_scale": scale,
            "verify_every": self.verify_every,
            "device_loss": self.device_loss,
            "jax_enable_x64": setting("enable_x64"),
        }

    def finite_watch(self, devices: tuple[jax.Device, ...]) -> FiniteWatch:
        """Return the watch for windows with non-finite values."""
        return FiniteWatch(self.finite, devices, GRADIENTS if self.averaging is None else AVERAGES)

    @property
    def reserved(self) -> list[Reserved]:
        """Names that the loss's metrics must not use under these options."""
        used = {
            SCALE: self.loss_scale is not None,
            DEVICES: self.device_loss,
            LOCAL_STEPS: self.averaging is not None,
        }
        names = [names for names, is_used in used.items() if is_used]
        if isinstance(self.timeline, EpochRecorder):
            names += self.timeline.reserved
        return names

    @property
    def averaging(self) -> AveragingRule | None:
        """The rule, if it takes local steps; None for the mean gradient."""
        return self.rule if isinstance(self.rule, AveragingRule) else None

    @property
    def may_be_late(self) -> bool:
        """Whether means may be applied after later windows have begun, given several devices."""
        # on one device, too: the state's structure depends on it, and a checkpoint may move
        return self.rule.delay > 0 or (self.exchange is not None and self.exchange.run_ahead)

    @property
    def late(self) -> bool:
        """Like `may_be_late`, but for these devices: a single one has its mean at once."""
        return self.world_size > 1 and self.may_be_late

    @property
    def host(self) -> Limits | None:
        """Limits of the exchange on the host; None for an exchange on the devices."""
        exchange = self.exchange
        if exchange is None or self.world_size == 1:
            return None
        bounds = exchange.max_overshoot, exchange.max_batch_diff
        return Limits(exchange.timeout, self.may_be_late, self.rule.delay or None, *bounds)

    @property
    def pending(self) -> int:
        """Number of windows pending in a state: their mean is not applied yet.

        Windows that an exchange on the host has not averaged yet are not part of the state.
        """
        return self.rule.delay if self.late and self.exchange is None else 0
