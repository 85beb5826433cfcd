"""`DDPConfig`: the flat bundle of knobs, resolved into the objects that do the work."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from elche_jax import _check as check
from elche_jax.cadence import Cadence, ElChe, EveryBatch

Policy = Literal["auto", "sync", "cadence"]
POLICIES = ("auto", "sync", "cadence")


@dataclass(frozen=True)
class DDPConfig:
    """All knobs of a training step in one place, for scripts and command lines.

    Attributes:
        policy: `"auto"`: `"cadence"` where the devices are of several kinds, `"sync"`
            where they are alike. `"sync"`: one microbatch per device and window.
            `"cadence"`: `ElChe` sizes the windows. With one device there is no cadence:
            every microbatch is a step.
        anchor: First count of the slowest device, see `ElChe`.
        overhead_target: Share of a window that synchronising may cost, see `ElChe`.
        max_anchor: Largest anchor, see `ElChe`.
        max_batch_diff: Largest change of a count per window, see `ElChe`.
        speed_hint: What is known of the speeds beforehand, see `ElChe`.
        max_grad_norm: Clips each device's mean gradient to this global norm before the
            exchange; above 0, or None. (To clip the combined gradient, put
            `optax.clip_by_global_norm` into the optimizer.)

    Raises:
        ValueError: A knob is out of range.
        TypeError: A knob is of another type.

    Example:
        >>> from elche_jax import DDPConfig
        >>> DDPConfig(policy="cadence", speed_hint=(1, 2.3)).cadence_for(2, kinds=1)
        ... # doctest: +ELLIPSIS
        ElChe(anchor=10, ..., speed_hint=(1, 2.3))
    """

    policy: Policy = "auto"
    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int = 200
    max_batch_diff: int | None = None
    speed_hint: tuple[int, float] | Sequence[float] | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"DDPConfig: policy must be one of {', '.join(POLICIES)}, got {self.policy!r}."
            )
        if self.max_grad_norm is not None:
            check.real("DDPConfig", "max_grad_norm", self.max_grad_norm, above=0)
        self._elche()  # checks the knobs of the cadence

    def cadence_for(self, world_size: int, kinds: int) -> Cadence[Any]:
        """The cadence that these knobs mean on a machine.

        Args:
            world_size: Number of devices.
            kinds: Number of different device kinds among them.

        Raises:
            ValueError: `speed_hint` does not fit the number of devices.
        """
        if world_size > 1:
            self._elche().init(world_size)  # checks the hint, used or not
        unlike = self.policy == "cadence" or (self.policy == "auto" and kinds > 1)
        return self._elche() if unlike and world_size > 1 else EveryBatch()

    def cadence_knobs(self) -> list[str]:
        """The knobs of the cadence that differ from their defaults, as `name=value`."""
        mine = [field for field in fields(self) if field.name != "max_grad_norm"]
        values = {field.name: getattr(self, field.name) for field in mine}
        return [f"{f.name}={values[f.name]!r}" for f in mine if values[f.name] != f.default]

    def _elche(self) -> ElChe:
        return ElChe(
            anchor=self.anchor,
            overhead_target=self.overhead_target,
            max_anchor=self.max_anchor,
            max_batch_diff=self.max_batch_diff,
            speed_hint=self.speed_hint,
        )
