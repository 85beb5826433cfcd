"""The three forms of the user's data.

A pytree of arrays with a common leading axis (`ArraySource`), a map-style dataset with
`__len__` and `__getitem__` (`MapSource`), or an iterable of microbatches (`IterableSource`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MappingView, Sequence
from typing import Any

import jax
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

from elche_jax import _check as check
from elche_jax.data.convert import (
    as_arrays,
    check_plain,
    has_numpy_dtype,
    is_array,
    is_empty,
    is_record,
    name_of,
    sorted_keys,
)

PyTree = Any

A_LIST = "A list is a pytree; to use it as microbatches, pass iter(list)."
"""What to do about a list of microbatches, which is read as one pytree."""

HAND_OVER = 16
"""Number of examples after which the reading thread yields to other threads.

Examples are read by Python code in a background thread. On its own it would release the
interpreter lock only every 5 ms, and the loop that feeds the devices would wait that long.
"""


@sorted_keys("data", "an example")
def stack(examples: Iterable[PyTree], numbers: Sequence[int], what: str = "example") -> PyTree:
    """Stack examples of the same structure along a new leading axis, on the host.

    Args:
        examples: The examples, at least one.
        numbers: Their numbers in the dataset, for messages.
        what: What they are, for messages: examples, or microbatches of an iterable.

    Raises:
        TypeError: If the keys of a dict cannot be sorted.
        ValueError: If the examples differ in structure, or a leaf in shape or dtype. Dtypes that
            are the same to JAX, as with 64-bit types disabled, do not count as different.
    """
    rows: list[np.ndarray] = []
    structure: Any = None
    for position, (number, example) in enumerate(zip(numbers, examples, strict=True)):
        leaves, found = jax.tree.flatten(example)
        leaves = [np.asarray(leaf) for leaf in leaves]
        if structure is None:
            structure = found
            # copied even if there is only one: a dataset may reuse its buffer, and a device may
            # read the block in place
            rows = [np.empty((len(numbers), *leaf.shape), leaf.dtype) for leaf in leaves]
        if found != structure:
            raise ValueError(
                f"data: every {what} must have the same structure ({structure}), "
                f"but {what} {number} has {found}."
            )
        for at, (row, leaf) in enumerate(zip(rows, leaves, strict=True)):
            if leaf.shape != row.shape[1:] or not _same_in_jax(leaf.dtype, row.dtype):
                path = jax.tree_util.tree_flatten_with_path(example)[0][at][0]
                raise ValueError(
                    f"data: every {what} must have the same shape and dtype "
                    f"({row.shape[1:]}, {row.dtype}), but {name_of(path, 'the array')} of {what} "
                    f"{number} has {leaf.shape}, {leaf.dtype}. Pad them, or convert them."
                )
            if leaf.dtype.itemsize > row.dtype.itemsize:  # placing it checks that it fits
                rows[at] = row = _widened(row, leaf.dtype, position)
            row[position] = leaf
        if position % HAND_OVER == 0:
            time.sleep(0)
    return jax.tree.unflatten(structure, rows)


def _widened(rows: np.ndarray, dtype: np.dtype[Any], filled: int) -> np.ndarray:
    """Return rows of a wider dtype, with the first `filled` rows copied."""
    wide = np.empty(rows.shape, dtype)
    wide[:filled] = rows[:filled]  # casting the uninitialised rest might warn
    return wide


def _same_in_jax(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Return whether JAX converts two dtypes to the same one."""
    if one == other or one.kind != other.kind or one.kind not in "iufc":
        return one == other
    return dtypes.canonicalize_dtype(one) == dtypes.canonicalize_dtype(other)


class Stopped(Exception):
    """Raised when data is read for a loop that has ended."""


class ArraySource:
    """A pytree of arrays with a common leading axis of examples."""

    def __init__(self, tree: PyTree):
        named = jax.tree_util.tree_flatten_with_path(tree)[0]
        for path, leaf in named:
            if len(leaf.shape) == 0:  # `np.ndim` might convert a table, which is read below
                raise ValueError(
                    f"data: every leaf must have a leading axis of examples, "
                    f"but leaf {name_of(path)} is a scalar."
                )
            check_plain(path, leaf)
        lengths = {name_of(path): int(leaf.shape[0]) for path, leaf in named}
        if len(set(lengths.values())) > 1:
            rule = "have the same number of examples"
            todo = A_LIST if isinstance(tree, list) else ""
            raise ValueError(check.message("data", "all leaves", rule, lengths, todo))
        if not all(has_numpy_dtype(leaf) for _, leaf in named):
            # tensors and tables of other libraries
            tree = as_arrays(tree)
        self.tree = tree
        self.size = next(iter(lengths.values()))
        self._host: PyTree | None = None

    @property
    def nbytes(self) -> int:
        """Size of all leaves in bytes."""
        # arrays in a file, such as those of netCDF4, may lack `nbytes`
        leaves = jax.tree.leaves(self.tree)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def rows(self, index: NDArray[np.int64]) -> PyTree:
        """Return the examples at `index`; leaves `(len(index), ...)`, new host arrays."""
        if self._host is None:  # arrays on a device are copied to the host only once
            self._host = jax.tree.map(np.asarray, self.tree)
        return jax.tree.map(lambda leaf: np.take(leaf, index, axis=0), self._host)


class MapSource:
    """A map-style dataset of `len(dataset)` examples, each a pytree `dataset[i]`.

    Args:
        dataset: The dataset.
        stop: No example is read once this event is set.
    """

    def __init__(self, dataset: Any, stop: threading.Event | None = None):
        self.dataset = dataset
        self.size = len(dataset)
        self._stop = stop or threading.Event()

    def example(self, number: int) -> PyTree:
        """Return one example; its leaves are arrays or numbers.

        Raises:
            Stopped: The loop has ended.
        """
        if self._stop.is_set():
            raise Stopped
        return as_arrays(self.dataset[number])

    def rows(self, index: NDArray[np.int64]) -> PyTree:
        """Return the examples at `index`, stacked; leaves `(len(index), ...)`."""
        # Python ints: NumPy's are not instances of int, which a dataset may require
        numbers = index.tolist()
        # a generator, as `map` would take a StopIteration that the dataset raises for the end
        return stack((self.example(number) for number in numbers), numbers)


class IterableSource:
    """An iterable of microbatches; iterated again for every epoch unless it is an iterator.

    Attributes:
        several: Whether it is read for several epochs. Its `set_epoch` is then called before each;
            with one epoch per run, the user may have called it.
    """

    several = False

    def __init__(self, iterable: Iterable[PyTree]):
        self.iterable = iterable
        self._peeked: tuple[PyTree, Iterator[PyTree]] | None = None

    @property
    def once(self) -> bool:
        """Whether the data is an iterator, which can be iterated only once."""
        return isinstance(self.iterable, Iterator)

    @property
    def peeked(self) -> bool:
        """Whether `peek` has read the first microbatch and it has not been used yet."""
        return self._peeked is not None

    def peek(self) -> PyTree:
        """Return the first microbatch, and keep it for the first epoch."""
        if self._peeked is None:
            iterator = self._begin(0)
            try:
                self._peeked = (as_arrays(next(iterator)), iterator)
            except StopIteration:
                raise ValueError(
                    "data must hold at least one microbatch, but the iterator is empty."
                ) from None
        return self._peeked[0]

    def epoch(self, number: int) -> Iterator[PyTree]:
        """Iterate over the microbatches of one epoch."""
        # cleared first, so that the next epoch starts anew even if this one is abandoned
        peeked, self._peeked = self._peeked, None
        if peeked is None or (number and self._set_epoch):  # what was read is of epoch 0
            rest = self._begin(number)
        else:
            first, rest = peeked
            yield first
        for item in rest:  # noqa: UP028  (`yield from` would close a user's generator with the loop)
            yield item

    @property
    def _set_epoch(self) -> Callable[[int], Any] | None:
        return getattr(self.iterable, "set_epoch", None) if self.several else None

    def _begin(self, epoch: int) -> Iterator[PyTree]:
        if self._set_epoch:
            self._set_epoch(epoch)
        return iter(self.iterable)


Source = ArraySource | MapSource | IterableSource


def is_list(source: Source) -> bool:
    """Return whether the data is a list of arrays, which the user may mean as microbatches."""
    return isinstance(source, ArraySource) and isinstance(source.tree, list)


def as_source(data: Any) -> Source:
    """Return the source for the user's data.

    Args:
        data: A pytree of arrays; an object with `__len__` and `__getitem__`; or an iterable of
            microbatches. Tensors and tables of other libraries count as arrays (see `is_array`),
            and so do lists of numbers within an example or a microbatch.

    Raises:
        TypeError: If `data` is none of these, or does not convert to arrays of numbers.
        ValueError: If the data is empty, or its leaves differ in length.

    Examples:
        >>> import numpy as np
        >>> from elche_jax.data.source import as_source
        >>> as_source({"x": np.zeros((10, 3)), "y": np.zeros(10)}).size
        10
    """
    expected = (
        "data must be a pytree of arrays, a map-style dataset (__len__ and "
        "__getitem__) or an iterable of microbatches"
    )
    if isinstance(data, type):  # it has the methods that its objects have
        raise TypeError(f"{expected}, got the class {data.__name__}. Pass an object of this class.")
    # JAX treats the first two as leaves, and deprecates flattening them
    with sorted_keys("data", "it"):
        leaves = jax.tree.leaves(
            data, is_leaf=lambda x: isinstance(x, Iterator | MappingView) or is_empty(x)
        )
    if leaves and all(map(is_array, leaves)):
        source: Source = ArraySource(data)
    elif is_record(data):
        raise TypeError(f"{expected}, got a {type(data).__name__}. Pass dict(data).")
    elif isinstance(data, dict | list | tuple) or any(map(is_empty, leaves)):
        if all(map(is_empty, leaves)):
            raise TypeError(f"{expected}, got a {type(data).__name__} without any array.")
        kinds = sorted({type(leaf).__name__ for leaf in leaves if not is_array(leaf)})
        todo = "Convert the leaves with numpy.asarray."
        if "list" in kinds:  # others are nodes, not leaves
            todo = "The list is empty: fill it, or leave it out."
        if {"str", "bytes"}.intersection(kinds):
            todo = "Leave text out, or encode it."
        raise TypeError(
            f"{expected}, got a {type(data).__name__} with leaves of type "
            f"{', '.join(kinds)}. {todo}"
        )
    elif isinstance(data, str | bytes):  # probably a path
        raise TypeError(f"{expected}, got {type(data).__name__}. Load the file first.")
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = MapSource(data)
    elif isinstance(data, Iterable):
        return IterableSource(data)
    else:
        raise TypeError(f"{expected}, got {type(data).__name__}.")
    if source.size == 0:
        raise ValueError("data must hold at least one example, got 0.")
    return source
