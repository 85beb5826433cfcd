"""Mixed precision: the type that a loss is computed in, and the scale of its gradient.

Parameters, optimizer state and sums stay in their own types (float32); `loss_fn` sees
copies in `compute_dtype`. Gradients in float16 reach down to 6e-8 only, so the loss is
multiplied by a scale before the gradient and the gradient divided by it, in float32:

    grad(loss) = grad(scale * loss) / scale

A dynamic scale is `flax.training.dynamic_scale.DynamicScale`: halved by a window that is
not finite, doubled after a number of finite ones. It belongs to the training state.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check

PyTree = Any


@dataclass(frozen=True)
class Precision:
    """How a loss is computed.

    Attributes:
        compute_dtype: Float leaves of the parameters and of the batch are cast to it for
            `loss_fn`; None leaves them as they are.
        scale: Constant scale of the loss. A dynamic one is in the state.
    """

    compute_dtype: str | None = None
    scale: float = 1.0

    def cast(self, tree: PyTree) -> PyTree:
        """The tree with its float leaves in the type to compute in."""
        if self.compute_dtype is None:
            return tree
        dtype = jnp.dtype(self.compute_dtype)
        return jax.tree.map(lambda x: x.astype(dtype) if _is_float(x) else x, tree)

    def scale_of(self, loss_scale: Any) -> Any:
        """The scale to use: a number, or that of the state; None for none."""
        if loss_scale is not None:
            return loss_scale.scale
        return None if self.scale == 1.0 else self.scale


def adjust(loss_scale: Any, finite: Any) -> Any:
    """The dynamic scale after a window; None for none.

    Flax's rule lies in `DynamicScale.value_and_grad`. It is asked with a function whose
    gradient is finite if the window's was.
    """
    if loss_scale is None:
        return None
    probe = loss_scale.value_and_grad(lambda x: x * jnp.where(finite, 0.0, jnp.nan))
    return probe(jnp.float32(0)).dynamic_scale


def first_scale(loss_scale: Any) -> tuple[float, Any]:
    """Checks the user's choice.

    Args:
        loss_scale: None, a number, or a `flax.training.dynamic_scale.DynamicScale`.

    Returns:
        The constant scale (1 for none), and the dynamic one for the state, or None.

    Raises:
        TypeError: It is none of these.
        ValueError: A number that is not above 0 or not finite.
    """
    if loss_scale is None:
        return 1.0, None
    if isinstance(loss_scale, int | float | np.number) and not isinstance(loss_scale, bool):
        return check.real("build_train_step", "loss_scale", loss_scale, above=0), None
    from flax.training.dynamic_scale import DynamicScale  # takes its time, and few want it

    if not isinstance(loss_scale, DynamicScale):
        raise TypeError(
            "build_train_step: loss_scale must be a number or a "
            f"flax.training.dynamic_scale.DynamicScale, got {type(loss_scale).__name__}."
        )
    return 1.0, loss_scale.replace(
        fin_steps=jnp.int32(loss_scale.fin_steps), scale=jnp.float32(loss_scale.scale)
    )


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
