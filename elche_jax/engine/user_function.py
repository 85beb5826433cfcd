"""A user's function of one device's values, mapped over devices of one kind or of several."""

from collections.abc import Callable, Hashable
from typing import Any

import jax

from elche_jax.engine.lane import Fleet, Lanes
from elche_jax.engine.shapes import one_of, signature
from elche_jax.engine.traced import no_named_axis

PyTree = Any

NO_AXIS = "as devices of several {} have none in common"
INSTEAD = (
    "Exchange outside of it, with DDP.weighted_all_reduce_gradients, and pass ranks as "
    "np.array(ddp.ranks)."
)


def user_function(
    fleet: Fleet, fn: Callable[..., PyTree], donate: tuple[int, ...]
) -> Callable[..., PyTree]:
    """Return a function of stacked pytrees, see `DDP.map`; arguments are not checked."""
    mapped = fleet.mapped(lambda *args: (fn(*args), None), donate)
    if not isinstance(fleet, Lanes):
        return lambda *args: mapped(*args)[0]
    known: set[Hashable] = set()

    def over_lanes(*args: PyTree) -> PyTree:
        placed = fleet.place(args)
        if (key := signature(placed)) not in known:
            _refuse_axes(fleet, fn, placed)
            known.add(key)
        return mapped(*placed)[0]

    return over_lanes


def _refuse_axes(fleet: Lanes, fn: Callable[..., PyTree], args: PyTree) -> None:
    """Check that a function uses no named axis.

    Mapped over a lane of several devices it would find one, and exchange within the lane only.
    """
    one = one_of(args)
    several = "kinds" if fleet.job.one_process else "processes"
    with no_named_axis("DDP.map: fn", (NO_AXIS.format(several), INSTEAD)):
        jax.eval_shape(lambda *own: fn(*own), *one)  # not `fn`, whose trace JAX may know
