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
    """Return the optimizer of `build_train_step`, whose update gets the keywords that it takes.

    optax would drop those of what is not one of its own tuples, such as `optax.MultiSteps`. The
    update is a `jax.jit`, so that a plan of it finds the trace that `TrainStep.init` makes for
    its checks.

    Raises:
        TypeError: It is no optimizer.
    """
    if not _has(optimizer, "init", "update"):
        # that of Flax, which prints all its arrays
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
    """Check an emulation, if there is one.

    Raises:
        TypeError: It is none.
        ValueError: It is one of another number of devices.
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
    """Return a cadence, if there is one, for devices of these kinds.

    Raises:
        TypeError: It is none, or a user's `for_kinds` returns none.
    """
    if cadence is None:
        return None
    if not isinstance(cadence, Cadence):
        rule = "be an elche_jax.Cadence such as ElChe()"
        raise TypeError(check.message(where, "cadence", rule, repr(cadence)))
    found, rule = cadence.for_kinds(kinds), "return a cadence"
    check.instance(type(cadence).__name__, "for_kinds", found, Cadence, rule)
    return found


def _has(part: object, *methods: str) -> bool:
    """Return whether an object, and not its class, has these methods."""
    callables = all(callable(getattr(part, method, None)) for method in methods)
    return callables and not isinstance(part, type)
