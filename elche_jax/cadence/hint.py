"""The two forms of a speed hint, for `ElChe` and `Balanced`.

``(slow_rank, ratio)``: one device is the slowest, all others are ``ratio`` times as fast.
Or one relative speed per device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from elche_jax import _check as check

WIDEST = 2**53
"""Largest ratio of two devices' speeds, as counts must fit an int64."""

_TWO = (
    "A tuple of two that starts with an int means (slow_rank, ratio); "
    "write the speeds of two devices as a list."
)


def checked_hint(where: str, hint: object) -> tuple[Any, ...] | None:
    """Return a hint as plain numbers, checked as far as possible without the devices.

    Args:
        where: The class the user called, for the message.
        hint: ``(slow_rank, ratio)``, which a **tuple of two that starts with an int** always
            means; or a sequence or array with one speed per device; or ``None``.

    Returns:
        ``(int, float)`` or a tuple of floats, which is itself a hint of the same meaning;
        or ``None``.

    Raises:
        TypeError: If the hint is not a sequence, or an entry not a number.
        ValueError: If ``slow_rank`` is negative, ``ratio`` is below 1, a speed is not
            above 0, the hint is empty, or the fastest device is more than 2**53 times as
            fast as the slowest.

    Examples:
        >>> checked_hint("ElChe", (1, 2))
        (1, 2.0)
        >>> checked_hint("ElChe", [1, 2])
        (1.0, 2.0)
    """
    if hint is None:
        return None
    entries = check.items(where, "speed_hint", hint, "numbers")
    if isinstance(hint, tuple) and len(entries) == 2 and isinstance(entries[0], int | np.integer):
        rank = check.integer(where, "speed_hint slow_rank", entries[0], low=0, todo=_TWO)
        ratio = check.real(where, "speed_hint ratio", entries[1], low=1, high=WIDEST, todo=_TWO)
        return (rank, ratio)
    speeds = check.reals(where, "speed_hint", entries, above=0)
    if not speeds:
        raise ValueError(check.message(where, "speed_hint", "have one entry per device", "none"))
    if max(speeds) / min(speeds) > WIDEST:
        rule = f"have no speed more than {WIDEST} times another"
        raise ValueError(check.message(where, "speed_hint", rule, speeds))
    return speeds


def hinted_speeds(where: str, hint: Sequence[float] | None, world_size: int) -> tuple[float, ...]:
    """Return the relative speed of each device according to a hint.

    Args:
        where: The method the user called, for the message.
        hint: What `checked_hint` returned.
        world_size: Number of devices.

    Returns:
        One speed per device, above 0, larger is faster; only the ratios matter. Without a
        hint all are equal.

    Raises:
        ValueError: If the hint is for another number of devices.

    Examples:
        >>> hinted_speeds("ElChe.init", (1, 2.3), world_size=3)
        (2.3, 1.0, 2.3)
        >>> hinted_speeds("ElChe.init", (1.0, 2.3), world_size=2)
        (1.0, 2.3)
    """
    if hint is None:
        return (1.0,) * world_size
    if len(hint) != 2 or not isinstance(hint[0], int):
        check.per_device(where, "speed_hint", len(hint), world_size)
        return tuple(hint)
    slow_rank, ratio = hint
    if slow_rank >= world_size:
        rule = f"be below world_size ({world_size})"
        raise ValueError(check.message(where, "speed_hint slow_rank", rule, slow_rank, _TWO))
    return tuple(1.0 if rank == slow_rank else ratio for rank in range(world_size))
