"""The user's settings for the exchange on the host."""

from dataclasses import dataclass, field

import numpy as np

from elche_jax import _check as check


@dataclass(frozen=True)
class HostExchange(check.CheckedFields):
    """Exchange on the host: devices deliver their contributions, and none waits in a collective.

    A device that has not delivered `timeout` seconds after the first delivery is *late*: the
    window is averaged without it, and it gets no work until it has delivered. With `run_ahead`,
    devices continue with later windows while a window is averaged, and apply its mean as soon
    as it is known. In a job of several processes they apply it as late as the bounds below allow,
    so that all processes apply it at the same window.

    Attributes:
        timeout: Seconds after the first delivery of a window until a device is late, above 0.
        run_ahead: Whether devices continue while a window is averaged. If not, the rule's
            `delay` determines how late means are applied.
        max_overshoot: With `run_ahead`, the largest number of microbatches that a device may
            begin beyond the oldest window that is not averaged, at least 0. With 0, each window
            waits for the average of the previous one. Never more than three windows; None for
            one window.
        max_batch_diff: With `run_ahead`, the largest number of microbatches that a device may
            begin beyond the oldest window that some device has not delivered, at least 1;
            None for no bound. In a job of several processes it is a bound on the same number as
            `max_overshoot`.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or has no effect without `run_ahead`.

    Examples:
        >>> import elche_jax as elche
        >>> elche.HostExchange(timeout=10).run_ahead
        False
    """

    timeout: float = field(default=60.0, metadata={"above": 0})
    run_ahead: bool = False
    max_overshoot: int | None = field(default=None, metadata={"low": 0})
    max_batch_diff: int | None = field(default=None, metadata={"low": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "HostExchange"
        check.instance(where, "run_ahead", self.run_ahead, bool | np.bool_, "be a bool")
        for name in ("max_overshoot", "max_batch_diff"):
            value = getattr(self, name)
            if value is not None and not self.run_ahead:
                todo = "Otherwise no device runs ahead; leave it out."
                rule = "be None unless run_ahead=True"
                raise ValueError(check.message(where, name, rule, value, todo))
