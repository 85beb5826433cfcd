"""`from_nnx`: a Flax NNX module as a loss function."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elche_jax import _check as check
from elche_jax.adapters.call import Inputs

if TYPE_CHECKING:
    from elche_jax.adapters.nnx_model import NnxModel


def from_nnx(
    model: Any,
    loss: Callable[[Any, Any], Any],
    *,
    inputs: Inputs | None = None,
    param_type: Any = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> "NnxModel":
    """Makes a loss function of an NNX module and a loss of its outputs.

    Parameters are the module's `nnx.Param`, the model state its other variables (BatchNorm
    statistics), but for random streams and intermediates. For every microbatch all random
    streams begin anew: at count 0, with a key made of the microbatch's key and the
    stream's place in the module. In evaluation they are those of the module. What a call
    writes into a parameter, as `nnx.WeightNorm` does, holds for that call: parameters are
    the optimizer's.

    Args:
        model: The module. It stays as it is; `update` writes into it.
        loss: `loss(outputs, batch)`; returns a scalar, a vector of one loss per example,
            or `Weighted`; or one of them and a dict of metrics, with
            `build_train_step(..., has_aux=True)`.
        inputs: What the module is called with: a key of the batch, or a function of the
            batch that returns a tuple of arguments or a dict of keyword arguments. None:
            the entry "x", "inputs" or "image" of a dict, the first of a tuple or list, the
            array itself.
        param_type: An NNX filter of the variables that are parameters; None for
            `nnx.Param`. All others are model state. To freeze a part, leave it as it is and
            use `trainable`, which saves the exchange.
        train_kwargs: Keyword arguments in training. None: what an argument `train`,
            `training`, `is_training`, `deterministic` or `use_running_average` of `__call__`
            needs. The module is in the mode of `train()` in any case; `__call__` gets
            `rngs` if it takes them.
        eval_kwargs: Keyword arguments in evaluation, in the mode of `eval()`.

    Returns:
        The model, with `params` and `model_state` to begin with.

    Raises:
        TypeError: An argument is of another kind than above.
        ValueError: `param_type` chooses nothing; `__call__` has several switches.

    Examples:
        >>> import jax, numpy as np, optax
        >>> from flax import nnx
        >>> import elche_jax as elche
        >>> module = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> model = elche.from_nnx(
        ...     module, lambda outputs, batch: (outputs[:, 0] - batch["y"]) ** 2
        ... )
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], "float32")}
        >>> train = elche.build_train_step(model, optax.adam(0.1), devices=jax.devices()[:2])
        >>> state = train.init(model.params, model_state=model.model_state)
        >>> for window in train.windows(data, batch_size=16, epochs=20):
        ...     state, metrics = train(state, window)
        >>> model.update(elche.unreplicate(state.params))
        >>> bool(np.abs(module(x)[:, 0] - data["y"]).max() < 0.1)
        True
    """
    if not is_nnx(model) or not callable(model):
        rule = "be a flax.nnx module with __call__"
        got = f"the class {model.__name__}" if isinstance(model, type) else check.describe(model)
        todo = "A flax.linen module: from_linen."
        raise TypeError(check.message("from_nnx", "model", rule, got, todo))
    from elche_jax.adapters.nnx_model import NnxModel

    return NnxModel("from_nnx", model, loss, inputs, param_type, train_kwargs, eval_kwargs)


def is_nnx(module: Any) -> bool:
    """Whether it is an NNX module."""
    from flax import nnx

    return isinstance(module, nnx.Module)
