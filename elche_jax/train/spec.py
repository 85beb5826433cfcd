"""How the data of a run are read, and the checks made before anything is compiled."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.data.convert import name_of, no_numbers
from elche_jax.data.order import Cursor, Reading
from elche_jax.data.reader import microbatch_size
from elche_jax.data.source import A_LIST, IterableSource, MapSource, Source, is_list, stack
from elche_jax.engine.bits import check_bits, is_numeric
from elche_jax.engine.place import Placement

PyTree = Any


@dataclass(frozen=True)
class DataPlan:
    """How the data of a run are read; made by `Loading.open`.

    Attributes:
        source: The data.
        batch_size: Examples per microbatch.
        epochs: Number of epochs; None for no end.
        seed: Seed of the order.
        shuffle: False keeps the order of the source.
        drop_last: Leave out a last microbatch that is smaller.
        mask_key: Name under which a microbatch holds the mask of its valid examples, or None.
        placement: Where the data live.
        window_bytes: Limit in bytes of the data of one program call on a device.
        microbatch: Shapes of one microbatch.
        row_bytes: Bytes of the results of one microbatch, if a call keeps them.
    """

    source: Source
    batch_size: int
    epochs: int | None
    seed: int
    shuffle: bool
    drop_last: bool
    mask_key: str | None
    placement: Placement
    window_bytes: int
    microbatch: PyTree
    row_bytes: int = 0

    @property
    def microbatch_bytes(self) -> int:
        """Size of one microbatch."""
        leaves = jax.tree.leaves(self.microbatch)
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def ragged(self) -> bool:
        """Whether a microbatch may have fewer valid examples than `batch_size`."""
        if self.drop_last:
            return False
        return isinstance(self.source, IterableSource) or bool(self.source.size % self.batch_size)

    @property
    def reading(self) -> Reading:
        """What a position in the data depends on."""
        if isinstance(self.source, IterableSource):
            # an iterable has its own order, and no known number of examples
            return Reading(self.batch_size, drop_last=self.drop_last)
        # without shuffling, positions do not depend on the seed
        seed = self.seed if self.shuffle else None
        return Reading(self.batch_size, self.source.size, self.shuffle, seed, self.drop_last)

    @contextmanager
    def noting_list(self) -> Generator[None]:
        """Add what to do about a list of microbatches to errors of the user's function."""
        try:
            yield
        except Exception as error:
            # the list may also be meant: the function then expects one
            if is_list(self.source):
                error.add_note(f"data: {A_LIST}")
            raise

    def start(self, cursor: Cursor | None, windows: int) -> Cursor:
        """Return where to start in the data.

        Args:
            cursor: Where the user wants to resume; must be a position in these data, read in
                the same way. None for the start of the data.
            windows: Number of windows of the run so far, where the numbering continues if
                there is no cursor.
        """
        if cursor is None:
            return Cursor(window=windows, reading=self.reading)
        todo = "Make one of a dictionary with Cursor.from_dict."
        check.instance("windows", "cursor", cursor, Cursor, "be a Cursor", todo, brief=True)
        if self.epochs is not None and cursor.epoch >= self.epochs:
            raise ValueError(
                f"windows: cursor.epoch must be below epochs ({self.epochs}, counted from the "
                f"start of the run), got {cursor.epoch}. Raise epochs to go on."
            )
        # cursors in older checkpoints do not say how their data were read
        differs = None if cursor.reading is None else cursor.reading.difference(self.reading)
        if differs is not None:
            name, before, now = differs
            name = "the number of examples" if name == "examples" else name
            rule = f"be that of the cursor's run ({before})"
            todo = "Pass that value, or start without the cursor, whose place depends on it."
            raise ValueError(check.message("windows", name, rule, now, todo))
        return replace(cursor, reading=self.reading)


def check_batch_size(
    source: Source, batch_size: int | None, epochs: int | None, drop_last: bool
) -> int:
    """Return the batch size, checked against the data and the other arguments."""
    if isinstance(source, IterableSource):
        if source.once and epochs != 1:
            raise ValueError(
                f"data: an iterator can be used for one epoch only, got epochs={epochs}. "
                "Pass an object whose __iter__ starts anew."
            )
        first = microbatch_size(source.peek(), 0)
        if batch_size is not None and batch_size != first:
            raise ValueError(
                f"data: batch_size must be that of the iterator's microbatches "
                f"({first}), got {batch_size}. Leave it out."
            )
        return first
    todo = ""
    if batch_size is None and is_list(source):
        todo = A_LIST
    size = check.integer("data", "batch_size", batch_size, low=1, todo=todo)
    if size > source.size and drop_last:
        raise ValueError(
            f"data: batch_size must be at most the number of examples ({source.size}) "
            f"with drop_last=True, got {size}. Lower it, or pass drop_last=False."
        )
    return size


def microbatch_shapes(source: Source, batch_size: int) -> PyTree:
    """Return the shapes of one microbatch, with the dtypes it will have on the devices."""
    if isinstance(source, IterableSource):
        rows = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), source.peek())
    elif isinstance(source, MapSource):
        rows = stack([source.example(0)], [0])
    else:
        rows = source.tree

    check_bits("data", leaves=rows)
    if not jax.tree.leaves(rows):
        raise ValueError(f"data: every example must hold at least one array, got {rows!r}.")

    def shape(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = leaf.dtype
        if not is_numeric(dtype):
            raise no_numbers(path, dtype)
        if not dtype.isnative:
            raise TypeError(
                f"data: every leaf must be in this machine's byte order, but leaf "
                f"{name_of(path)} is of dtype {dtype.str}. Convert it "
                "with astype(dtype.newbyteorder('='))."
            )
        dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct((batch_size, *np.shape(leaf)[1:]), dtype)

    return jax.tree_util.tree_map_with_path(shape, rows)
