"""What the first process of a job reads from disk, in all processes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from elche_jax.checkpoint.store import Saved
from elche_jax.data.order import Cursor
from elche_jax.engine.job import Job
from elche_jax.engine.state import TrainState


class Restored(NamedTuple):
    """The point from which a run resumes.

    Attributes:
        state: The training state.
        cursor: The place in the data; None at the start.
        notes: The notes saved with it.
    """

    state: TrainState
    cursor: Cursor | None
    notes: Mapping[str, Any]


def read_by_first(job: Job, read: Callable[[], Saved | None]) -> Saved | None:
    """Read a checkpoint in the first process; all have to call it, and all get it.

    The folder need not be there in the others. Arrays come one after the other, in parts.

    Args:
        job: The processes.
        read: Reads it, or returns None; all processes raise its error.
    """
    arrays: Mapping[str, np.ndarray] = {}

    def without_arrays() -> Saved | None:
        nonlocal arrays
        saved = read()
        if saved is None:
            return None
        arrays = saved.leaves
        return replace(saved, leaves={})

    saved = job.by_first(without_arrays)
    if saved is None:
        return None
    leaves = {
        name: job.from_first(arrays.get(name), spec.shape, np.dtype(spec.dtype))
        for name, spec in saved.specs.items()
    }
    return replace(saved, leaves=leaves)
