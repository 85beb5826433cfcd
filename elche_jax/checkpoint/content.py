"""The content of a checkpoint, and its way back to all processes and devices."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from elche_jax.checkpoint.leaves import LeafSpec
from elche_jax.checkpoint.snapshot import Snapshot, difference, own_names, put, repeated, stacked
from elche_jax.checkpoint.store import Saved
from elche_jax.engine.job import Job
from elche_jax.engine.state import TrainState
from elche_jax.train.in_flight import Window
from elche_jax.train.step import TrainStep

COUNTS = "counts_history"
"""Name under which the counts are saved next to the leaves of the state."""

PENDING = "pending/"
"""Prefix of the names of the arrays that hold windows pending on the host."""

Notes = Callable[[], Mapping[str, Any]]


def content_of(
    window: Window,
    snapshot: Snapshot,
    run: Mapping[str, Any],
    more: Notes | None,
    score: float | None,
) -> Saved:
    """Fetch the content of a checkpoint.

    Args:
        window: The last trained window.
        snapshot: The state after it.
        run: The rest of the run, see `TrainStep.run_to_dict`.
        more: Returns further notes.
        score: Score of the state.
    """
    numbers = dict(run)
    leaves = snapshot.fetch() | {COUNTS: numbers.pop("counts")}
    if pending := run.get("pending"):
        arrays = pending["arrays"]
        leaves |= {f"{PENDING}{at}": np.asarray(array) for at, array in enumerate(arrays)}
        numbers["pending"] = pending | {"arrays": len(arrays)}
    notes = {
        "world_size": len(run["left_out"]),
        "cursor": window.cursor.to_dict(),
        "run": numbers,
        "notes": {} if more is None else dict(more()),
    }
    specs = {name: LeafSpec.of(array, name in snapshot.own) for name, array in leaves.items()}
    return Saved(window.index + 1, leaves, specs, notes, score)


def run_of(saved: Saved) -> dict[str, Any]:
    """Return the run in a checkpoint, as `content_of` got it."""
    run = saved.notes["run"] | {"counts": saved.leaves[COUNTS]}
    if pending := run.get("pending"):
        arrays = [saved.leaves[f"{PENDING}{at}"] for at in range(pending["arrays"])]
        run["pending"] = pending | {"arrays": arrays}
    return run


def read_by_first(job: Job, read: Callable[[], Saved | None]) -> Saved | None:
    """Read a checkpoint in the first process and return it in all; all must call this.

    The other processes need no access to the folder. Arrays are sent one after another, in parts.

    Args:
        job: The processes.
        read: Reads the checkpoint, or returns None; its errors are raised in all processes.
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


def state_of(saved: Saved, train: TrainStep, like: TrainState, folder: Path) -> TrainState:
    """Place a saved state on the devices like an existing state; errors name `folder`."""
    specs = {
        name: spec
        for name, spec in saved.specs.items()
        if name != COUNTS and not name.startswith(PENDING)
    }
    differs = difference(like, specs)
    if differs:
        raise ValueError(
            f"checkpoints: {folder / str(saved.step)} must be of this model and "
            f"optimizer, but {differs}. Is it another run's folder?"
        )
    before = saved.notes["world_size"]
    rows = stacked(like, saved.leaves, specs, before)
    own = own_names(like, train.common(like))
    apart = {name for name, spec in specs.items() if spec.own}
    # also join if this run replicates a leaf that differed between the saved run's devices
    moved = before != train.world_size or not apart <= own
    rows = train.adopt(rows, join=moved)
    if moved:
        rows = jax.tree.map(lambda leaf: repeated(leaf, train.world_size), rows)
    return put(like, rows, train.fleet)
