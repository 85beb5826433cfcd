"""`DDPConfig`: the flat bundle of knobs, resolved into the objects that do the work."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

from elche_jax import _check as check
from elche_jax.cadence import Balanced, Cadence, ElChe, EveryBatch
from elche_jax.cadence.apportion import MAX_TOTAL
from elche_jax.cadence.hint import checked_hint

Policy = Literal["auto", "sync", "cadence", "async"]
POLICIES = ("auto", "sync", "cadence", "async")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
EXCHANGE_DTYPES = ("float32", "bfloat16")
EXCHANGES = ("device", "host")
CADENCE_KNOBS = (
    "policy", "anchor", "overhead_target", "max_anchor", "total", "max_batch_diff", "speed_hint",
)  # fmt: skip


@runtime_checkable
class Recorder(Protocol):
    """What a run tells its events to; an `elche_jax.observe.timeline.Timeline` is one."""

    def window(self, record: Any) -> None:
        """Takes a window that is over."""
        ...

    def add(self, kind: Any, **values: Any) -> None:
        """Takes an event of another kind."""
        ...


@dataclass(frozen=True)
class DDPConfig:
    """All knobs of a training step in one place, for scripts and command lines.

    `max_anchor` says how far the cadence may go: None leaves it to the cadence, `n` caps
    it, and 0 switches it off. That is classic data parallel, a constant global batch, with
    the balancer: `Balanced(total)` shares out

        total = anchor * world_size    (or `total`, where it is given)

    microbatches per window by measured speed, whatever the kinds of the devices. It is a
    choice of its own, so it goes with `policy="auto"` only, and a knob that could have no
    effect beside it on any machine is an error.

    Attributes:
        policy: `"auto"`: `"cadence"` where the devices are of several kinds, `"sync"`
            where they are alike. `"sync"`: one microbatch per device and window.
            `"cadence"`: `ElChe` sizes the windows. `"async"`: the same (or a cadence of
            your own), and nobody waits for the exchange of a window: `delay=1`, or devices
            that run ahead with `exchange="host"`. With one device there is no cadence: every
            microbatch is a step.
        anchor: First count of the slowest device, at least 1, see `ElChe`. With
            `max_anchor=0` the mean count of a device, where `total` is not given.
        overhead_target: Share of a window that synchronising may cost, in
            `[0.01, 0.50]`, see `ElChe`.
        max_anchor: Largest anchor, at least 1, see `ElChe`: one below `anchor` binds from
            the first report on. None: 200, or `anchor` where that is larger. 0: the
            balancer, as above.
        max_batch_diff: Largest change of a count per window, at least 1, see `ElChe`;
            None for no bound. Under `"async"` with `exchange="host"` also the most
            microbatches that a device may begin beyond the oldest window that some device
            has not delivered.
        speed_hint: What is known of the speeds beforehand, in either form that `ElChe`
            takes; for the balancer, too.
        max_grad_norm: Clips each device's mean gradient to this global norm before the
            exchange; above 0, or None. (To clip the combined gradient, put
            `optax.clip_by_global_norm` into the optimizer.)
        compute_dtype: `"bfloat16"` or `"float16"`: `loss_fn` gets the float leaves of the
            parameters and of the batch in this type; parameters, gradients' sums and
            optimizer stay in theirs. None: everything as it is.
        exchange_dtype: Type in which what is exchanged travels between devices, `"float32"` or
            `"bfloat16"`; they are summed in float32 either way.
        verify_every: Compare the replicas bit by bit after every so many windows, at
            least 1; None: never.
        total: Microbatches per window over all devices with `max_anchor=0`, at least 1;
            None: `anchor` for each device. One device has no cadence, see `policy`, and
            thus no use for it.
        timeline: Records the run, a `Timeline`; None: nothing is recorded.
        exchange: Where the mean of what devices did is made. `"device"`: by the devices among
            themselves. `"host"`: every device delivers what it did when it is done, and no device
            waits in a collective; one that is late is left out. Under `"async"` devices
            then go on while a window is averaged.
        exchange_timeout: Seconds after the first delivery of a window until a device is
            late, above 0; with `exchange="host"`.
        max_overshoot: Under `"async"` with `exchange="host"`: most microbatches that a
            device may begin beyond the oldest window that is not averaged, at least 0 (a
            window waits for the average of the one before); never more than three
            windows. None: one window.

    Raises:
        ValueError: A knob is out of range, or contradicts another one.
        TypeError: A knob is of another type.

    Examples:
        >>> from elche_jax import DDPConfig
        >>> DDPConfig(policy="cadence", speed_hint=(1, 2.3)).cadence_for(2, kinds=1)
        ... # doctest: +ELLIPSIS
        ElChe(anchor=10, ..., speed_hint=(1, 2.3))
        >>> DDPConfig(max_anchor=0, anchor=4).cadence_for(3, kinds=1).total
        12
    """

    policy: Policy = "auto"
    anchor: int = 10
    overhead_target: float = 0.10
    max_anchor: int | None = None
    max_batch_diff: int | None = None
    speed_hint: tuple[int, float] | Sequence[float] | None = None
    max_grad_norm: float | None = None
    compute_dtype: str | None = None
    exchange_dtype: str = "float32"
    verify_every: int | None = None
    total: int | None = None
    timeline: Recorder | None = None
    exchange: str = "device"
    exchange_timeout: float = 60.0
    max_overshoot: int | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"DDPConfig: policy must be one of {', '.join(POLICIES)}, got {self.policy!r}."
            )
        if self.max_grad_norm is not None:
            check.real("DDPConfig", "max_grad_norm", self.max_grad_norm, low=1e-30)
        if self.compute_dtype is not None:
            _check_one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _check_one_of("exchange_dtype", self.exchange_dtype, EXCHANGE_DTYPES)
        self._check_exchange()
        if self.verify_every is not None:
            check.integer("DDPConfig", "verify_every", self.verify_every, low=1)
        self._check_cadence()
        if self.timeline is not None and (
            isinstance(self.timeline, type) or not isinstance(self.timeline, Recorder)
        ):
            rule, got = "be a Timeline", check.describe(self.timeline)
            todo = "Pass elche_jax.Timeline(path)."
            raise TypeError(check.message("DDPConfig", "timeline", rule, got, todo))

    def cadence_for(self, world_size: int, kinds: int) -> Cadence[Any]:
        """The cadence that these knobs mean on a machine.

        Args:
            world_size: Number of devices.
            kinds: Number of different device kinds among them.

        Returns:
            `EveryBatch` with one device. With more, `Balanced` where `max_anchor` is 0;
            else `ElChe` or `EveryBatch`, as `policy` says.

        Raises:
            ValueError: `speed_hint` does not fit the number of devices.

        Examples:
            >>> from elche_jax import DDPConfig
            >>> DDPConfig(max_anchor=0, total=64).cadence_for(4, kinds=1).init(4).counts
            (16, 16, 16, 16)
        """
        if world_size <= 1:
            return EveryBatch()
        if self.max_anchor == 0:
            balanced = self._balanced(world_size)
            balanced.init(world_size)  # checks the hint
            return balanced
        self.elche().init(world_size)  # checks the hint, used or not
        unlike = self.policy in ("cadence", "async") or (self.policy == "auto" and kinds > 1)
        return self.elche() if unlike else EveryBatch()

    def cadence_knobs(self) -> list[str]:
        """The knobs of the cadence that differ from their defaults, as `name=value`."""
        mine = [field for field in fields(self) if field.name in CADENCE_KNOBS]
        values = {field.name: getattr(self, field.name) for field in mine}
        return [f"{f.name}={values[f.name]!r}" for f in mine if values[f.name] != f.default]

    def _check_cadence(self) -> None:
        where = "DDPConfig"
        plain: dict[str, Any] = {"anchor": check.integer(where, "anchor", self.anchor, low=1)}
        if self.max_anchor is not None:
            plain["max_anchor"] = check.integer(where, "max_anchor", self.max_anchor, low=0)
        if self.total is not None:
            plain["total"] = check.integer(where, "total", self.total, low=1, high=MAX_TOTAL)
        if self.speed_hint is not None:
            plain["speed_hint"] = checked_hint(where, self.speed_hint)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        self.elche()  # checks the others
        if self.max_anchor == 0:
            self._check_balancer()
        elif self.total is not None:
            rule, todo = "be None unless max_anchor is 0", "Pass max_anchor=0 with it."
            raise ValueError(check.message(where, "total", rule, self.total, todo))

    def _check_exchange(self) -> None:
        where = "DDPConfig"
        _check_one_of("exchange", self.exchange, EXCHANGES)
        check.real(where, "exchange_timeout", self.exchange_timeout, above=0)
        ahead = self.exchange == "host" and self.policy == "async"
        if self.max_overshoot is not None:
            check.integer(where, "max_overshoot", self.max_overshoot, low=0)
            if not ahead:
                rule = "be None unless exchange='host' and policy='async'"
                todo = "Else no device runs ahead; leave it out."
                raise ValueError(
                    check.message(where, "max_overshoot", rule, self.max_overshoot, todo)
                )
        if self.exchange != "host" and self.exchange_timeout != 60.0:
            rule, todo = "be left at 60.0 unless exchange='host'", "Leave it out."
            raise ValueError(
                check.message(where, "exchange_timeout", rule, self.exchange_timeout, todo)
            )

    def _check_balancer(self) -> None:
        where = "DDPConfig"
        if self.policy != "auto":
            rule = "be 'auto' with max_anchor=0, which chooses the balancer"
            todo = "Leave out one of the two."
            raise ValueError(check.message(where, "policy", rule, repr(self.policy), todo))
        idle = {"overhead_target": "max_anchor=0", "max_batch_diff": "max_anchor=0"}
        if self.total is not None:
            idle["anchor"] = f"total={self.total}"
        elif self.anchor == 1:
            idle["speed_hint"] = "max_anchor=0 and anchor=1, one microbatch each"
        for knob in fields(self):
            value = getattr(self, knob.name)
            if knob.name in idle and value != knob.default:
                rule = f"be left at {knob.default} with {idle[knob.name]}"
                todo = "It has no effect there; leave it out."
                raise ValueError(check.message(where, knob.name, rule, value, todo))

    def _balanced(self, world_size: int) -> Balanced:
        total = self.anchor * world_size if self.total is None else self.total
        # The default floor would be an equal share, or more than that, on many devices.
        floor = min(Balanced.min_ratio, 0.5 / world_size)
        return Balanced(total, min_ratio=floor, speed_hint=self.speed_hint)

    def elche(self) -> ElChe:
        """The cadence `ElChe` with these knobs."""
        # No ceiling was asked for, so none may lower the anchor that was.
        highest = self.max_anchor or max(ElChe.max_anchor, self.anchor)
        return ElChe(
            anchor=self.anchor,
            overhead_target=self.overhead_target,
            max_anchor=highest,
            max_batch_diff=self.max_batch_diff,
            speed_hint=self.speed_hint,
        )


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        rule = f"be one of {', '.join(map(repr, choices))}"
        raise ValueError(check.message("DDPConfig", name, rule, repr(value)))
