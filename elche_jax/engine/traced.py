"""A user's function as JAX has traced it: it does not change any more, and can be compared.

A program that is kept from call to call must not be of a function that has changed since: of
an object whose attributes were set, or one that reads a global. What it reads cannot be found
out, but what it computes can: it is traced anew, and compiled anew where that differs.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import numpy as np
from jax.extend import core

from elche_jax.engine.returned import returned

PyTree = Any

DERIVATIVES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint")
"""Primitives that hold functions, new ones in every trace, for derivatives that nobody takes
of what is traced here; what they compute is in their jaxprs."""


@dataclass(frozen=True)
class Traced:
    """A function for arguments of certain shapes.

    Attributes:
        closed: What it computes.
        outputs: Shapes of its results.
        content: The same as plain values: equal where the same is computed.
    """

    closed: core.ClosedJaxpr = field(compare=False)
    outputs: PyTree = field(compare=False)
    content: Any

    def __call__(self, *args: PyTree) -> PyTree:
        """Calls it, with arguments of those shapes."""
        results = core.jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.structure(self.outputs).unflatten(results)


def trace(name: str, fn: Callable[..., Any], *shapes: PyTree) -> Traced:
    """Traces a function, whatever JAX knows of it from before.

    Args:
        name: What the user calls it.
        fn: The function.
        *shapes: Shapes of its arguments.

    Raises:
        TypeError: It returns what is no pytree of arrays and numbers.
        ValueError: It uses a named axis.
    """

    def call(*args: PyTree) -> PyTree:
        return returned(name, fn(*args))

    with no_named_axis(name):
        # JAX keeps what it has traced by the function: this one is new
        closed, outputs = jax.make_jaxpr(call, return_shape=True)(*shapes)
    # NumPy's arrays may change, JAX's do not
    consts = [x.copy() if isinstance(x, np.ndarray) else x for x in closed.consts]
    content = (jax.tree.structure(outputs), _content(closed))
    return Traced(core.ClosedJaxpr(closed.jaxpr, consts), outputs, content)


@contextmanager
def no_named_axis(name: str) -> Generator[None]:
    """Says what to do where a function that is traced asks for a named axis.

    Args:
        name: What the user calls the function.

    Raises:
        ValueError: It does.
    """
    try:
        yield
    except NameError as error:
        text = str(error)
        if "unbound axis name" not in text:
            raise
        axis = text.split("unbound axis name")[1].strip(" :").split(".")[0]
        raise ValueError(
            f"{name}: must use no named axis, as devices meet at the end of a window only, got "
            f"{axis!r}. Leave out axis_name (BatchNorm), psum and pmean: the library averages "
            "gradients, and merges model_state as merge= says."
        ) from error


# -- what is computed, as values -------------------------------------------------------------


def _content(part: Any) -> Any:
    """A part of what was traced as a value that equals another one where they are the same,
    and that does not change with it; where in doubt it equals no other."""
    if isinstance(part, _JAXPRS):  # one class in some versions of JAX, two in others
        consts = tuple(getattr(part, "consts", ()))
        return _content(consts), _of_jaxpr(cast(core.Jaxpr, getattr(part, "jaxpr", part)))
    if isinstance(part, tuple | list):
        return type(part), tuple(map(_content, part))
    if isinstance(part, dict):
        return dict, tuple((name, _content(value)) for name, value in part.items())
    if isinstance(part, np.ndarray | np.generic):
        return type(part), part.dtype, part.shape, part.tobytes()
    if isinstance(part, float | complex):  # of which -0.0 equals 0.0, and NaN nothing
        return type(part), repr(part)
    return _Value(part)


def _of_jaxpr(jaxpr: core.Jaxpr) -> Any:
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
    """Anything else: the same where it is the same object, or one of its type that equals it."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value) or type(self.value) is not type(other.value):
            return False
        a, b = self.value, other.value
        if a is b:
            return True
        if isinstance(a, jax.Array):
            return a.shape == b.shape and a.dtype == b.dtype and _bytes(a) == _bytes(b)
        try:
            return bool(a == b)
        except Exception:  # it cannot be compared
            return False


def _bytes(array: jax.Array) -> bytes:
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()
