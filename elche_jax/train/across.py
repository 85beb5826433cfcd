"""Checks that all processes of a job begin a run with the same values and the same data."""

from typing import Any

import jax
import numpy as np

from elche_jax._processes import noting_errors
from elche_jax.data.order import Cursor
from elche_jax.data.source import IterableSource, MapSource, Source
from elche_jax.engine.digests import Described, digest_of
from elche_jax.engine.job import Job
from elche_jax.engine.merge import MergeRules
from elche_jax.engine.shapes import named, one_of
from elche_jax.engine.state import TrainState
from elche_jax.engine.trainable import Selection
from elche_jax.train.spec import DataPlan

PyTree = Any

SAMPLES = 8
"""Largest number of examples that processes compare of arrays, besides the number of examples."""


def check_same_start(
    job: Job, params: PyTree, model_state: PyTree, rng: Any, selection: Selection, merge: MergeRules
) -> None:
    """Raise unless all processes begin a run from the same values and exchange the same leaves."""
    if not job.one_process:
        frozen = f"frozen {[name for name, _ in named(selection.split(params)[1], 'params')]}"
        job.check_same(
            "TrainStep.init", params=digest_of(params), model_state=digest_of(model_state),
            rng=digest_of(rng), trainable=Described.of(frozen), merge=list(merge.rules),
        )  # fmt: skip


def check_same_optimizer(job: Job, state: TrainState) -> None:
    """Raise unless all processes' optimizer states, which may be exchanged, have equal shapes."""
    if not job.one_process:
        # compared by leaf names, as the repr of a tree structure may contain function addresses
        leaves = named(one_of((state.opt_state, state.averaging)))
        shapes = [(path, leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
        name = "shapes of the optimizer's state"
        job.check_same("TrainStep.init", **{name: repr(shapes).encode()})


@noting_errors
def check_same_data(job: Job, plan: DataPlan, start: Cursor) -> None:
    """Raise unless all processes read the same data in the same way.

    For arrays this compares the number of examples, their shapes and the values of some. For a
    map-style dataset it compares the number and the shapes only, as the dataset may change its
    examples at random; for an iterable the shapes only, as reading would use up its examples.
    """
    if not job.one_process:
        job.check_same(
            "windows", data=fingerprint(plan), batch_size=plan.batch_size, epochs=plan.epochs,
            seed=plan.seed, shuffle=plan.shuffle, drop_last=plan.drop_last,
            mask_key=plan.mask_key, cursor=start,
        )  # fmt: skip


def fingerprint(plan: DataPlan) -> str | Described:
    """Return the part of the data that processes can compare, see `check_same_data`."""
    source: Source = plan.source
    if isinstance(source, IterableSource):
        return f"microbatches of {_kinds(plan.microbatch, 0)}"
    said = f"{source.size} examples of {_kinds(plan.microbatch, 1)}"
    if isinstance(source, MapSource):
        return said
    numbers = np.unique(np.linspace(0, source.size - 1, SAMPLES).astype(np.int64))
    return Described(said, digest_of(source.rows(numbers)))


def _kinds(microbatch: PyTree, skip: int) -> PyTree:
    """Return dtypes and shapes as text, without the first `skip` dimensions."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{[*leaf.shape[skip:]]}", microbatch)
