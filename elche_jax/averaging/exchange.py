"""Where the mean of what devices did is made: the user's choice."""

from dataclasses import dataclass

from elche_jax import _check as check


@dataclass(frozen=True)
class HostExchange:
    """The mean is made on the host: devices deliver what they did, and none waits in a collective.

    A device that has not delivered `timeout` seconds after the first one is *late*: the window
    is averaged without it, and it gets no work until it is back. With `run_ahead` devices go on
    with later windows while one is averaged; its mean is applied as soon as it is there.

    Attributes:
        timeout: Seconds after the first delivery of a window until a device is late, above 0.
        run_ahead: Whether devices go on while a window is averaged. Without it, a rule's
            `delay` says how late means are applied.
        max_overshoot: With `run_ahead`: most microbatches that a device may begin beyond the
            oldest window that is not averaged, at least 0 (a window waits for the average of
            the one before); never more than three windows. None: one window.
        max_batch_diff: With `run_ahead`: most microbatches that a device may begin beyond the
            oldest window that some device has not delivered, at least 1; None for no bound.

    Raises:
        TypeError: A value is of another type.
        ValueError: A value is out of range, or has no effect without `run_ahead`.

    Examples:
        >>> import elche_jax as elche
        >>> elche.HostExchange(timeout=10).run_ahead
        False
    """

    timeout: float = 60.0
    run_ahead: bool = False
    max_overshoot: int | None = None
    max_batch_diff: int | None = None

    def __post_init__(self) -> None:
        where = "HostExchange"
        check.real(where, "timeout", self.timeout, above=0)
        check.instance(where, "run_ahead", self.run_ahead, bool)
        for name, low in (("max_overshoot", 0), ("max_batch_diff", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            check.integer(where, name, value, low=low)
            if not self.run_ahead:
                todo = "Otherwise no device runs ahead; leave it out."
                rule = "be None unless run_ahead=True"
                raise ValueError(check.message(where, name, rule, value, todo))
