"""Checks for the fields of frozen dataclasses, which are stored as plain numbers."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

from elche_jax import _check as check


class CheckedFields:
    """Mixin for frozen dataclasses: checks the fields that state their bounds.

    A field with bounds in its ``metadata`` must be an integer if it is annotated as one, and
    otherwise a finite number. The bounds are ``low``, ``high`` and, for numbers, ``above``.
    ``None`` is allowed if it is the default.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.

    Examples:
        >>> from dataclasses import dataclass, field
        >>> @dataclass(frozen=True)
        ... class Rule(CheckedFields):
        ...     anchor: int = field(default=10, metadata={"low": 1})
        >>> Rule(0)
        Traceback (most recent call last):
        ...
        ValueError: Rule: anchor must be at least 1, got 0.
    """

    def __post_init__(self) -> None:
        for field in fields(cast(Any, self)):
            bounds = _bounds(type(self), field.name)
            unset = field.default is None and getattr(self, field.name) is None
            if bounds and not unset:
                # types, not their names: in a file that postpones annotations, integers would
                # become floats
                rule = check.integer if field.type in (int, int | None) else check.real
                keep_checked(self, field.name, rule, **bounds)


def _bounds(kind: type, name: str) -> Mapping[str, Any]:
    """Return the bounds of a field; a subclass that gives it another default has its base's."""
    own: dict[str, Any] = vars(kind).get("__dataclass_fields__", {})
    if name in own and own[name].metadata:
        return own[name].metadata
    found = (_bounds(base, name) for base in kind.__bases__)
    return next(filter(None, found), {})


def keep_checked(config: object, name: str, rule: Callable[..., Any], **bounds: Any) -> None:
    """Check a field of a frozen dataclass and store it as plain numbers.

    Args:
        config: The dataclass, in its ``__post_init__``.
        name: Name of the field.
        rule: `integer`, `integers`, `real` or `reals` of `elche_jax._check`.
        **bounds: Keyword arguments of the rule.

    Raises:
        TypeError: If the value is of the wrong type.
        ValueError: If the value is not finite, or out of range.
    """
    value = rule(type(config).__name__, name, getattr(config, name), **bounds)
    object.__setattr__(config, name, value)
