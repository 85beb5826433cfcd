"""Conversion of the user's examples and microbatches to NumPy or JAX arrays."""

import numbers
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

PyTree = Any


def as_arrays(item: PyTree) -> PyTree:
    """Return an example or a microbatch with NumPy or JAX arrays as leaves.

    In a dict or a tuple, a list of numbers or of such lists is converted to an array. On its
    own, such a list is ambiguous, as it could also be several arrays. Tensors and tables of other
    libraries are converted by their `__array__` or, if that fails, by DLPack. Everything else
    is returned unchanged.

    Args:
        item: The example or the microbatch.

    Raises:
        TypeError: If the keys of a dict cannot be sorted, or a leaf is a masked array, an array of
            PRNG keys, a mapping that JAX does not know, or a tensor or table that cannot be
            converted.
        ValueError: If lists of numbers differ in length or are empty, or `item` itself is such a
            list.

    Examples:
        >>> as_arrays({"x": [1.0, 2.0], "y": 3})
        {'x': array([1., 2.]), 'y': 3}
    """
    if _is_plain(item):
        return item
    if _is_numbers(item) and item:
        raise ValueError(
            "data: an example or a microbatch must be an array, or a dict or tuple of them, got a "
            "list of numbers. Return numpy.asarray(it) for one array, a tuple for several."
        )
    # JAX treats a list as a node of the tree, and each of its numbers as a leaf
    with sorted_keys("data", "an example or a microbatch"):
        return jax.tree_util.tree_map_with_path(_as_array, item, is_leaf=_is_numbers)


@contextmanager
def sorted_keys(where: str, what: str) -> Generator[None]:
    """Turn JAX's error for dict keys that cannot be sorted into one that says where they are.

    Args:
        where: The function that takes or returns the pytree that is flattened here.
        what: Name of the pytree there.

    Raises:
        TypeError: If the keys of a dict in it cannot be sorted.
    """
    try:
        yield
    except ValueError as error:
        if "sorting pytree dictionary keys" not in str(error):
            raise
        raise TypeError(
            f"{where}: dicts in {what} must have keys of one type, as JAX sorts them, got several "
            f"({error.__cause__ or error}). Use strings."
        ) from error


def check_plain(path: Any, leaf: Any, where: str = "data") -> None:
    """Raise `TypeError` if an array is masked, as JAX would drop the mask.

    Args:
        path: JAX key path of the leaf.
        leaf: The leaf.
        where: Name of the tree, for the message.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        name = name_of(path, where.split()[-1])
        raise TypeError(
            f"{where}: every leaf must be a plain array, but leaf {name} is a masked one, whose "
            "mask would be lost. Fill it (.filled), and pass the mask as a leaf of its own."
        )


def no_numbers(path: Any, dtype: Any) -> TypeError:
    """Return the error for an array that does not hold numbers.

    Args:
        path: JAX key path of the leaf.
        dtype: Its dtype.
    """
    return TypeError(
        f"data: every leaf must be an array of numbers, but leaf {name_of(path)} is of dtype "
        f"{dtype}. Encode it first."
    )


def is_record(item: Any) -> bool:
    """Return whether an item maps names to arrays, but JAX treats it as a single leaf.

    This is so for the batches of Hugging Face's collators and for open HDF5 files.
    """
    mapping = isinstance(item, Mapping) and jax.tree_util.all_leaves([item])
    return mapping and isinstance(next(iter(item), None), str)


def is_empty(item: Any) -> bool:
    """Return whether an item is an empty list, of which JAX would make a node without leaves."""
    return isinstance(item, list) and not item


def name_of(path: Any, otherwise: str = "data") -> str:
    """Return a leaf's name for a message."""
    return jax.tree_util.keystr(path) or otherwise


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of the user's data is an array, a tensor or a table, unconverted.

    A `shape` alone does not make one: datasets of Hugging Face have it, too.
    """
    ways = ("dtype", "__array__", "__dlpack__")
    return hasattr(leaf, "shape") and any(hasattr(leaf, name) for name in ways)


def has_numpy_dtype(leaf: Any) -> bool:
    """Return whether NumPy and JAX read an array as it is, and understand its `dtype`."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return True
    if not hasattr(leaf, "__array__"):  # NumPy makes an object of a sparse matrix, or of a shape
        return False
    try:
        np.dtype(leaf.dtype)
    except (AttributeError, TypeError):  # a table has a type for each column
        return False
    return True


def _is_plain(item: PyTree) -> bool:
    """Return whether there is nothing to convert."""
    # runs for every example, so plain types are compared instead of flattening the tree
    kind = type(item)
    if kind is dict:
        return all(map(_is_plain, item.values()))
    if kind is tuple:
        return all(map(_is_plain, item))
    if kind is np.ndarray or isinstance(item, int | float | np.generic):
        return True
    return isinstance(item, jax.Array) and not _holds_keys(item)


def _holds_keys(leaf: jax.Array) -> bool:
    """Return whether an array holds PRNG keys, whose dtype NumPy lacks."""
    return not isinstance(leaf.dtype, np.dtype)


def _is_numbers(item: Any) -> bool:
    """Return whether an item is a list of numbers, or of such lists; it may be empty."""
    if not isinstance(item, list):
        return False
    kinds = set(map(type, item))
    if kinds == {list}:
        return all(map(_is_numbers, item))
    return all(issubclass(kind, numbers.Number | np.generic) for kind in kinds)


def _as_array(path: Any, leaf: Any) -> Any:
    check_plain(path, leaf)
    if is_record(leaf):
        raise TypeError(
            "data: an example or a microbatch must be an array, or a dict or tuple of them, but "
            f"leaf {name_of(path)} is a {type(leaf).__name__}. Pass dict(it)."
        )
    if isinstance(leaf, list):
        return _of_list(path, leaf)
    if isinstance(leaf, jax.Array) and _holds_keys(leaf):
        raise no_numbers(path, leaf.dtype)
    is_array = any(hasattr(leaf, name) for name in ("dtype", "shape", "__array__"))
    return _of_tensor(path, leaf) if is_array and not has_numpy_dtype(leaf) else leaf


def _of_list(path: Any, leaf: list[Any]) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise ValueError(
            f"data: lists of numbers must have one length on every level, but leaf {name_of(path)} "
            "has several. Pad them, and pass the lengths or a mask as a leaf of its own."
        ) from error
    if not array.size:
        raise ValueError(
            f"data: a list of numbers must not be empty, but leaf {name_of(path)} is. "
            "Pad it, or leave it out."
        )
    return array


def _of_tensor(path: Any, leaf: Any) -> Any:
    try:
        array = np.asarray(leaf)
        if array.dtype != object:
            return array
        error: Exception = TypeError("NumPy makes objects of it")
    except Exception as failed:
        error = failed
    try:
        return jax.dlpack.from_dlpack(leaf)  # for types that NumPy lacks, such as bfloat16
    except Exception:
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise TypeError(
            f"data: every leaf must convert to a NumPy array, but leaf {name_of(path)} is a {kind} "
            f"that does not ({type(error).__name__}: {error}). Convert it in the dataset."
        ) from error
