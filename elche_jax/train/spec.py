"""What `windows` checks and learns of the data before anything is compiled."""

from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.data.reader import microbatch_size
from elche_jax.data.source import IterableSource, MapSource, Source, stack

PyTree = Any


def check_data_plan(
    source: Source,
    batch_size: int | None,
    epochs: int | None,
    drop_last: bool,
) -> int:
    """Checks the arguments of `TrainStep.windows`; gives the batch size."""
    if isinstance(source, IterableSource):
        if source.once and epochs != 1:
            raise ValueError(
                f"windows: an iterator can be used for one epoch only, got epochs={epochs}. "
                "Pass an object whose __iter__ starts anew."
            )
        first = microbatch_size(source.peek(), 0)
        if batch_size is not None and batch_size != first:
            raise ValueError(
                f"windows: batch_size must be that of the iterator's microbatches "
                f"({first}), got {batch_size}. Leave it out."
            )
        return first
    size = check.integer("windows", "batch_size", batch_size, low=1)
    if size > source.size and drop_last:
        raise ValueError(
            f"windows: batch_size must be at most the number of examples ({source.size}) "
            f"with drop_last=True, got {size}. Lower it, or pass drop_last=False."
        )
    return size


def microbatch_shapes(source: Source, batch_size: int) -> PyTree:
    """Shapes of one microbatch, with the dtypes the devices will hold."""
    if isinstance(source, IterableSource):
        rows = source.peek()
    elif isinstance(source, MapSource):
        rows = stack([source.dataset[0]])
    else:
        rows = source.tree

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(leaf[:0]).dtype)
        return jax.ShapeDtypeStruct((batch_size, *np.shape(leaf)[1:]), dtype)

    return jax.tree.map(shape, rows)
