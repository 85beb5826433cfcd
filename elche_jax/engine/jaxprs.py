"""What a jaxpr tells about a function without running it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

# Other calls are left out: a user-defined derivative may read what the function does not.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")
"""Primitives that only run the jaxpr they hold."""

JOINABLE = frozenset((
    "abs", "add", "add_any", "and", "broadcast_in_dim", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_max", "reduce_min",
    "reduce_sum", "rem", "reshape", "round", "rsqrt", "select_n", "sign", "sin", "sqrt",
    "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
"""Primitives whose equations may be joined, see `bundles`; each has one result."""

PASSES = JOINABLE | {
    "bitcast_convert_type", "concatenate", "cond", "custom_jvp_call", "custom_vjp_call",
    "dynamic_slice", "dynamic_update_slice", "erf_inv", "erfc", "expand_dims", "iota",
    "nextafter", "pad", "real", "reduce_and", "reduce_or", "reduce_precision", "reduce_prod",
    "rev", "shift_left", "shift_right_arithmetic", "shift_right_logical", "slice", "split",
    "transpose", "unstack",
    *CALLS,
}  # fmt: skip
"""Primitives that take about as long as reading their operands and writing their results."""


def arguments_read(closed: core.ClosedJaxpr) -> list[bool]:
    """Return for every flat argument of a jaxpr whether a result depends on it.

    True may be returned for an argument that does not matter, but never False for one that does:
    a function with a user-defined derivative counts as reading all of its arguments. No result
    depends on an argument that is only printed, or passed to another side effect.
    """
    jaxpr = _without_effects(closed.jaxpr)
    _, read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return read


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """Iterate over the equations of a jaxpr and of the jaxprs nested in them."""
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
    """Return the size in bytes of the smallest float in a jaxpr, at most 4."""
    operands = [value for eqn in equations(jaxpr) for value in (*eqn.invars, *eqn.outvars)]
    dtypes: list[Any] = [getattr(value.aval, "dtype", jnp.bool_) for value in operands]
    sizes = [dtype.itemsize for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return min([4, *sizes])


def repeats_cheaply(fn: Callable[..., Any], *args: Any) -> bool:
    """Return whether a function may be computed twice on a CPU.

    It may if it has no side effects, and does only what takes about as long as reading and
    writing arrays.
    """
    closed = jax.make_jaxpr(fn)(*args)
    # a CPU converts smaller floats, which takes longer than reading them
    fast = not closed.effects and smallest_float(closed) == 4
    return fast and all(eqn.primitive.name in PASSES for eqn in equations(closed))


def _without_effects(part: Any) -> Any:
    """Return a jaxpr without the side effects of its equations and of nested jaxprs."""
    if type(part) is tuple:  # the branches of a `cond`
        return tuple(map(_without_effects, part))
    if not isinstance(part, core.Jaxpr | core.ClosedJaxpr):
        return part
    jaxpr, none = _plain(part), frozenset[Any]()
    eqns = [
        eqn.replace(
            params={name: _without_effects(value) for name, value in eqn.params.items()},
            effects=none,
        )
        for eqn in jaxpr.eqns
    ]
    jaxpr = jaxpr.replace(eqns=eqns, effects=none)
    return jaxpr if isinstance(part, core.Jaxpr) else core.ClosedJaxpr(jaxpr, part.consts)


def _plain(jaxpr: Any) -> core.Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)
