"""Argument checks with one message format.

``where: argument must <rule>, got <value>. <what to do>``

A wrong type raises ``TypeError``, a wrong value ``ValueError``. A bool or a whole float is not an
integer here, and NaN and infinity are not numbers. Checked values are returned as plain Python
numbers.
"""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, fields
from os import PathLike, fsdecode
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any, cast, get_args, get_origin
from weakref import WeakKeyDictionary


def describe(value: object) -> str:
    """Return ``value`` with the name of its type, for a type error.

    Examples:
        >>> describe(2.5)
        '2.5 (float)'
    """
    return f"{value!r} ({type(value).__name__})"


def message(where: str, argument: str, rule: str, got: object, todo: str = "") -> str:
    """Return the message of an error.

    Args:
        where: The class, method or function the user called.
        argument: The invalid argument.
        rule: What must hold, phrased to follow "must".
        got: What was passed instead, printed as it is.
        todo: What to do about it, in one sentence, if that is not obvious.

    Returns:
        The one-line message.

    Examples:
        >>> message("ElChe", "anchor", "be at least 1", 0)
        'ElChe: anchor must be at least 1, got 0.'
    """
    text = f"{where}: {argument} must {rule}, got {got}."
    return f"{text} {todo}" if todo else text


def unwrapped(value: object) -> object:
    """Return the element of a zero-dimensional array; other values as they are."""
    if getattr(value, "ndim", None) == 0:
        with suppress(NotImplementedError):  # a random key is an array without numbers
            return cast(Any, value).item()
    return value


def integer(
    where: str,
    argument: str,
    value: object,
    *,
    low: int | None = None,
    high: int | None = None,
    todo: str = "",
) -> int:
    """Return ``value`` as a plain ``int`` within ``[low, high]``.

    Raises:
        TypeError: If ``value`` is not an integer (a bool is not).
        ValueError: If it is out of range.

    Examples:
        >>> integer("ElChe", "anchor", 10, low=1)
        10
    """
    plain = unwrapped(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        rule = "be an integer"
        raise TypeError(message(where, argument, rule, describe(value), todo))
    if low is not None and plain < low:
        raise ValueError(message(where, argument, f"be at least {low}", plain, todo))
    if high is not None and plain > high:
        raise ValueError(message(where, argument, f"be at most {high}", plain, todo))
    return int(plain)


def number(where: str, argument: str, value: object, todo: str = "") -> float:
    """Return ``value`` as a plain ``float``, which may be NaN or infinite.

    Raises:
        TypeError: If ``value`` is not a number (a bool is not).
        OverflowError: If it is an integer beyond the range of floats.

    Examples:
        >>> number("CSVWriter.scalars", "values['loss']", 1)
        1.0
    """
    plain = unwrapped(value)
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        rule = "be a number"
        raise TypeError(message(where, argument, rule, describe(value), todo))
    return float(plain)


def real(
    where: str,
    argument: str,
    value: object,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    todo: str = "",
) -> float:
    """Return ``value`` as a plain, finite ``float`` within the given bounds.

    Args:
        where: The class, method or function the user called.
        argument: The argument's name.
        value: An int or a float, or a scalar array of either.
        low: Smallest value allowed.
        above: Value that must be exceeded.
        high: Largest value allowed.
        todo: What to do about it, one sentence.

    Raises:
        TypeError: If ``value`` is not a number (a bool is not).
        ValueError: If it is not finite, or out of range.

    Examples:
        >>> real("ElChe", "overhead_target", 0.1, low=0.01, high=0.5)
        0.1
    """
    plain = unwrapped(value)
    try:
        found = number(where, argument, value, todo)
    except OverflowError:
        found = math.inf if cast(int, plain) > 0 else -math.inf
    if not math.isfinite(found):
        raise ValueError(message(where, argument, "be finite", found, todo))
    if low is not None and found < low:
        raise ValueError(message(where, argument, f"be at least {low}", plain, todo))
    if above is not None and found <= above:
        raise ValueError(message(where, argument, f"be above {above}", plain, todo))
    if high is not None and found > high:
        raise ValueError(message(where, argument, f"be at most {high}", plain, todo))
    return found


def items(where: str, argument: str, values: object, of: str) -> tuple[Any, ...]:
    """Return the entries of a sequence or array as a tuple, unchecked.

    Raises:
        TypeError: If ``values`` is neither a sequence nor an array; strings are rejected.

    Examples:
        >>> items("Replay", "counts", [1, 2], "integers")
        (1, 2)
    """
    if isinstance(values, tuple):
        return cast(tuple[Any, ...], values)
    tolist = getattr(values, "tolist", None)
    plain: object = tolist() if callable(tolist) else values
    if isinstance(plain, str | bytes) or not isinstance(plain, Sequence):
        rule = f"be a sequence of {of}"
        raise TypeError(message(where, argument, rule, describe(values)))
    return tuple(cast(Sequence[Any], plain))


def integers(
    where: str,
    argument: str,
    values: object,
    *,
    low: int | None = None,
    high: int | None = None,
) -> tuple[int, ...]:
    """Return a sequence as a tuple of plain ints within ``[low, high]``.

    Raises:
        TypeError: If it is not a sequence, or an entry is not an integer.
        ValueError: If an entry is out of range.

    Examples:
        >>> integers("WindowReport", "counts", [3, 1], low=0)
        (3, 1)
    """
    entries = items(where, argument, values, "integers")
    clean = set(map(type, entries)) <= {int}
    if clean and (
        not entries
        or ((low is None or min(entries) >= low) and (high is None or max(entries) <= high))
    ):
        return entries
    return tuple(
        integer(where, f"{argument}[{rank}]", entry, low=low, high=high)
        for rank, entry in enumerate(entries)
    )


def reals(
    where: str,
    argument: str,
    values: object,
    *,
    low: float | None = None,
    above: float | None = None,
) -> tuple[float, ...]:
    """Return a sequence as a tuple of plain, finite floats within the bounds.

    Raises:
        TypeError: If it is not a sequence, or an entry is not a number.
        ValueError: If an entry is not finite or out of range.

    Examples:
        >>> reals("apportion", "ms_per_batch", [1, 2.5], above=0)
        (1.0, 2.5)
    """
    entries = items(where, argument, values, "numbers")
    clean = set(map(type, entries)) <= {float} and all(map(math.isfinite, entries))
    if clean and (
        not entries
        or ((low is None or min(entries) >= low) and (above is None or min(entries) > above))
    ):
        return entries
    return tuple(
        real(where, f"{argument}[{rank}]", entry, low=low, above=above)
        for rank, entry in enumerate(entries)
    )


def one_of(where: str, argument: str, value: object, choices: Sequence[str | None]) -> None:
    """Check that an argument is one of the choices, which are strings or None.

    Raises:
        ValueError: If it is not.

    Examples:
        >>> one_of("Checkpoints", "mode", "least", ("min", "max"))
        Traceback (most recent call last):
        ...
        ValueError: Checkpoints: mode must be one of 'min', 'max', got 'least'.
    """
    if not isinstance(value, str | None) or value not in choices:
        rule = f"be one of {', '.join(map(repr, choices))}"
        raise ValueError(message(where, argument, rule, repr(value)))


def instance(
    where: str, argument: str, value: object, kind: Any, rule: str = "", todo: str = "", *,
    brief: bool = False, no_class: bool = False,
) -> None:  # fmt: skip
    """Check that an argument is an instance of a class.

    Args:
        where: The class, method or function the user called.
        argument: The argument's name.
        value: The argument.
        kind: A class, or a union of classes and None.
        rule: What must hold, for the message; required with a union.
        todo: What to do about it, one sentence.
        brief: Whether the message shows only the value's type, as the value may be long.
        no_class: Whether to reject a class, which has the methods of a protocol, too.

    Raises:
        TypeError: If it is not.

    Examples:
        >>> instance("ElChe.update", "verdict", "stable", int)
        Traceback (most recent call last):
        ...
        TypeError: ElChe.update: verdict must be of type int, got 'stable' (str).
    """
    if not isinstance(value, kind) or (no_class and isinstance(value, type)):
        rule = rule or f"be of type {kind.__name__}"
        got = type(value).__name__ if brief else describe(value)
        raise TypeError(message(where, argument, rule, got, todo))


def path(where: str, argument: str, value: object, *, rule: str = "be a path") -> Path:
    """Return ``value`` as a path, with a leading ``~`` replaced by the home folder.

    Raises:
        TypeError: If ``value`` is neither a string nor a path.
        ValueError: If it is empty or contains a null byte.

    Examples:
        >>> path("Timeline", "path", "")
        Traceback (most recent call last):
        ...
        ValueError: Timeline: path must not be empty, got ''. Write '.' for the current folder.
    """
    instance(where, argument, value, str | PathLike, rule)
    text = fsdecode(cast("str | PathLike[str]", value))
    if not text:
        todo = "Write '.' for the current folder."
        raise ValueError(message(where, argument, "not be empty", repr(text), todo))
    if "\0" in text:
        raise ValueError(message(where, argument, "hold no null byte", repr(text)))
    # `Path.expanduser` raises RuntimeError for an unknown user
    return Path(expanduser(text))


def file(where: str, argument: str, value: object, example: str) -> Path:
    """Return ``value`` as the path of a file, which need not exist.

    Args:
        where: The class, method or function the user called.
        argument: The argument's name.
        value: The path.
        example: A name for such a file, for the message.

    Raises:
        TypeError: If ``value`` is neither a string nor a path.
        ValueError: If it is empty, contains a null byte, or is a folder.
    """
    found = path(where, argument, value)
    # in Python 3.11 `Path.is_dir` raises OSError for a name that is too long
    if isdir(found):
        todo = f"Name a file in it, such as {found / example}."
        raise ValueError(message(where, argument, "be a file", f"the folder {found}", todo))
    return found


def per_device(where: str, argument: str, got: int, expected: int) -> None:
    """Check that an argument has one entry per device.

    Raises:
        ValueError: If ``got`` differs from ``expected``.

    Examples:
        >>> per_device("ElChe.update", "report", 3, 2)
        Traceback (most recent call last):
        ...
        ValueError: ElChe.update: report must have one entry per device (2), got 3.
    """
    if got != expected:
        rule = f"have one entry per device ({expected})"
        raise ValueError(message(where, argument, rule, got))


class CheckedFields:
    """Mixin for frozen dataclasses: checks the fields that state their bounds.

    A field with bounds in its ``metadata`` must be an integer if it is annotated as one, and
    otherwise a finite number; or a sequence of these, which is stored as a tuple. The bounds are
    ``low``, ``high`` (not for sequences of floats) and, for numbers, ``above``. ``None`` is allowed
    if it is the default, or part of the annotation.

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
        for name, rule, optional, bounds in _checks(type(self)):
            if not (optional and getattr(self, name) is None):
                keep_checked(self, name, rule, **bounds)


class Uncopyable:
    """Mixin for objects that hold devices and threads, which belong to their process.

    Raises:
        TypeError: If it is copied or pickled.
    """

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: must not be copied or pickled, as it has devices and threads "
            "of this process. Build another one where it is needed."
        )


_Check = tuple[str, Callable[..., Any], bool, Mapping[str, Any]]
"""The name of a field, the function that checks it, whether it may be None, and its bounds."""

# weak keys: a class that a user defines in a function can be collected
_CHECKS: WeakKeyDictionary[type, list[_Check]] = WeakKeyDictionary()


def _checks(kind: type) -> list[_Check]:
    """Return the checks of a dataclass's fields that state their bounds; cached."""
    if (known := _CHECKS.get(kind)) is not None:
        return known
    checks: list[_Check] = []
    for field in fields(kind):
        stated = _stated(kind, field.name)
        if stated is not None:
            optional = field.default is None or type(None) in get_args(stated.type)
            checks.append((field.name, rule_of(stated), optional, stated.metadata))
    _CHECKS[kind] = checks
    return checks


def rule_of(field: Field[Any]) -> Callable[..., Any]:
    """Return the function of this module that checks a field of numbers, by its annotation."""
    # types, not their names: in a file that postpones annotations, integers would become floats, so
    # no field there states bounds
    kinds = (field.type, *get_args(field.type))
    sequences = [kind for kind in kinds if get_origin(kind) in (tuple, Sequence)]
    if sequences:
        return integers if int in get_args(sequences[0]) else reals
    return integer if int in kinds else real


def _stated(kind: type, name: str) -> Field[Any] | None:
    """Return the field that states the bounds; a subclass may change its default without them."""
    own: dict[str, Field[Any]] = vars(kind).get("__dataclass_fields__", {})
    if name in own and own[name].metadata:
        return own[name]
    found = (_stated(base, name) for base in kind.__bases__)
    return next(filter(None, found), None)


def keep_checked(config: object, name: str, rule: Callable[..., Any], **bounds: Any) -> None:
    """Check a field of a frozen dataclass and store it as plain numbers, unless it is a property.

    Args:
        config: The dataclass, in its ``__post_init__``.
        name: Name of the field.
        rule: `integer`, `integers`, `real` or `reals` of this module.
        **bounds: Keyword arguments of the rule.

    Raises:
        TypeError: If the value is of the wrong type.
        ValueError: If the value is not finite, or out of range.
    """
    value = rule(type(config).__name__, name, getattr(config, name), **bounds)
    with suppress(AttributeError):  # a user's class may compute it, in a property
        object.__setattr__(config, name, value)


def is_address(text: str) -> bool:
    """Return whether a text is a host and a port, like ``10.0.0.1:1234`` or ``[::1]:1234``.

    Examples:
        >>> [is_address(text) for text in ("host0:1234", "host0", ":1", "host0:x", "host0:65536")]
        [True, False, False, False, False]
    """
    found = re.fullmatch(r"\S+:(\d{1,5})", text)
    return found is not None and 0 < int(found[1]) < 2**16


def takes(what: str, fn: Callable[..., Any], names: Sequence[str], why: str = "") -> None:
    """Check that a function accepts these positional arguments.

    Args:
        what: The function, for the message: ``loss_fn:``, ``TrainStep.init: merge``.
        fn: The function.
        names: Names of the arguments.
        why: Appended to the rule.

    Raises:
        TypeError: If the function takes other arguments.

    Examples:
        >>> takes("loss_fn:", lambda params: 0.0, ("params", "batch"))
        Traceback (most recent call last):
            ...
        TypeError: loss_fn: must take (params, batch), got a function of (params).
    """
    try:
        # the wrapper's own signature: it may call what it wraps with other arguments
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # no signature, as for some builtins
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise TypeError(
            f"{what} must take ({', '.join(names)}){why}, got a function of {signature}."
        ) from error
