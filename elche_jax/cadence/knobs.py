"""Checks for the fields of a frozen config, which are stored as plain numbers."""

from elche_jax import _check as check


def integer(config: object, name: str, *, low: int, high: int | None = None) -> None:
    """Check a field of a frozen config and keep it as a plain ``int``.

    Args:
        config: The config, in its ``__post_init__``.
        name: Name of the field.
        low: Smallest value allowed.
        high: Largest value allowed.

    Raises:
        TypeError: If the value is not an integer.
        ValueError: If it is out of range.
    """
    where = type(config).__name__
    value = check.integer(where, name, getattr(config, name), low=low, high=high)
    object.__setattr__(config, name, value)


def real(
    config: object,
    name: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
) -> None:
    """Check a field of a frozen config and keep it as a plain, finite ``float``.

    Args:
        config: The config, in its ``__post_init__``.
        name: Name of the field.
        low: Smallest value allowed.
        above: Value that must be exceeded.
        high: Largest value allowed.

    Raises:
        TypeError: If the value is not a number.
        ValueError: If it is not finite, or out of range.
    """
    where = type(config).__name__
    value = check.real(where, name, getattr(config, name), low=low, above=above, high=high)
    object.__setattr__(config, name, value)
