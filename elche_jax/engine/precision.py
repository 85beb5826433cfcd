"""Mixed precision: the dtype of the loss computation, and loss scaling.

Parameters, optimizer state and sums keep their own dtypes; `loss_fn` sees copies
in `compute_dtype`. The smallest float16 gradient is 6e-8, so the loss is multiplied by a
scale before differentiation and the gradient divided by it, in float32 or wider:

    grad(loss) = grad(scale * loss) / scale

A dynamic scale is a `flax.training.dynamic_scale.DynamicScale`: it is halved after a window
that is not finite and doubled after `growth_interval` finite ones in a row. It is part of the
training state.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax.engine.bits import is_float

PyTree = Any


@dataclass(frozen=True)
class Precision:
    """The precision in which a loss is computed.

    Attributes:
        compute_dtype: Dtype to which float leaves of the parameters and of the batch are cast
            for `loss_fn`; None for no cast.
        scale: Constant scale of the loss. A dynamic scale is part of the state.
    """

    compute_dtype: str | None = None
    scale: float = 1.0

    def cast(self, tree: PyTree) -> PyTree:
        """Cast the float leaves of a tree to `compute_dtype`."""
        if self.compute_dtype is None:
            return tree
        dtype = jnp.dtype(self.compute_dtype)
        return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)

    def scale_of(self, loss_scale: Any) -> Any:
        """Return the scale to use, constant or from the state; None for no scaling."""
        if loss_scale is not None:
            return loss_scale.scale
        return None if self.scale == 1.0 else self.scale


def adjust(loss_scale: Any, finite: Any) -> Any:
    """Update a dynamic loss scale after a window; None stays None.

    Flax applies its rule inside `DynamicScale.value_and_grad`, so that method is called with a
    function whose gradient is finite if the window's was.
    """
    if loss_scale is None:
        return None
    probe = loss_scale.value_and_grad(lambda x: x * jnp.where(finite, 0.0, jnp.nan))
    return probe(jnp.float32(0)).dynamic_scale


def first_scale(loss_scale: Any) -> tuple[float, Any]:
    """Check the user's loss scale and return its initial value.

    Args:
        loss_scale: None, a number, or a `flax.training.dynamic_scale.DynamicScale`.

    Returns:
        The constant scale (1 for none), and the dynamic scale for the state, or None.

    Raises:
        TypeError: If `loss_scale` has another type.
        ValueError: If it is a number that is not positive and finite.
    """
    if loss_scale is None:
        return 1.0, None
    if isinstance(loss_scale, int | float | np.number) and not isinstance(loss_scale, bool):
        return check.real("build_train_step", "loss_scale", loss_scale, above=0), None
    from flax.training.dynamic_scale import DynamicScale  # slow to import, rarely needed

    if not isinstance(loss_scale, DynamicScale):
        raise TypeError(
            "build_train_step: loss_scale must be a number or a "
            f"flax.training.dynamic_scale.DynamicScale, got {type(loss_scale).__name__}."
        )
    return 1.0, loss_scale.replace(
        fin_steps=jnp.int32(loss_scale.fin_steps), scale=jnp.float32(loss_scale.scale)
    )
