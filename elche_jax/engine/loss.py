"""The forms of a loss function, unified.

| `loss_fn` returns | a microbatch contributes | its weight |
|---|---|---|
| scalar `loss` | `grad(loss)` | 1 (with a mask, the fraction of valid examples) |
| vector `loss[batch]` | `grad(sum of loss over valid examples)` | number of valid examples |
| `Weighted(loss, weight)` | `grad(weight * loss)` | `weight` |

The window's gradient is the sum of the contributions over the sum of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.engine.bits import wide
from elche_jax.engine.metric_names import WINDOW
from elche_jax.engine.returned import check_metric_name, checked_output
from elche_jax.engine.shapes import difference
from elche_jax.engine.traced import traced_alone

PyTree = Any
Form = Literal["scalar", "vector", "weighted"]


SMALLEST_WEIGHT = 2.0**-100
"""Smallest total weight of a window, 8e-31. Below it the float32 sums of `weight * gradient` are
too close to 2**-126, where devices flush to zero, for an accurate mean."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weighted:
    """A loss with an explicit weight for its microbatch.

    Attributes:
        loss: Scalar, the mean loss over the counted items (tokens, for instance).
        weight: Scalar, the number of counted items, at least 0. The gradient treats it as a
            constant. With weight 0 the microbatch contributes nothing, even if
            `loss` is NaN. A window is not finite if a weight is negative, or if weights above
            0 sum to less than 2**-100 (8e-31). With pending windows (`delay`) such a sum drops
            the window's update, and only `metrics["finite"]` reports it.

    Examples:
        >>> import jax.numpy as jnp
        >>> from elche_jax import Weighted
        >>> def loss_fn(params, batch, rng):
        ...     token_loss = (params["w"] * batch["x"] - batch["y"]) ** 2
        ...     tokens = batch["mask"].sum()
        ...     mean = (token_loss * batch["mask"]).sum() / jnp.maximum(tokens, 1)
        ...     return Weighted(mean, tokens)
    """

    loss: Any
    weight: Any


@dataclass(frozen=True)
class LossFn:
    """The user's loss function and its calling convention.

    Attributes:
        fn: `fn(params, batch, rng)`, or `fn(params, model_state, batch, rng)` with model state.
        has_aux: Whether the second element it returns holds a dict of metrics.
        has_model_state: Whether the second element holds the new model state.
        mask_key: Key under which the mask of valid examples, bool of shape `(batch,)`, is
            added to the batch (a dict); None for no mask.
    """

    fn: Callable[..., Any]
    has_aux: bool = False
    has_model_state: bool = False
    mask_key: str | None = None

    def __call__(
        self, params: PyTree, model_state: PyTree, batch: PyTree, mask: Any, rng: Any
    ) -> tuple[Any, PyTree, dict[str, Any]]:
        """Call the function; return `(loss, new model state, aux)`."""
        if self.mask_key is not None:
            batch = {**batch, self.mask_key: mask}
        state = (model_state,) if self.has_model_state else ()
        out = checked_output("loss_fn", self.fn(params, *state, batch, rng))
        if not self.has_aux and not self.has_model_state:
            return out, model_state, {}
        loss, second = self._pair(out)
        if not self.has_model_state:
            return loss, model_state, second
        if not self.has_aux:
            return loss, second, {}
        return loss, *self._pair(second, "a second element of ")

    def _pair(self, value: Any, part: str = "") -> tuple[Any, Any]:
        """Return a part of what the function returned; raise unless it is a pair."""
        if isinstance(value, tuple) and len(value) == 2:
            return value
        second = "aux"
        if self.has_model_state:
            second = "(model_state, aux)" if self.has_aux else "model_state"
        raise TypeError(f"loss_fn: must return (loss, {second}), got {part}{describe(value)}.")


@dataclass(frozen=True)
class LossForm:
    """The form of a loss function, found by an abstract call.

    Attributes:
        form: The form of the loss.
        aux: Shapes of the metrics, scalars or one value per example.
    """

    form: Form
    aux: dict[str, jax.ShapeDtypeStruct]


def inspect_loss(
    loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: PyTree, rng: Any
) -> LossForm:
    """Determine the form of a loss function by an abstract call.

    Args:
        loss_fn: The loss function.
        params: Shapes of the parameters.
        model_state: Shapes of the model state.
        batch: Shapes of one microbatch.
        rng: Shape of a key.

    Raises:
        TypeError: If the loss has none of the forms of this module, or if an auxiliary value
            or the model state does not have the expected structure.
        ValueError: If `mask_key` is already in the batch; also see `traced_alone`.
    """
    size = batch_size_of(batch)
    names = ("params", "model_state", "batch", "rng")
    check_takes("loss_fn", loss_fn.fn, names, loss_fn.has_model_state)
    check_mask_key(loss_fn.mask_key, batch)
    mask = jax.ShapeDtypeStruct((size,), jnp.bool_)
    _, (loss, new_state, aux) = traced_alone(
        "loss_fn", loss_fn, params, model_state, batch, mask, rng
    )
    differs = loss_fn.has_model_state and difference(new_state, model_state)
    if differs:
        pair = isinstance(new_state, tuple) and [type(part) for part in new_state[1:]] == [dict]
        hint = " If its second element is a dict of metrics, pass has_aux=True."
        raise TypeError(
            "loss_fn: the new model_state must have the structure, shapes and dtypes of the old "
            f"one, got another: {differs}.{hint if pair and not loss_fn.has_aux else ''}"
        )
    return LossForm(_form_of(loss, size), _check_aux(aux, size))


def check_takes(
    name: str, fn: Callable[..., Any], names: tuple[str, ...], has_model_state: bool
) -> None:
    """Check that a function accepts these positional arguments.

    Args:
        name: Name of the function, for the message.
        fn: The function.
        names: Names of the arguments, including `model_state`.
        has_model_state: Whether `model_state` is passed; it is left out otherwise.

    Raises:
        TypeError: If the function takes other arguments.
    """
    names = tuple(n for n in names if has_model_state or n != "model_state")
    how = "was" if has_model_state else "was not"
    check.takes(f"{name}:", fn, names, f", as model_state {how} given")


def check_mask_key(mask_key: str | None, batch: PyTree) -> None:
    """Check that a mask can be added to microbatches under this key.

    Raises:
        TypeError: If microbatches are not dicts.
        ValueError: If they already have this key.
    """
    if mask_key is None:
        return
    if not isinstance(batch, dict):
        raise TypeError(f"data: mask_key needs microbatches that are dicts, got {describe(batch)}.")
    if mask_key in batch:
        rule, got = "be a name of its own", f"{mask_key!r}, an entry of data"
        raise ValueError(check.message("data", "mask_key", rule, got, "Choose another name."))


def microbatch_terms(
    loss_fn: LossFn, form: Form, params: PyTree, model_state: PyTree, batch: PyTree,
    valid: Any, rng: Any,
) -> tuple[Any, tuple[Any, dict[str, Any], PyTree]]:  # fmt: skip
    """Compute the terms that one microbatch adds to the sums of its window.

    Args:
        loss_fn: The loss function.
        form: Its form, from `inspect_loss`.
        params: Parameters to differentiate with respect to.
        model_state: Model state.
        batch: One microbatch, leaves `(batch, ...)`.
        valid: Number of valid examples, which come first.
        rng: Key of the microbatch.

    Returns:
        `(mean loss, (weight, weighted metrics, new model state))`; float32 scalars. The
        caller multiplies by the weight after taking the gradient: a float16 gradient times
        a weight in the thousands would overflow.
    """
    size = batch_size_of(batch)
    mask = jnp.arange(size, dtype=valid.dtype) < valid
    loss, new_state, aux = loss_fn(params, model_state, batch, mask, rng)
    if form == "scalar":
        share = 1.0 if loss_fn.mask_key is None else valid.astype(jnp.float32) / size
        weight = jnp.float32(share)
        mean = jnp.asarray(loss, jnp.float32)
    elif form == "vector":
        weight = valid.astype(jnp.float32)
        # a `where`, not a product: the loss of an invalid example may be NaN
        # float64 until after the division, as the gradient is divided in the same dtype
        total = wide(jnp.where(mask, loss, 0)).sum()
        mean = (total / valid.astype(total.dtype)).astype(jnp.float32)
    else:
        weight = sound_weight(jax.lax.stop_gradient(jnp.asarray(loss.weight, jnp.float32)))
        mean = jnp.where(weight > 0, jnp.asarray(loss.loss, jnp.float32), 0)
    metrics = {name: _mean(value, mask, valid) * weight for name, value in aux.items()}
    if form == "weighted":
        # weight 0 times NaN is NaN
        metrics = {k: jnp.where(weight > 0, v, 0) for k, v in metrics.items()}
    return mean, (weight, metrics, new_state)


def sound_weight(weight: Any) -> Any:
    """Make a float32 weight safe on devices that flush subnormal numbers to zero.

    A negative weight becomes NaN, so that its window counts as not finite. A subnormal weight,
    which would be 0 in sums and comparisons, becomes the smallest normal number: it still
    counts as work, and `SMALLEST_WEIGHT` detects a window that holds nothing else.
    """
    bits = jax.lax.bitcast_convert_type(weight, jnp.int32)  # float comparisons flush, too
    tiny = jnp.finfo(jnp.float32).tiny
    first = jax.lax.bitcast_convert_type(jnp.asarray(tiny, jnp.float32), jnp.int32)
    weight = jnp.where((bits > 0) & (bits < first), tiny, weight)
    # the shift drops the sign bit, as -0.0 is not a negative weight
    return jnp.where((bits < 0) & (bits << 1 != 0), jnp.nan, weight)


def is_real(value: Any) -> bool:
    """Return whether an array holds real numbers or bools, and so has a float32 mean."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def check_weight(name: str, weight: Any) -> None:
    """Check that a weight is real and, if scalar, of a type that does not round counts.

    Args:
        name: Name of the weight, for the message.
        weight: The weight, or its shape.

    Raises:
        TypeError: If it is not real, or a scalar float of 16 bits or fewer.
    """
    dtype = weight.dtype
    if not is_real(weight):
        raise TypeError(f"{name} must be a real number or a bool, got {describe(weight)}.")
    if weight.shape == () and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise TypeError(
            f"{name} must be an integer, a bool or a float of at least 32 bits, as {dtype} rounds "
            f"counts, got {describe(weight)}. Sum masks with mask.sum(dtype=jnp.float32)."
        )


def batch_size_of(batch: PyTree) -> int:
    """Return the length of a microbatch's leading axis."""
    return int(jax.tree.leaves(batch)[0].shape[0])


def describe(value: Any) -> str:
    """Describe a value for an error message: its type, or its shape and dtype."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def _mean(value: Any, mask: Any, valid: Any) -> Any:
    value = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
    if value.ndim == 0:
        return value
    return jnp.where(mask, value, 0).sum() / valid.astype(jnp.float32)


def _form_of(loss: Any, size: int) -> Form:
    expected = (
        f"loss_fn: the loss must be a float scalar, a float vector of one loss per "
        f"example ({size}), or Weighted(loss, weight)"
    )
    if isinstance(loss, Weighted):
        for name, part in (("loss", loss.loss), ("weight", loss.weight)):
            if not hasattr(part, "shape") or part.shape != ():
                raise TypeError(f"loss_fn: Weighted.{name} must be a scalar, got {describe(part)}.")
        if not jnp.issubdtype(loss.loss.dtype, jnp.floating):
            raise TypeError(f"loss_fn: Weighted.loss must be a float, got {describe(loss.loss)}.")
        check_weight("loss_fn: Weighted.weight", loss.weight)
        return "weighted"
    if hasattr(loss, "shape") and jnp.issubdtype(loss.dtype, jnp.floating):
        if loss.shape == ():
            return "scalar"
        if loss.shape == (size,):
            return "vector"
    is_pair = isinstance(loss, tuple)
    hint = " If the second element is a dict of metrics, pass has_aux=True." if is_pair else ""
    raise TypeError(f"{expected}, got {describe(loss)}.{hint}")


def _check_aux(aux: Any, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    if not isinstance(aux, dict):
        rule = "be a dict of metrics (name to scalar or to one value per example)"
        raise TypeError(check.message("loss_fn", "aux", rule, describe(aux)))
    for name, value in aux.items():
        check_metric_name("loss_fn", name)
        WINDOW.check([name])
        if not hasattr(value, "shape") or value.shape not in ((), (size,)):
            rule, todo = f"be a scalar or one value per example ({size})", ""
            if isinstance(value, Weighted):
                todo = "Return its mean: a scalar weighs as much as the loss."
            raise TypeError(check.message("loss_fn", f"aux[{name!r}]", rule, describe(value), todo))
        if not is_real(value):
            rule = "be of real numbers or bools"
            todo = "Take the real and imaginary parts or the magnitude of complex numbers."
            raise TypeError(check.message("loss_fn", f"aux[{name!r}]", rule, describe(value), todo))
    return aux
