"""`DDPConfig`: a flat bundle of settings, resolved into the objects that hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from elche_jax import _check as check
from elche_jax.averaging.exchange import HostExchange
from elche_jax.averaging.rules import AveragingRule, MeanGradient, changed, check_late
from elche_jax.cadence import Balanced, Cadence, ElChe, EveryBatch
from elche_jax.cadence.apportion import MAX_TOTAL
from elche_jax.cadence.hint import SpeedHint, checked_hint, speeds_of_kinds

Policy = Literal["auto", "sync", "cadence", "async"]
POLICIES = ("auto", "sync", "cadence", "async")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
EXCHANGE_DTYPES = ("float32", "bfloat16")
EXCHANGES = ("device", "host")
ARGUMENTS = ("max_grad_norm", "compute_dtype", "verify_every", "timeline")
"""Fields that are arguments of `build_train_step`."""

CADENCE_KNOBS = (
    "policy", "anchor", "overhead_target", "max_anchor", "total", "max_batch_diff", "speed_hint",
)  # fmt: skip


@runtime_checkable
class Recorder(Protocol):
    """Records the events of a run, as an `elche_jax.observe.timeline.Timeline` does."""

    def window(self, record: Any) -> None:
        """Record a finished window."""
        ...

    def add(self, kind: Any, **values: Any) -> None:
        """Record an event of another kind."""
        ...


@dataclass(frozen=True)
class DDPConfig(check.CheckedFields):
    """Settings of a training step in one flat place, for scripts and command lines.

    Each field stands for an attribute of an object that `build_train_step` takes (a cadence,
    a rule such as `MeanGradient`, a `HostExchange`) or for its argument of the same name.
    Setting something in both places is an error; only `exchange_dtype` and `policy="async"` may
    repeat what a rule says.

    `max_anchor` limits the cadence: None leaves the limit to the cadence, `n` caps the anchor,
    and 0 switches the cadence off. The last is classic data parallel training with a constant
    global batch and a balancer: `Balanced(total)` divides

        total = anchor * world_size    (or `total`, if given)

    microbatches per window by measured speed, whatever the kinds of the devices. It requires
    `policy="auto"`, and fields without effect beside it are errors.

    Attributes:
        policy: `"auto"`: `"cadence"` if the devices are of several kinds, `"sync"` if they
            are alike. `"sync"`: one microbatch per device and window. `"cadence"`: `ElChe`
            sizes the windows. `"async"`: the same (or another cadence), and devices do not
            wait for the exchange of a window: the rule gets `delay=1` or, with
            `exchange="host"`, devices run ahead, see `HostExchange`. A single device has no
            cadence: every microbatch is a step. Under an outer optimizer, unless this is
            `"sync"`, a window has `anchor` microbatches, or the rule's `inner_steps`.
        anchor: First count of the slowest device, at least 1, see `ElChe`. With
            `max_anchor=0`, the mean count of a device if `total` is None.
        overhead_target: Share of a window that synchronisation may cost, in
            `[0.01, 0.50]`, see `ElChe`.
        max_anchor: Largest anchor, at least 1, see `ElChe`; a value below `anchor` applies
            from the first report on. None: 200, or `anchor` if that is larger. 0: the
            balancer, as above.
        max_batch_diff: Largest change of a count per window, at least 1, see `ElChe`;
            None for no bound. Under `"async"` with `exchange="host"`, also the
            `max_batch_diff` of `HostExchange`.
        speed_hint: Prior knowledge of the speeds, in any form that `ElChe` takes; used by
            the balancer, too.
        max_grad_norm: See `build_train_step`.
        compute_dtype: See `build_train_step`.
        exchange_dtype: Dtype in which contributions are sent, float32 (float64 for float64
            parameters) or bfloat16: the rule's `compression`.
        verify_every: See `build_train_step`.
        total: Microbatches per window over all devices with `max_anchor=0`, at least 1;
            None: `anchor` for each device. Without effect on a single device.
        timeline: See `build_train_step`.
        exchange: Where contributions become a mean. `"device"`: on the devices. `"host"`: on
            the host, see `HostExchange`.
        exchange_timeout: `timeout` of `HostExchange`; only with `exchange="host"`.
        max_overshoot: See `HostExchange`; only under `"async"` with `exchange="host"`.

    Raises:
        ValueError: If a value is out of range or contradicts another one.
        TypeError: If a value has the wrong type.

    Examples:
        >>> from elche_jax import DDPConfig
        >>> DDPConfig(policy="cadence", speed_hint=(1, 2.3)).cadence_for(2, kinds=1)
        ... # doctest: +ELLIPSIS
        ElChe(anchor=10, ..., speed_hint=(1, 2.3), rests=True)
        >>> DDPConfig(max_anchor=0, anchor=4).cadence_for(3, kinds=1).total
        12
    """

    policy: Policy = "auto"
    anchor: int = field(default=10, metadata={"low": 1})
    overhead_target: float = 0.10
    max_anchor: int | None = field(default=None, metadata={"low": 0})
    max_batch_diff: int | None = None
    speed_hint: tuple[int, float] | SpeedHint | None = None
    max_grad_norm: float | None = None
    compute_dtype: DTypeLike | None = None
    exchange_dtype: DTypeLike = "float32"
    verify_every: int | None = None
    total: int | None = field(default=None, metadata={"low": 1, "high": MAX_TOTAL})
    timeline: Recorder | None = None
    exchange: str = "device"
    exchange_timeout: float = field(default=HostExchange.timeout, metadata={"above": 0})
    max_overshoot: int | None = field(default=None, metadata={"low": 0})

    def __post_init__(self) -> None:
        check.one_of("DDPConfig", "policy", self.policy, POLICIES)
        super().__post_init__()
        for name in ("compute_dtype", "exchange_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name)))
        check_arguments("DDPConfig", **{name: getattr(self, name) for name in ARGUMENTS})
        check.one_of("DDPConfig", "exchange_dtype", self.exchange_dtype, EXCHANGE_DTYPES)
        self._check_exchange()
        object.__setattr__(self, "speed_hint", checked_hint("DDPConfig", self.speed_hint))
        self.elche()  # checks the others
        if self.max_anchor == 0:
            self._check_balancer()
        else:
            todo = "Pass max_anchor=0 with it."
            self._check_unset("total", "be None unless max_anchor is 0", todo)

    def cadence_for(self, world_size: int, kinds: int) -> Cadence[Any]:
        """Return the cadence that these settings select on a machine.

        Args:
            world_size: Number of devices.
            kinds: Number of different device kinds among them.

        Returns:
            `EveryBatch` for one device. Otherwise `Balanced` if `max_anchor` is 0, or `ElChe`
            or `EveryBatch`, depending on `policy`.

        Raises:
            ValueError: If `speed_hint` does not fit the number of devices.

        Examples:
            >>> from elche_jax import DDPConfig
            >>> DDPConfig(max_anchor=0, total=64).cadence_for(4, kinds=1).init(4).counts
            (16, 16, 16, 16)
        """
        if world_size <= 1:
            return EveryBatch()
        balances = self.max_anchor == 0
        cadence = self._balanced(world_size) if balances else self.elche()
        cadence.init(world_size)  # checks the hint, used or not
        unlike = self.policy in ("cadence", "async") or (self.policy == "auto" and kinds > 1)
        return cadence if balances or unlike else EveryBatch()

    def for_kinds(self, kinds: Sequence[str]) -> "DDPConfig":
        """Return the settings for devices of these kinds, with one hinted speed per device."""
        if not isinstance(self.speed_hint, Mapping):
            return self
        return replace(self, speed_hint=speeds_of_kinds("DDPConfig", self.speed_hint, kinds))

    def cadence_knobs(self) -> list[str]:
        """Return the non-default settings that select the cadence, as `name=value`.

        Settings that only determine how late means are applied are left out.
        """
        late = ["policy='async'"]
        if self.exchange == "host" and self.policy == "async":
            late.append(f"max_batch_diff={self.max_batch_diff!r}")
        mine = [knob for knob in fields(self) if knob.name in CADENCE_KNOBS]
        chosen = [knob.name for knob in mine if getattr(self, knob.name) != knob.default]
        said = [f"{name}={getattr(self, name)!r}" for name in chosen]
        return [knob for knob in said if knob not in late]

    def rule(
        self, averaging: AveragingRule | MeanGradient | None = None, run_ahead: bool | None = None
    ) -> AveragingRule | MeanGradient:
        """Return a rule with the settings of the exchange filled in.

        Args:
            averaging: The rule; None for the mean gradient.
            run_ahead: Whether devices run ahead of the exchange, which is then late without a
                `delay`; None to follow these settings.

        Raises:
            ValueError: If the rule contradicts a setting, or cannot be late, as
                `policy="async"` requires.

        Examples:
            >>> from elche_jax import DDPConfig
            >>> DDPConfig(policy="async", exchange_dtype="bfloat16").rule()
            MeanGradient(compression='bfloat16', delay=1)
        """
        rule = MeanGradient() if averaging is None else averaging
        if self.exchange_dtype != "float32":
            if rule.compression not in (None, self.exchange_dtype):
                must = f"be left out with {type(rule).__name__}(compression={rule.compression!r})"
                got = repr(self.exchange_dtype)
                raise ValueError(check.message("DDPConfig", "exchange_dtype", must, got))
            rule = changed(rule, compression=self.exchange_dtype)
        if self.policy == "async":
            if isinstance(rule, AveragingRule):
                check_late(rule, "policy='async'")
            if not (self.exchange == "host" if run_ahead is None else run_ahead):
                rule = changed(rule, delay=max(1, rule.delay))
        return rule

    def host_exchange(self) -> HostExchange | None:
        """Return the exchange on the host that these settings select, or None.

        Examples:
            >>> from elche_jax import DDPConfig
            >>> DDPConfig(exchange="host", exchange_timeout=5.0).host_exchange().timeout
            5.0
        """
        if self.exchange == "device":
            return None
        if self.policy != "async":
            return HostExchange(self.exchange_timeout)
        return HostExchange(self.exchange_timeout, True, self.max_overshoot, self.max_batch_diff)

    def or_given(self, **arguments: Any) -> dict[str, Any]:
        """Return arguments of `build_train_step`, filled in from the fields of the same names.

        Args:
            **arguments: The arguments as given; None for those that were not.

        Raises:
            ValueError: If one is given in both places.
        """
        both = {name: getattr(self, name) for name, value in arguments.items() if value is not None}
        for name, mine in both.items():
            if mine is not None:
                rule = f"be left out where config sets it ({mine!r})"
                got = repr(arguments[name])
                raise ValueError(check.message("build_train_step", name, rule, got))
        return {name: getattr(self, name) for name in arguments} | {
            name: arguments[name] for name in both
        }

    def _check_exchange(self) -> None:
        where = "DDPConfig"
        if isinstance(self.exchange, HostExchange):
            rule, todo = "be 'device' or 'host'", "Pass the object to build_train_step."
            raise TypeError(check.message(where, "exchange", rule, self.exchange, todo))
        check.one_of(where, "exchange", self.exchange, EXCHANGES)
        if self.exchange != "host" or self.policy != "async":
            rule = "be None unless exchange='host' and policy='async'"
            todo = "Otherwise no device runs ahead; leave it out."
            self._check_unset("max_overshoot", rule, todo)
        if self.exchange != "host":
            rule = f"be left at {HostExchange.timeout} unless exchange='host'"
            self._check_unset("exchange_timeout", rule, "Leave it out.")

    def _check_balancer(self) -> None:
        rule = "be 'auto' with max_anchor=0, which chooses the balancer"
        self._check_unset("policy", rule, "Leave out one of the two.")
        idle = {"overhead_target": "max_anchor=0", "max_batch_diff": "max_anchor=0"}
        if self.total is not None:
            idle["anchor"] = f"total={self.total}"
        elif self.anchor == 1:
            idle["speed_hint"] = "max_anchor=0 and anchor=1, one microbatch each"
        for name, why in idle.items():
            rule = f"be left at {getattr(type(self), name)} with {why}"
            self._check_unset(name, rule, "It has no effect there; leave it out.")

    def _check_unset(self, name: str, rule: str, todo: str) -> None:
        """Check that a setting which has no effect, or contradicts another, has its default."""
        value = getattr(self, name)
        if value != getattr(type(self), name):
            raise ValueError(check.message("DDPConfig", name, rule, repr(value), todo))

    def _balanced(self, world_size: int) -> Balanced:
        total = self.anchor * world_size if self.total is None else self.total
        # On many devices, the default floor would be an equal share or more.
        floor = min(Balanced.min_ratio, 0.5 / world_size)
        return Balanced(total, min_ratio=floor, speed_hint=self.speed_hint)

    def elche(self) -> ElChe:
        """Return an `ElChe` with these settings."""
        # the default maximum must not lower the anchor that was asked for
        highest = self.max_anchor or max(ElChe.max_anchor, self.anchor)
        return ElChe(
            anchor=self.anchor,
            overhead_target=self.overhead_target,
            max_anchor=highest,
            max_batch_diff=self.max_batch_diff,
            speed_hint=self.speed_hint,
        )


def check_arguments(
    where: str,
    max_grad_norm: float | None,
    compute_dtype: str | None,
    verify_every: int | None,
    timeline: Recorder | None,
) -> None:
    """Check the arguments of `build_train_step` that `DDPConfig` also has as fields.

    Raises:
        TypeError: If one has the wrong type.
        ValueError: If one is out of range.
    """
    if max_grad_norm is not None:
        check.real(where, "max_grad_norm", max_grad_norm, low=1e-30)
    if compute_dtype is not None:
        check.one_of(where, "compute_dtype", compute_dtype, COMPUTE_DTYPES)
    if verify_every is not None:
        check.integer(where, "verify_every", verify_every, low=1)
    check_timeline(where, timeline)


def dtype_name(dtype: DTypeLike | None) -> Any:
    """Return the name of a dtype such as `jnp.bfloat16`; anything else is returned as it is.

    Examples:
        >>> import jax.numpy as jnp
        >>> dtype_name(jnp.bfloat16)
        'bfloat16'
    """
    if not isinstance(dtype, type | np.dtype):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return dtype


def check_timeline(where: str, timeline: Recorder | None) -> None:
    """Check that a timeline can record a run.

    Raises:
        TypeError: If it cannot.
    """
    if timeline is not None:
        rule, todo = "be a Timeline", "Pass elche_jax.Timeline(path)."
        check.instance(where, "timeline", timeline, Recorder, rule, todo, no_class=True)
