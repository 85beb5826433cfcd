"""What a jaxpr tells about a function that need not be run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

# Other calls are left out: a derivative given by the user may read what the function does not.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
"""Primitives that do nothing but run the jaxpr they hold."""


PASSES = frozenset((
    "abs", "add", "add_any", "and", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil",
    "clamp", "concatenate", "cond", "convert_element_type", "copy", "copy_p", "cos",
    "custom_jvp_call", "custom_vjp_call", "div", "dynamic_slice", "dynamic_update_slice", "eq",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pad", "pow", "real", "reduce_and",
    "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "reduce_prod", "reduce_sum",
    "rem", "reshape", "rev", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split", "sqrt",
    "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose", "unstack", "xor",
    *CALLS,
))  # fmt: skip
"""Primitives that take about as long as to read their operands and to write their results."""


@dataclass(frozen=True)
class Origin:
    """Where a value in a jaxpr comes from.

    Attributes:
        reads: Positions of the arguments it depends on.
        copy_of: Position of the argument that it is, unchanged; or None.
    """

    reads: frozenset[int] = frozenset()
    copy_of: int | None = None

    def __or__(self, other: "Origin") -> "Origin":
        """Return the origin of a value made from two."""
        return Origin(self.reads | other.reads)


def origins(closed: core.ClosedJaxpr) -> list[Origin]:
    """Return the origin of every result of a jaxpr.

    The results of a primitive that is not known count as dependent on all of its operands: an
    argument may be named that does not matter, but none is missed.

    Args:
        closed: The jaxpr; positions are those of its flat arguments.
    """
    count = len(closed.jaxpr.invars)
    return _run(closed.jaxpr, [Origin(frozenset([at]), at) for at in range(count)])


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """Iterate over the equations of a jaxpr, and of those that they hold."""
    for eqn in _plain(jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, core.Jaxpr | core.ClosedJaxpr):
                    yield from equations(part)


def called(eqn: core.JaxprEqn) -> Any:
    """Return the jaxpr that an equation of `CALLS` runs."""
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def smallest_float(jaxpr: Any) -> int:
    """Return the bytes of the smallest float that a jaxpr computes with; 4 if all are larger."""
    operands = [value for eqn in equations(jaxpr) for value in (*eqn.invars, *eqn.outvars)]
    dtypes: list[Any] = [getattr(value.aval, "dtype", jnp.bool_) for value in operands]
    sizes = [dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return min([4, *sizes])


def repeats_cheaply(fn: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function may be computed twice on a CPU: it does nothing but what takes
    about as long as to read and write arrays, and has no side effects."""
    closed = jax.make_jaxpr(fn)(*args)
    # a CPU converts smaller floats, which takes longer than to read them
    fast = not closed.effects and smallest_float(closed) == 4
    return fast and all(eqn.primitive.name in PASSES for eqn in equations(closed))


def _run(jaxpr: core.Jaxpr, given: Sequence[Origin]) -> list[Origin]:
    known: dict[Any, Origin] = dict(zip(jaxpr.invars, given, strict=True))

    def origin(operand: Any) -> Origin:
        return Origin() if isinstance(operand, core.Literal) else known.get(operand, Origin())

    for eqn in jaxpr.eqns:
        made = _of_equation(eqn, [origin(operand) for operand in eqn.invars])
        known.update(zip(eqn.outvars, made, strict=True))
    return [origin(operand) for operand in jaxpr.outvars]


def _of_equation(eqn: core.JaxprEqn, given: list[Origin]) -> list[Origin]:
    name, params = eqn.primitive.name, eqn.params
    if name in CALLS:
        return _run(_plain(called(eqn)), given)
    if name == "scan":
        return _of_scan(eqn, given)
    if name == "cond":
        chosen, *operands = given
        branches = [_run(_plain(branch), operands) for branch in params["branches"]]
        return [reduce(Origin.__or__, made, chosen) for made in zip(*branches, strict=True)]
    return [reduce(Origin.__or__, given, Origin())] * len(eqn.outvars)


def _of_scan(eqn: core.JaxprEqn, given: list[Origin]) -> list[Origin]:
    body, (fixed, carried) = _plain(eqn.params["jaxpr"]), _sizes(eqn.params)
    given = [replace(one, copy_of=None) for one in given]
    while True:  # until an iteration adds nothing to what the carry depends on
        made = [replace(one, copy_of=None) for one in _run(body, given)]
        carry = given[fixed : fixed + carried]
        new = [old | now for old, now in zip(carry, made, strict=False)]
        if new == carry:
            return [*new, *made[carried:]]
        given = [*given[:fixed], *new, *given[fixed + carried :]]


def _sizes(params: Any) -> tuple[int, int]:
    """Return the numbers of constants and of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(list(consts)), len(list(carry))


def _plain(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)
