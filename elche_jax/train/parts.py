"""Checks of the objects that make up a training or evaluation step."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import optax

from elche_jax import _check as check
from elche_jax.cadence import Cadence
from elche_jax.engine.loop import LoopHook


def checked_optimizer(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer of `build_train_step`, with an update that accepts extra keywords.

    The update passes on the keywords that the optimizer takes; optax would drop those of an
    object that is not one of its own tuples, such as `optax.MultiSteps`. The update is a
    `jax.jit`, so that tracing it again reuses the trace that `TrainStep.init` makes for its checks.

    Raises:
        TypeError: It is not an optimizer.
    """
    if not _has(optimizer, "init", "update"):
        # that of Flax, whose repr prints all its arrays
        wraps, kind = hasattr(optimizer, "tx"), type(optimizer).__name__
        got, todo = (f"{kind} around one", "Pass its tx.") if wraps else (repr(optimizer), "")
        where, rule = "build_train_step", "be an optax optimizer"
        raise TypeError(check.message(where, "optimizer", rule, got, todo))
    tx = optimizer
    if not isinstance(tx, optax.GradientTransformation):
        arguments = inspect.signature(tx.update).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in arguments):
            tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    update = jax.jit(optax.with_extra_args_support(tx).update)
    return optax.GradientTransformationExtraArgs(tx.init, update)


def check_emulation(where: str, emulate: LoopHook | None, world_size: int) -> None:
    """Check an emulation; None passes.

    Raises:
        TypeError: It is not an emulation.
        ValueError: It is for a different number of devices.
    """
    if emulate is None:
        return
    if not _has(emulate, "check", "begin", "around", "end", "settle"):
        rule = "be an emulation of elche_jax.lab"
        raise TypeError(check.message(where, "emulate", rule, repr(emulate)))
    emulate.check(world_size)


def cadence_for(
    where: str, cadence: Cadence[Any] | None, kinds: Sequence[str]
) -> Cadence[Any] | None:
    """Return a cadence adapted to devices of these kinds; None for None.

    Raises:
        TypeError: It is not a cadence, or a user's `for_kinds` does not return one, or `update`
            takes other arguments.
    """
    if cadence is None:
        return None
    if not isinstance(cadence, Cadence):
        rule = "be an elche_jax.Cadence such as ElChe()"
        raise TypeError(check.message(where, "cadence", rule, repr(cadence)))
    found, rule = cadence.for_kinds(kinds), "return a cadence"
    check.instance(type(cadence).__name__, "for_kinds", found, Cadence, rule)
    check.takes(f"{type(found).__name__}: update", found.update, ("state", "report", "verdict"))
    return found


def _has(part: object, *methods: str) -> bool:
    """Return whether an object has these methods; False for a class."""
    callables = all(callable(getattr(part, method, None)) for method in methods)
    return callables and not isinstance(part, type)
