"""A user's function as traced by JAX: immutable, and comparable.

A program that is cached between calls must not outlive a change of its function, for example of an
attribute or a global that it reads. What a function reads cannot be determined, but what it
computes can: it is traced at every call and recompiled if the trace differs.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.extend import core

from elche_jax.engine.bits import raw
from elche_jax.engine.jaxprs import equations
from elche_jax.engine.returned import checked_output

PyTree = Any

SHARDINGS = ("sharding", "devices", "in_shardings", "out_shardings")
"""Parameters of primitives that hold shardings: of a constraint, of `device_put`, of `jit`."""

DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint")
"""Primitives whose parameters include derivative functions, which are new objects in every trace.
The comparison ignores these functions: no derivatives are taken here, and the jaxprs hold the
computation."""


@dataclass(frozen=True)
class Traced:
    """A function traced for arguments of given shapes.

    Attributes:
        closed: Its jaxpr.
        outputs: Shapes of its results.
        content: The jaxpr as plain values, which are equal for equal computations.
    """

    closed: core.ClosedJaxpr = field(compare=False)
    outputs: PyTree = field(compare=False)
    content: Any

    def __call__(self, *args: PyTree) -> PyTree:
        """Call it with arguments of those shapes."""
        results = core.jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.structure(self.outputs).unflatten(results)


def trace(name: str, fn: Callable[..., Any], *shapes: PyTree) -> Traced:
    """Trace a function anew, ignoring JAX's cache of traces.

    Args:
        name: Name of the function, for messages.
        fn: The function.
        *shapes: Shapes of its arguments.

    Raises:
        TypeError: If it does not return a pytree of arrays and numbers.
        ValueError: See `traced_alone`.
    """

    def call(*args: PyTree) -> PyTree:
        return checked_output(name, fn(*args))

    closed, outputs = traced_alone(name, call, *shapes)
    # NumPy arrays may change later
    consts = [x.copy() if isinstance(x, np.ndarray) else x for x in closed.consts]
    content = (jax.tree.structure(outputs), _content(closed))
    return Traced(core.ClosedJaxpr(closed.jaxpr, consts), outputs, content)


def traced_alone(
    name: str, fn: Callable[..., Any], *shapes: PyTree
) -> tuple[core.ClosedJaxpr, PyTree]:
    """Trace a function that each device runs on its own; return its jaxpr and shapes of results.

    Arguments are those of `trace`.

    Raises:
        ValueError: If it uses a named axis, or several devices.
    """
    with no_named_axis(name):
        # JAX caches traces by function object: this one is new, and has the same argument names
        closed, outputs = jax.make_jaxpr(partial(fn), return_shape=True)(*shapes)
    for eqn in equations(closed):
        if (number := _devices_of(eqn)) > 1:
            raise ValueError(
                f"{name}: must compute on one device, got a {eqn.primitive.name} over {number}. "
                "Leave it out: every device has a copy of the parameters, and runs whole "
                "microbatches."
            )
    return closed, outputs


def _devices_of(eqn: core.JaxprEqn) -> int:
    """Return the number of devices that an equation names; 1 if it names none."""
    if eqn.primitive.name == "shard_map":  # that of `jax.pmap`, too
        return eqn.params["mesh"].size
    said = jax.tree.leaves([eqn.params.get(name) for name in SHARDINGS])
    return max([1, *(one.num_devices for one in said if isinstance(one, jax.sharding.Sharding))])


AT_THE_END = (
    "as devices meet at the end of a window only",
    "Leave out axis_name (BatchNorm), psum and pmean: the library averages gradients, and merges "
    "model_state as merge= says.",
)
"""Why a step's functions must not use a named axis, and what to do instead."""


@contextmanager
def no_named_axis(name: str, said: tuple[str, str] = AT_THE_END) -> Generator[None]:
    """Turn JAX's error for a named axis in a traced function into one that says what to do.

    Args:
        name: Name of the function, for the message.
        said: The reason, and what to do instead.

    Raises:
        ValueError: If the function uses a named axis.
    """
    try:
        yield
    except NameError as error:
        text = str(error)
        # JAX raises a plain NameError; any other is an error in the user's function
        if "unbound axis name" not in text:
            raise
        axis = text.split("unbound axis name")[1].strip(" :").split(".")[0]
        raise ValueError(
            f"{name}: must use no named axis, {said[0]}, got {axis!r}. {said[1]}"
        ) from error


# -- a computation as comparable values -------------------------------------------------------


def _content(part: Any) -> Any:
    """Convert a part of a jaxpr to an immutable value that compares by content.

    If two parts cannot be compared, their values are unequal.
    """
    if isinstance(part, _JAXPRS):  # one class or two, depending on the version of JAX
        consts = tuple(getattr(part, "consts", ()))
        return _content(consts), _of_jaxpr(cast(core.Jaxpr, getattr(part, "jaxpr", part)))
    if isinstance(part, tuple | list):
        return type(part), tuple(map(_content, part))
    if isinstance(part, dict):
        return dict, tuple((name, _content(value)) for name, value in part.items())
    if isinstance(part, np.ndarray | np.generic):
        return type(part), part.dtype, part.shape, part.tobytes()
    if isinstance(part, float | complex):  # by repr, as -0.0 == 0.0 and NaN != NaN
        return type(part), repr(part)
    return _Value(part)


def _of_jaxpr(jaxpr: core.Jaxpr) -> Any:
    # variables are new objects in every trace: compare them by the order in which they appear
    numbers: dict[Any, int] = {}

    def made(variables: Any) -> Any:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(variable.aval for variable in variables)

    def used(operand: Any) -> Any:
        if isinstance(operand, core.Literal):
            return operand.aval, _content(operand.val)
        return numbers[operand]

    def step(eqn: core.JaxprEqn) -> Any:
        params = eqn.params
        if eqn.primitive.name in DERIVATIVES:
            params = {k: x for k, x in params.items() if isinstance(x, _JAXPRS)}
        operands = tuple(map(used, eqn.invars))
        return eqn.primitive, operands, made(eqn.outvars), _content(params)

    begin = made([*jaxpr.constvars, *jaxpr.invars])
    steps = tuple(map(step, jaxpr.eqns))
    return begin, steps, tuple(map(used, jaxpr.outvars))


_JAXPRS = (core.Jaxpr, core.ClosedJaxpr)


@dataclass(frozen=True, eq=False)
class _Value:
    """Any other value: equal to the same object, and to an equal one of the same type."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or type(self.value) is not type(other.value):
            return False
        a, b = self.value, other.value
        if a is b:
            return True
        if isinstance(a, jax.Array):
            if a.is_deleted() or b.is_deleted():  # donated since: its value is not known
                return False
            # by bytes, as -0.0 == 0.0 and NaN != NaN
            alike = a.shape == b.shape and a.dtype == b.dtype
            return alike and np.asarray(raw(a)).tobytes() == np.asarray(raw(b)).tobytes()
        try:
            return bool(a == b)
        except Exception:  # not comparable
            return False
