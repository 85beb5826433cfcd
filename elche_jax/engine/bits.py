"""What arrays hold: floats, typed PRNG keys and their data, bits that every backend accepts."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax.engine.laned import Stacked, StackedArray
from elche_jax.engine.shapes import named


def is_key(leaf: Any) -> TypeGuard[jax.Array]:
    """Return whether a leaf, an array or its shape, holds typed PRNG keys."""
    known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)  # others may have dtypes JAX lacks
    return known and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_float(leaf: Any) -> bool:
    """Return whether an array, or anything else with a dtype, holds floats."""
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Return whether JAX has arrays of this dtype, or of a narrower one."""
    # NumPy counts time differences as integers, and may have floats of more than 64 bits
    numeric = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    return numeric and dtype.kind != "m" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def wide_dtype(leaf: Any) -> np.dtype[Any]:
    """Return the dtype in which floats are summed: float64 for float64 leaves, else float32."""
    dtype = np.float64 if leaf.dtype == np.float64 else np.float32
    return jax.dtypes.canonicalize_dtype(dtype)  # a host array may be wider than JAX's


def wide(leaf: Any) -> Any:
    """Cast floats to the dtype in which they are summed."""
    dtype = wide_dtype(leaf)
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)  # NumPy's `astype` would copy


def check_integers(
    where: str, what: str, name: str, leaf: Any, todo: str = "Switch jax_enable_x64 on."
) -> None:
    """Raise `ValueError` if an integer would be truncated.

    Without 64-bit types, JAX keeps only 32 bits of every integer.

    Args:
        where: The function the user called.
        what: What the integers are, for the message.
        name: Name of the leaf; empty to leave it out of the message.
        leaf: An array of any dtype.
        todo: What the user can do about it.
    """
    if is_key(leaf):
        return
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype == dtype or leaf.dtype.kind not in "iu" or leaf.size == 0:
        return
    low, high, bounds = int(leaf.min()), int(leaf.max()), np.iinfo(dtype)
    if low < bounds.min or high > bounds.max:
        value = low if low < bounds.min else high
        rule = f"fit {dtype}, to which JAX converts {leaf.dtype}"
        got = f"{value} in leaf {name}" if name else value
        raise ValueError(check.message(where, what, rule, got, todo))


def check_bits(where: str, **trees: Any) -> None:
    """Raise `TypeError` if numbers have fewer than 8 bits.

    Programs compiled ahead of time reject the layout that JAX gives such arrays.

    Args:
        where: The function the user called.
        **trees: Pytrees by the names of arguments; leaves without a dtype are skipped.
    """
    for argument, tree in trees.items():
        for name, leaf in named(tree, argument):
            dtype = getattr(leaf, "dtype", None)
            if dtype is not None and _bits_of(dtype) < 8:
                rule, got = "have numbers of at least 8 bits", f"{dtype} in leaf {name}"
                todo = "Convert it: leaf.astype(...)."
                raise TypeError(check.message(where, argument, rule, got, todo))


def _bits_of(dtype: Any) -> int:
    for kind, info in ((jnp.integer, jnp.iinfo), (jnp.floating, jnp.finfo)):
        # NumPy counts time differences as integers
        if jnp.issubdtype(dtype, kind) and not jnp.issubdtype(dtype, np.timedelta64):
            return info(dtype).bits
    return 8


def check_numbers(where: str, name: str, array: np.ndarray) -> None:
    """Raise `TypeError` unless a host array holds numbers, then call `check_integers`."""
    if not is_numeric(array.dtype):
        raise TypeError(
            f"{where}: every leaf must be an array of numbers, but leaf {name} is of dtype "
            f"{array.dtype}."
        )
    check_integers(where, "integers", name, array)


def raw(leaf: Any) -> Any:
    """Return the data of an array of typed PRNG keys; return any other leaf unchanged."""
    if isinstance(leaf, Stacked):
        return leaf.map(raw)
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def with_type_of(like: StackedArray, data: StackedArray) -> StackedArray:
    """Invert `raw`.

    Args:
        like: The argument of `raw`, or another array of its dtype.
        data: The result of `raw`.
    """
    one = like.arrays[0] if isinstance(like, Stacked) else like
    if not is_key(one):
        return data
    wrap = partial(jax.random.wrap_key_data, impl=jax.random.key_impl(one))
    return data.map(wrap) if isinstance(data, Stacked) else wrap(data)


def as_bits(leaf: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Return an array's bits as integers that every backend can sum, and the inverse.

    The integers have 32 bits, or 64 for 64-bit numbers; complex numbers are pairs. Bitcasts
    reject typed keys: pass their `raw` data.
    """
    dtype = leaf.dtype
    if dtype == jnp.bool_:
        return leaf.astype(jnp.uint32), lambda bits: bits.astype(jnp.bool_)
    if _bits_of(dtype) < 8:  # bitcasts reject these
        wider = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32
        bits, wider_back = as_bits(leaf.astype(wider))
        return bits, lambda bits: wider_back(bits).astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([leaf.real, leaf.imag])
        bits, parts_back = as_bits(parts)
        return bits, lambda bits: jax.lax.complex(*parts_back(bits))
    bare = jnp.dtype(f"uint{8 * dtype.itemsize}")
    sent = np.promote_types(bare, np.uint32)

    def back(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits.astype(bare), dtype)

    return jax.lax.bitcast_convert_type(leaf, bare).astype(sent), back
