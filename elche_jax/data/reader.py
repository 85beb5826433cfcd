"""Reading one epoch as microbatches.

A reader turns a source into numbered microbatches of fixed shape. The last one may hold fewer
valid examples; it is padded with copies of its first row, which the program masks out.
Copies are used because arbitrary padding could produce NaN.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any
from zlib import crc32

import jax
import numpy as np
from numpy.typing import NDArray

from elche_jax._log import logger
from elche_jax.data.convert import as_arrays, sorted_keys
from elche_jax.data.order import Cursor, Reading, epoch_order
from elche_jax.data.source import ArraySource, IterableSource, MapSource, Source, Stopped, stack

PyTree = Any
# not None: an iterator may yield it by mistake, which is an error and not the end
_END = object()


@dataclass(frozen=True)
class Partial:
    """A microbatch with fewer valid examples.

    Attributes:
        microbatch: Number of the microbatch in the epoch.
        valid: Number of valid examples.
    """

    microbatch: int
    valid: int


class IndexedReader:
    """One epoch of a source with random access.

    Attributes:
        microbatches: Number of microbatches in the epoch.
        partial: The microbatch with fewer valid examples, if any.
        of_arrays: Whether examples may be read in any order at the same cost, and are all alike.
        first: None, as the order of the epoch is known.
    """

    first = None

    def __init__(self, source: ArraySource | MapSource, reading: Reading, epoch: int):
        size, seed = source.size, reading.seed
        whole, rest = divmod(size, reading.batch_size)
        self._source, self._batch_size = source, reading.batch_size
        self.of_arrays = isinstance(source, ArraySource)
        self._order = np.arange(size) if seed is None else epoch_order(size, seed, epoch)
        self.partial = None if reading.drop_last or not rest else Partial(whole, rest)
        self.microbatches = whole + (0 if self.partial is None else 1)

    def available(self, start: int, want: int) -> int:
        """Return how many of the `want` microbatches from `start` on exist."""
        return max(0, min(want, self.microbatches - start))

    def index(self, start: int, count: int) -> NDArray[np.int64]:
        """Return the example numbers of the microbatches, shape `(count, batch)`."""
        first = start * self._batch_size
        last = first + count * self._batch_size
        index = self._order[first:last]
        missing = count * self._batch_size - len(index)
        if missing:
            filler = self._order[len(self._order) // self._batch_size * self._batch_size]
            index = np.concatenate([index, np.full(missing, filler)])
        return index.reshape(count, self._batch_size)

    def blocks(self, starts: Sequence[int], count: int) -> PyTree:
        """Return `count` microbatches from each start on; leaves `(starts, count, batch, ...)`."""
        index = np.stack([self.index(start, count) for start in starts])
        rows = self._source.rows(index.reshape(-1))
        return jax.tree.map(lambda leaf: leaf.reshape(index.shape + leaf.shape[1:]), rows)


class IterableReader:
    """One epoch of an iterable; holds the microbatches of the window being read.

    Attributes:
        first: Checksum of the epoch's first microbatch, once it has been read.
    """

    of_arrays = False
    first: int | None = None

    def __init__(
        self,
        source: IterableSource,
        reading: Reading,
        epoch: int = 0,
        stop: threading.Event | None = None,
    ):
        self._items: Iterator[PyTree] = source.epoch(epoch)
        self._batch_size, self._drop_last = reading.batch_size, reading.drop_last
        self._stop = stop or threading.Event()
        self._held: list[PyTree] = []
        self._first = 0
        self._ended = False
        self._short: Partial | None = None

    @property
    def partial(self) -> Partial | None:
        """The microbatch with fewer valid examples, once it has been read."""
        return None if self._drop_last else self._short

    def available(self, start: int, want: int) -> int:
        """Read `want` microbatches from `start` on; return how many of them exist.

        Raises:
            Stopped: The loop that uses the microbatches has ended.
        """
        # microbatches before `start` are not read again
        del self._held[: start - self._first]
        self._first = start
        while len(self._held) < want and not self._ended:
            if self._stop.is_set():  # leaves the rest of the window to the user
                raise Stopped
            item = next(self._items, _END)
            if item is _END:
                self._ended = True
            else:
                self._hold(item)
        return min(want, len(self._held))

    def blocks(self, starts: Sequence[int], count: int) -> PyTree:
        """Return `count` microbatches from each start on; leaves `(starts, count, batch, ...)`."""
        numbers = [number for start in starts for number in range(start, start + count)]
        held = (self._held[number - self._first] for number in numbers)
        rows = stack(held, numbers, "microbatch")
        shape = len(starts), count
        return jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), rows)

    def _hold(self, item: PyTree) -> None:
        number = self._first + len(self._held)
        item = as_arrays(item)
        size = microbatch_size(item, number)
        if self._short is not None:
            raise ValueError(
                f"data: only the last microbatch of an iterator may be smaller, but "
                f"microbatch {self._short.microbatch} had {self._short.valid} examples "
                f"of {self._batch_size} and was not the last."
            )
        if size > self._batch_size:
            raise ValueError(
                f"data: every microbatch must have {self._batch_size} examples, "
                f"but microbatch {number} has {size}."
            )
        if size < self._batch_size:
            # remembered even if dropped: in the middle of an epoch it is an error
            self._short = Partial(number, size)
            if self._drop_last:
                return
            missing = self._batch_size - size
            item = jax.tree.map(
                lambda leaf: np.concatenate([leaf, np.repeat(leaf[:1], missing, axis=0)]),
                item,
            )
        # copied, as a generator may reuse one buffer
        item = jax.tree.map(np.array, item)
        if number == 0:
            leaves = jax.tree.leaves(item)
            self.first = reduce(lambda crc, leaf: crc32(leaf.tobytes(), crc), leaves, 0)
        self._held.append(item)


Reader = IndexedReader | IterableReader
"""Microbatches of one epoch, by number."""


def microbatch_size(item: PyTree, number: int) -> int:
    """Return the length of the common leading axis of an iterator's microbatch."""
    with sorted_keys("data", f"microbatch {number}"):
        pairs = jax.tree_util.tree_flatten_with_path(item)[0]
    leaves = {jax.tree_util.keystr(path) or "microbatch": leaf for path, leaf in pairs}
    for name, leaf in leaves.items():
        if isinstance(leaf, str | bytes):
            raise TypeError(
                f"data: every leaf of a microbatch must be an array of numbers, but leaf {name} of "
                f"microbatch {number} is text. Leave it out, or encode it."
            )
    sizes = {int(np.shape(leaf)[0]) if np.ndim(leaf) else 0 for leaf in leaves.values()}
    if len(sizes) != 1 or 0 in sizes:
        shapes = {name: np.shape(leaf) for name, leaf in leaves.items()}
        raise ValueError(
            f"data: the leaves of a microbatch must have one common, non-empty leading "
            f"axis, but microbatch {number} has shapes {shapes}."
        )
    return sizes.pop()


def _check_order(reader: IterableReader, at: Cursor) -> None:
    """Warn if an epoch that goes on at a cursor has a different order than before."""
    differs = at.first is not None and reader.first != at.first
    if differs and reader.available(at.microbatch, 1):  # otherwise nothing of the epoch is left
        logger.warning(
            "elche: epoch %d of data begins with a different microbatch than before the stop, so "
            "microbatches may be used twice or not at all. An iterable must give the same order "
            "again. Unless epochs=1, its set_epoch(epoch) is called before each epoch.",
            at.epoch,
        )


def open_epoch(
    source: Source, reading: Reading, at: Cursor, stop: threading.Event | None = None
) -> Reader:
    """Return a reader of the epoch that a cursor is in, from its microbatch on.

    Args:
        source: The data.
        reading: How it is read.
        at: The position of the first microbatch to read.
        stop: Nothing more is read once this event is set.

    Raises:
        ValueError: If the cursor is beyond the end of the epoch.
        Stopped: `stop` is set; the methods of the reader raise it, too.
    """
    if isinstance(source, IterableSource):
        reader = IterableReader(source, reading, at.epoch, stop)
        there = 0
        while there < at.microbatch and reader.available(there, 1):  # holds one at a time
            there += 1
        _check_order(reader, at)
    else:
        if isinstance(source, MapSource):  # as this loop may end before all is read
            source = MapSource(source.dataset, stop)
        reader = IndexedReader(source, reading, at.epoch)
        there = reader.available(0, at.microbatch)
    if there < at.microbatch:
        raise ValueError(
            f"data: cursor.microbatch must lie within the epoch ({there} microbatches), "
            f"got {at.microbatch}. Resume with the data and batch_size it came from."
        )
    return reader
