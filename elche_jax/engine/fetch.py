"""How a compiled program reads microbatch `i` of a call from device memory.

There are two layouts of the data of one call:

- `Pieces`: streamed microbatches in arrays of power-of-two length, longest first. Only the
  pieces that correspond to a binary digit 1 of `count` hold data; the others are never read.
- `Rows`: the whole data set, resident on the device, and the example indices of each
  microbatch.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.shapes import signature

PyTree = Any


class _Layout:
    """Base class of the layouts."""

    @cached_property
    def signature(self) -> Hashable:
        """Structure, shapes and dtypes: the key of the programs that read the data."""
        return signature(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces(_Layout):
    """Streamed microbatches; piece `j` has leaves `(2**(k - 1 - j), batch, ...)`."""

    pieces: tuple[PyTree, ...]

    def capacity(self, stacked: bool) -> int:
        """Return the largest number of microbatches these pieces can hold."""
        return sum(jax.tree.leaves(piece)[0].shape[int(stacked)] for piece in self.pieces)

    def fetch(self, i: Any, count: Any) -> PyTree:
        """Return microbatch `i` of `count`, leaves `(batch, ...)`."""
        lengths = [jax.tree.leaves(piece)[0].shape[0] for piece in self.pieces]
        # Pieces come longest first, and an absent piece starts where the next one does, so
        # the last piece that starts at or before i holds it.
        starts = [count & ~(2 * length - 1) for length in lengths]
        if len(starts) == 1:
            return _at(i, self.pieces[0])
        return jax.lax.platform_dependent(
            i, starts, self.pieces, cpu=_switch_to_piece, default=_select_piece
        )


def _at(place: Any, piece: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), piece
    )


def _select_piece(i: Any, starts: list[Any], pieces: tuple[PyTree, ...]) -> PyTree:
    """Read a candidate from every piece and select by a scalar predicate.

    On an accelerator a branch would need a round trip to the host.
    """
    chosen = _at(i - starts[0], pieces[0])
    for start, piece in zip(starts[1:], pieces[1:], strict=True):
        chosen = jax.tree.map(
            lambda new, old, here=i >= start: jnp.where(here, new, old),
            _at(i - start, piece),
            chosen,
        )
    return chosen


def _switch_to_piece(i: Any, starts: list[Any], pieces: tuple[PyTree, ...]) -> PyTree:
    """Read from one piece by a branch, as a CPU would otherwise read all candidates."""
    which = sum((i >= start).astype(jnp.int32) for start in starts[1:])
    branches = [partial(_at, i - start, piece) for start, piece in zip(starts, pieces, strict=True)]
    return jax.lax.switch(which, branches)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows(_Layout):
    """The resident data set, leaves `(examples, ...)`, and `index`, `(capacity, batch)`."""

    data: PyTree
    index: Any

    def capacity(self, stacked: bool) -> int:
        """Return the largest number of microbatches the index can hold."""
        return self.index.shape[int(stacked)]

    def fetch(self, i: Any, count: Any) -> PyTree:
        """Return microbatch `i` of `count`, leaves `(batch, ...)`."""
        row = jax.lax.dynamic_index_in_dim(self.index, i, keepdims=False)
        # the index comes from `elche_jax.data`, so it needs no clamping
        return jax.tree.map(lambda leaf: leaf.at[row].get(mode="promise_in_bounds"), self.data)


Payload = Pieces | Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CallArgs:
    """Scalar arguments of one call on one device.

    Attributes:
        numbers: int32, shape `(10,)`: `count`, microbatches in the data; `start`, position of
            the first one in the window; `fresh`, 1 in the first call of a window;
            `partial`, position of the microbatch with fewer valid examples, or -1;
            `valid`, its number of valid examples; microbatches and valid examples of the
            window over all devices; `rank` of the device; `begin` and `end` of the range of
            microbatches to run, which is all of them unless the call runs a part.
    """

    WIDTH: ClassVar[int] = 10

    # one array, as every further argument slows down the dispatch
    numbers: Any

    @property
    def count(self) -> Any:
        return self.numbers[0]

    @property
    def start(self) -> Any:
        return self.numbers[1]

    @property
    def fresh(self) -> Any:
        return self.numbers[2] > 0

    @property
    def totals(self) -> tuple[Any, Any]:
        """Microbatches and valid examples of the window over all devices."""
        return self.numbers[5], self.numbers[6]

    @property
    def rank(self) -> Any:
        # an argument, as programs compiled per device have no axis to query
        return self.numbers[7]

    @property
    def begin(self) -> Any:
        return self.numbers[8]

    @property
    def end(self) -> Any:
        return self.numbers[9]

    @staticmethod
    def pieces(numbers: np.ndarray, count: int) -> list[np.ndarray]:
        """Split a call into several, each of which runs a part of the microbatches.

        Args:
            numbers: The numbers of the whole call, one row per device.
            count: Number of calls.
        """
        split = [numbers.copy() for _ in range(count)]
        for at, part in enumerate(split):
            part[:, 8], part[:, 9] = numbers[:, 9] * at // count, numbers[:, 9] * (at + 1) // count
            part[:, 2] *= at == 0  # later parts continue the carry of the first
        return split

    def valid(self, place: Any, batch_size: int) -> Any:
        """Return the number of valid examples of the microbatch at `place` in the window."""
        return jnp.where(place == self.numbers[3], self.numbers[4], batch_size)
