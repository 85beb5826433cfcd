"""Checks of the objects that make up a training or evaluation step."""

import inspect
from collections.abc import Sequence
from typing import Any

import optax

from elche_jax import _check as check
from elche_jax.cadence import Cadence

METHODS = {
    "optimizer": (("init", "update"), "an optax optimizer"),
    "emulate": (("check", "begin", "around", "end", "settle"), "an emulation of elche_jax.lab"),
}


def check_parts(where: str, **parts: Any) -> None:
    """Check the types of the given objects; all except the optimizer may be None.

    Args:
        where: The function the user called.
        **parts: The objects, by the name of the argument: `"cadence"` or a key of `METHODS`.

    Raises:
        TypeError: An object does not have the required type or methods.
    """
    for name, part in parts.items():
        if part is None and name != "optimizer":
            continue
        if name == "cadence":
            fits, expected = isinstance(part, Cadence), "an elche_jax.Cadence such as ElChe()"
        else:
            methods, expected = METHODS[name]
            callables = all(callable(getattr(part, method, None)) for method in methods)
            fits = callables and not isinstance(part, type)
        if fits:
            continue
        # that of Flax, which prints all its arrays
        wraps, kind = name == "optimizer" and hasattr(part, "tx"), type(part).__name__
        got, todo = (f"{kind} around one", "Pass its tx.") if wraps else (repr(part), "")
        raise TypeError(check.message(where, name, f"be {expected}", got, todo))


def cadence_for(cadence: Cadence[Any] | None, kinds: Sequence[str]) -> Cadence[Any] | None:
    """Return a cadence, if there is one, for devices of these kinds.

    Raises:
        TypeError: A user's `for_kinds` returns no cadence.
    """
    if cadence is None:
        return None
    found, rule = cadence.for_kinds(kinds), "return a cadence"
    check.instance(type(cadence).__name__, "for_kinds", found, Cadence, rule)
    return found


def with_keywords(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an object like `optax.MultiSteps`, whose update takes any keywords, as a
    transformation that gets them; others as they are.

    optax would drop the keywords of what is not one of its own tuples.
    """
    if isinstance(optimizer, optax.GradientTransformation):
        return optimizer
    arguments = inspect.signature(optimizer.update).parameters.values()
    if all(each.kind is not each.VAR_KEYWORD for each in arguments):
        return optimizer
    return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)
