"""The forms of a speed hint, for `ElChe` and `Balanced`.

``(slow_rank, ratio)``: one device is the slowest, all others are ``ratio`` times as fast.
Or one relative speed per device. Or one per kind of device: its ``device_kind``, or the name
of its backend if several backends have devices of that kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elche_jax import _check as check

WIDEST = 2**53
"""Largest ratio of two devices' speeds, as counts must fit an int64."""

_TWO = (
    "A tuple of two that starts with an int means (slow_rank, ratio); "
    "write the speeds of two devices as a list."
)


SpeedHint = Sequence[float] | Mapping[str, float]


def checked_hint(where: str, hint: object) -> tuple[Any, ...] | dict[str, float] | None:
    """Return a hint as plain numbers, checked as far as possible without the devices.

    Args:
        where: The class the user called, for the message.
        hint: ``(slow_rank, ratio)``, which is what a **tuple of two that starts with an int**
            always means; or a sequence or array with one speed per device; or a mapping of
            kinds to speeds; or ``None``.

    Returns:
        A hint with the same meaning: ``(int, float)``, a tuple of floats, a dict or ``None``.

    Raises:
        TypeError: If the hint is neither a sequence nor a mapping, or an entry not a number.
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
    if isinstance(hint, Mapping):
        return _checked_kinds(where, dict(hint))
    entries = check.items(where, "speed_hint", hint, "numbers")
    if isinstance(hint, tuple) and len(entries) == 2 and isinstance(entries[0], int | np.integer):
        rank = check.integer(where, "speed_hint slow_rank", entries[0], low=0, todo=_TWO)
        ratio = check.real(where, "speed_hint ratio", entries[1], low=1, high=WIDEST, todo=_TWO)
        return (rank, ratio)
    if not entries:
        raise ValueError(check.message(where, "speed_hint", "have one entry per device", "none"))
    return _checked_speeds(where, entries)


def _checked_speeds(where: str, entries: Sequence[Any]) -> tuple[float, ...]:
    speeds = check.reals(where, "speed_hint", entries, above=0)
    if max(speeds) / min(speeds) > WIDEST:
        rule = f"have no speed more than {WIDEST} times another"
        raise ValueError(check.message(where, "speed_hint", rule, speeds))
    return speeds


def _checked_kinds(where: str, hint: dict[Any, Any]) -> dict[str, float]:
    if not hint:
        raise ValueError(check.message(where, "speed_hint", "have one entry per kind", "none"))
    for kind in hint:
        if not isinstance(kind, str):
            rule = "map kinds of devices, such as 'cpu', to speeds"
            raise TypeError(check.message(where, "speed_hint", rule, kind))
    return dict(zip(hint, _checked_speeds(where, list(hint.values())), strict=True))


def speeds_of_kinds(where: str, hint: Mapping[str, float], kinds: Sequence[str]) -> list[float]:
    """Return one speed per device for a hint by kind.

    Args:
        where: The function the user called, for the message.
        hint: Speeds by kind.
        kinds: The kind of every device.

    Raises:
        ValueError: If the hint has a kind that no device is of, or lacks a device's kind.

    Examples:
        >>> speeds_of_kinds("ElChe", {"cpu": 1, "L4": 9}, ["L4", "L4", "cpu"])
        [9, 9, 1]
    """
    there = ", ".join(map(repr, dict.fromkeys(kinds)))
    for kind in hint:
        if kind not in kinds:
            rule, todo = f"name kinds of the devices ({there})", "Leave it out."
            raise ValueError(check.message(where, "speed_hint", rule, repr(kind), todo))
    for kind in kinds:
        if kind not in hint:
            rule = f"have a speed for every kind of device ({there})"
            raise ValueError(check.message(where, "speed_hint", rule, f"none for {kind!r}"))
    return [hint[kind] for kind in kinds]


def hinted_speeds(where: str, hint: SpeedHint | None, world_size: int) -> tuple[float, ...]:
    """Return the relative speed of each device according to a hint.

    Args:
        where: The method the user called, for the message.
        hint: What `checked_hint` returned.
        world_size: Number of devices.

    Returns:
        One speed per device, above 0, larger is faster; only the ratios matter. Without a
        hint, all speeds are equal.

    Raises:
        ValueError: If the hint is for a different number of devices, or by kind.

    Examples:
        >>> hinted_speeds("ElChe.init", (1, 2.3), world_size=3)
        (2.3, 1.0, 2.3)
        >>> hinted_speeds("ElChe.init", (1.0, 2.3), world_size=2)
        (1.0, 2.3)
    """
    if hint is None:
        return (1.0,) * world_size
    if isinstance(hint, Mapping):
        rule = "be one speed per device where the kinds of the devices are not known"
        todo = "build_train_step knows them; or call cadence.for_kinds."
        raise ValueError(check.message(where, "speed_hint", rule, dict(hint), todo))
    # checked speeds are floats, so a leading int is a rank
    if len(hint) != 2 or not isinstance(hint[0], int):
        check.per_device(where, "speed_hint", len(hint), world_size)
        return tuple(hint)
    slow_rank, ratio = hint
    if slow_rank >= world_size:
        rule = f"be below world_size ({world_size})"
        raise ValueError(check.message(where, "speed_hint slow_rank", rule, slow_rank, _TWO))
    return tuple(1.0 if rank == slow_rank else ratio for rank in range(world_size))
