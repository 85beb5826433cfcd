"""The devices' sums over microbatches, which stay on the devices between windows."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.bits import is_key
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.lane import Fleet
from elche_jax.engine.replicas import replicate_over
from elche_jax.engine.shapes import stacked
from elche_jax.engine.state import TrainState

PyTree = Any


class Accumulators:
    """Owns the carries that the programs of windows pass from call to call.

    Args:
        program: The computation of one device.
        fleet: The devices.
        one: Shapes of one device's state.
    """

    def __init__(self, program: CollectiveProgram, fleet: Fleet, one: TrainState):
        self._program, self._fleet, self._one = program, fleet, one
        self._kept: PyTree = None
        self._unreported: PyTree = None

    @cached_property
    def _shape(self) -> PyTree:  # lazy: tracing is slow, and whole windows need no carry
        return jax.eval_shape(self._program.zeros, self._one)

    @cached_property
    def shapes(self) -> PyTree:
        """Shapes of the stacked carries."""
        return stacked(self._shape, self._fleet.world_size)

    def take(self) -> PyTree:
        """Return the carries to donate; a call that fails leaves none behind."""
        kept, self._kept = self._kept, None
        return self._zeros() if kept is None else kept

    def put(self, carries: PyTree) -> None:
        """Keep the carries for the next window."""
        self._kept = carries

    def release(self) -> None:
        """Free the carries; the next window allocates them."""
        self._kept = self._unreported = None

    @property
    def unreported(self) -> PyTree:
        """Metrics of the pending windows, which later windows will report; None if there are none.

        Host arrays, leaves `(devices,)`. Reading them waits for the last window.
        """
        if not self._program.pending or self._kept is None:
            return self._unreported
        return jax.tree.map(np.asarray, self._program.unreported(self._kept))

    @unreported.setter
    def unreported(self, rows: PyTree) -> None:
        if not self._program.pending:
            return
        here = jax.eval_shape(self._program.unreported, self._shape)
        if jax.tree.structure(rows) == jax.tree.structure(here):  # the metrics may have changed
            self._kept, self._unreported = None, rows

    def _zeros(self) -> PyTree:
        carries = replicate_over(self._fleet, jax.tree.map(zeros, self._shape))
        if self._unreported is None:
            return carries
        rows, self._unreported = self._unreported, None
        # copies, as CPU devices may alias host memory and a window donates them
        placed = jax.tree.map(lambda row: self._fleet.put(np.array(row)), rows)
        return self._program.reporting(carries, placed)


def zeros(like: jax.ShapeDtypeStruct) -> Any:
    """Return an array of zeros, on the host if the dtype allows it."""
    return (jnp if is_key(like) else np).zeros(like.shape, like.dtype)
