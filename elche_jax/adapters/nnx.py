"""`from_nnx`: a Flax NNX module as a loss function."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elche_jax import _check as check
from elche_jax.adapters.call import Call, Inputs
from elche_jax.adapters.model import described

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
    """Build a loss function from an NNX module and a loss of its outputs.

    The parameters are the module's `nnx.Param` variables; the model state consists of all others
    (such as BatchNorm statistics) except random streams and intermediates. For each microbatch,
    every random stream is reseeded with count 0 and a key derived from the microbatch's key and
    the stream's path in the module. Evaluation uses the module's own streams. A value that a call
    writes to a parameter, as `nnx.WeightNorm` does, lasts for that call only: the optimizer owns
    the parameters.

    Args:
        model: The module. It is not modified, except by `update`.
        loss: `loss(outputs, batch)`; returns a scalar, a vector of one loss per example,
            or `Weighted`; or one of these and a dict of metrics, with
            `build_train_step(..., has_aux=True)`.
        inputs: Inputs of the module: a key of the batch, or a function of the batch that
            returns a tuple of arguments or a dict of keyword arguments. None: the entry "x",
            "inputs" or "image" of a dict, the first item of a tuple or list, or the array
            itself.
        param_type: An NNX filter that selects the parameters; None for `nnx.Param`. All other
            variables are model state. To freeze some parameters, use `trainable` instead, which
            also skips their exchange.
        train_kwargs: Keyword arguments in training. None: an argument `train`, `training`,
            `is_training`, `deterministic` or `use_running_average` of `__call__` is set for
            training. The module is always in `train()` mode; `__call__` gets `rngs` if it
            accepts them.
        eval_kwargs: Keyword arguments in evaluation, where the module is in `eval()` mode.

    Returns:
        The model, with initial `params` and `model_state`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `param_type` selects nothing, or `__call__` has several training switches.

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
        todo = "For a flax.linen module, use from_linen."
        raise TypeError(check.message("from_nnx", "model", rule, described(model), todo))
    from elche_jax.adapters.nnx_model import NnxModel

    call = Call("from_nnx", model, inputs, train_kwargs, eval_kwargs)
    return NnxModel(model, loss, call, param_type)


def is_nnx(module: Any) -> bool:
    """Return whether an object is an NNX module."""
    from flax import nnx

    return isinstance(module, nnx.Module)
