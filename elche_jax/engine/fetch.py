"""How a program gets microbatch `i` of its call out of what lies on the device.

Two layouts of the data of one call, both with everything the loop needs on the device:

- `Pieces`: streamed microbatches as arrays of power-of-two length, longest first, those
  that the binary digits of `count` ask for being real, the others never read;
- `Rows`: the whole data set, resident, and the example numbers of the microbatches.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pieces:
    """Streamed microbatches; piece `j` has leaves `(2**(k - 1 - j), batch, ...)`."""

    pieces: tuple[PyTree, ...]

    def capacity(self, stacked: bool) -> int:
        """Most microbatches these pieces can hold."""
        axis = 1 if stacked else 0
        return sum(jax.tree.leaves(piece)[0].shape[axis] for piece in self.pieces)

    def fetch(self, i: Any, count: Any) -> PyTree:
        """Microbatch `i` of `count`; leaves `(batch, ...)`.

        Every piece gives a candidate and a scalar predicate selects: no branch, which
        an accelerator would have to ask the host for.
        """
        chosen: PyTree | None = None
        for piece in self.pieces:
            length = jax.tree.leaves(piece)[0].shape[0]
            start = count & ~(2 * length - 1)
            candidate = jax.tree.map(
                lambda leaf, at=i - start: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False),
                piece,
            )
            if chosen is None:
                chosen = candidate
            else:
                # pieces come longest first, and one that is not there would start where
                # the next one does: the last that starts at or before i holds it
                here = i >= start
                chosen = jax.tree.map(
                    lambda new, old, here=here: jnp.where(here, new, old), candidate, chosen
                )
        return chosen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The resident data set, leaves `(examples, ...)`, and `index`, `(capacity, batch)`."""

    data: PyTree
    index: Any

    def capacity(self, stacked: bool) -> int:
        """Most microbatches the index can name."""
        return self.index.shape[1 if stacked else 0]

    def fetch(self, i: Any, count: Any) -> PyTree:
        """Microbatch `i`; leaves `(batch, ...)`."""
        del count  # the rows beyond it are not read
        row = jax.lax.dynamic_index_in_dim(self.index, i, keepdims=False)
        return jax.tree.map(lambda leaf: leaf.at[row].get(mode="promise_in_bounds"), self.data)


Payload = Pieces | Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Orders:
    """What a device is to do in one call.

    Attributes:
        numbers: int32, shape `(8,)`: `count`, microbatches to run; `start`, place of the
            first one in the window; `fresh`, 1 in the first call of a window;
            `partial`, place of the microbatch with fewer valid examples, or -1;
            `valid`, its number of valid examples; microbatches and valid examples of the
            window over all devices; `rank` of the device.
    """

    WIDTH: ClassVar[int] = 8

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
        return self.numbers[7]

    def valid(self, place: Any, batch_size: int) -> Any:
        """Number of valid examples of the microbatch at `place` in the window."""
        return jnp.where(place == self.numbers[3], self.numbers[4], batch_size)
