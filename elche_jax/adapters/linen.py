"""`from_linen`: a Flax Linen module as a loss function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import errors, linen as nn
from flax.core import meta, unfreeze
from flax.core.scope import DenyList, in_filter

from elche_jax import _check as check
from elche_jax.adapters.call import Call, Inputs
from elche_jax.adapters.model import Model, described
from elche_jax.engine.loss import describe
from elche_jax.train.initial import as_key, check_one_copy

PyTree = Any

TRANSIENT = ("intermediates", "perturbations")
"""Collections written by one call for inspection, with shapes that depend on the batch."""

_MISSING = (
    errors.ScopeParamNotFoundError,
    errors.ScopeParamShapeError,
    errors.ScopeCollectionNotFound,
    errors.ScopeVariableNotFoundError,
    errors.ApplyScopeInvalidVariablesStructureError,
    errors.ApplyScopeInvalidVariablesTypeError,
)

_ASKED = {
    errors.ModifyScopeVariableError: {
        True: ("mutable", "name every collection that the module writes to in training"),
        False: ("eval_kwargs", "let the module write to no collection in an evaluation"),
    },
    errors.InvalidRngError: {
        True: ("rngs", "name every random stream of the module in training"),
        False: ("eval_kwargs", "let the module ask for no random keys in an evaluation"),
    },
}
"""The argument and the rule to report for each of these errors, by whether the module trains."""


class LinenModel(Model):
    """A `Model` of a Linen module; created by `from_linen`."""

    def __init__(self, module: nn.Module, loss: Any, call: Call, rngs: Any, mutable: Any):
        where = call.where
        super().__init__(where, self.run, loss)
        names = (rngs,) if isinstance(rngs, str) else rngs
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            rule = "be the name of a random stream or a sequence of names"
            raise TypeError(check.message(where, "rngs", rule, check.describe(rngs)))
        if len(set(names)) < len(names):
            rule, got = "hold every name once", ", ".join(map(repr, names))
            raise ValueError(check.message(where, "rngs", rule, got))
        rule = "be True, False, a name of a collection, or several names"
        filters = (bool, str, list, tuple, set, frozenset, DenyList)
        check.instance(where, "mutable", mutable, filters, rule)
        self._module, self._call, self._mutable, self._rngs = module, call, mutable, tuple(names)

    def init(self, rng: Any, batch: Any) -> tuple[PyTree, PyTree]:
        """Initialize the module in evaluation mode.

        Args:
            rng: A key or an integer seed.
            batch: A microbatch; one example is enough.

        Returns:
            `(params, model_state)`: the collection "params", and a dict of the others except
            "intermediates" and "perturbations", or None if there are none.

        Raises:
            TypeError: `rng` is neither a key nor a seed, or `batch` has the wrong type.
            ValueError: `batch` is a dict that lacks the inputs.
        """
        args, kwargs = self._call.arguments(batch, train=False)
        variables = unfreeze(self._module.init(as_key(rng, "Model.init"), *args, **kwargs))
        params = variables.pop("params", {})
        state = {name: part for name, part in variables.items() if name not in TRANSIENT}
        return params, state or None

    def merge(self, params: PyTree, model_state: PyTree = None) -> dict[str, Any]:
        """Return the variables for `module.apply`.

        Args:
            params: One copy of the parameters.
            model_state: The model state, if any.

        Returns:
            `{"params": params, **model_state}`.

        Raises:
            TypeError: `model_state` is not a dict.
            ValueError: `model_state` holds parameters; or a leaf holds the copies of several
                devices. With one device this cannot be detected: always call `unreplicate`.
        """
        check_one_copy("Model.merge", params=params, model_state=model_state)
        return {"params": params, **collections_of("Model.merge", "model_state", model_state)}

    def run(
        self, params: PyTree, model_state: PyTree, batch: Any, rng: Any, train: bool
    ) -> tuple[Any, PyTree]:
        """Return the outputs for a microbatch and, in training, the new model state."""
        boxed = collections_of(self._where, "model_state", model_state)
        args, kwargs = self._call.arguments(batch, train)
        state = _unboxed(boxed)
        # excludes what the module sows beside its state, which would change the state's structure
        changing = [name for name in state if train and in_filter(self._mutable, name)]
        keys = self._keys(rng) if train else {}
        variables = {"params": _unboxed(params), **state}
        try:
            outputs, new = self._module.apply(
                variables, *args, rngs=keys, mutable=changing, **kwargs
            )
        except _MISSING as error:
            rule = "hold what the module asks for, as model.init makes them"
            where, todo = "params and model_state", "Was train.init given both?"
            raise self._error(where, rule, error, todo) from error
        except tuple(_ASKED) as error:
            where, rule = _ASKED[type(error)][train]
            raise self._error(where, rule, error) from error
        return outputs, None if model_state is None else {**boxed, **_reboxed(boxed, unfreeze(new))}

    def _error(self, argument: str, rule: str, error: Exception, todo: str = "") -> ValueError:
        # Flax appends a link to its page about the error
        got = f"{type(error).__name__}: {str(error).split(' (https')[0].rstrip('.')}"
        return ValueError(check.message(self._where, argument, rule, got, todo))

    def _keys(self, rng: Any) -> dict[str, Any]:
        if len(self._rngs) < 2:  # the key itself, as in a hand-written loop
            return dict.fromkeys(self._rngs, rng)
        return dict(zip(self._rngs, jax.random.split(rng, len(self._rngs)), strict=True))


def from_linen(
    module: nn.Module,
    loss: Callable[[Any, Any], Any],
    *,
    inputs: Inputs | None = None,
    rngs: str | Sequence[str] = ("dropout",),
    mutable: Any = True,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> LinenModel:
    """Build a loss function from a Linen module and a loss of its outputs.

    Args:
        module: The module. If its `__call__` has an argument `train`, `training`,
            `is_training`, `deterministic` or `use_running_average`, that argument is set for
            training or evaluation.
        loss: `loss(outputs, batch)`; returns a scalar, a vector of one loss per example,
            or `Weighted`; or one of these and a dict of metrics, with
            `build_train_step(..., has_aux=True)`.
        inputs: Inputs of the module: a key of the batch, or a function of the batch that
            returns a tuple of arguments or a dict of keyword arguments. None: the entry "x",
            "inputs" or "image" of a dict, the first item of a tuple or list, or the array
            itself.
        rngs: Names of the random streams in training. A single stream gets the key of the
            microbatch, several get `jax.random.split(key, n)`, in this order.
        mutable: The collections updated by training, as a Flax filter of their names: True
            for all except "params". The others are constant: if the module writes to one of
            them in training, as BatchNorm does, the step raises an error.
        train_kwargs: Keyword arguments in training, instead of the inferred ones.
        eval_kwargs: Keyword arguments in evaluation, instead of the inferred ones.

    Returns:
        The model: `model.init(rng, batch)` returns parameters and model state.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `__call__` has several training switches, and `train_kwargs` or
            `eval_kwargs` is missing; or a name occurs twice in `rngs`.

    Examples:
        >>> import jax, numpy as np, optax
        >>> from flax import linen as nn
        >>> import elche_jax as elche
        >>> model = elche.from_linen(
        ...     nn.Dense(1), lambda outputs, batch: (outputs[:, 0] - batch["y"]) ** 2
        ... )
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], "float32")}
        >>> params, model_state = model.init(0, {"x": x[:1]})
        >>> model_state is None  # no BatchNorm, say
        True
        >>> train = elche.build_train_step(model, optax.adam(0.1), devices=jax.devices()[:2])
        >>> state = train.init(params, model_state=model_state)
        >>> for window in train.windows(data, batch_size=16, epochs=20):
        ...     state, metrics = train(state, window)
        >>> outputs = elche.predict(model.apply_fn, elche.unreplicate(state.params), x, 16)
        >>> bool(np.abs(outputs[:, 0] - data["y"]).max() < 0.1)
        True
    """
    if not isinstance(module, nn.Module):
        rule, todo = "be a flax.linen module", "For a flax.nnx module, use from_nnx."
        raise TypeError(check.message("from_linen", "module", rule, described(module), todo))
    call = Call("from_linen", module, inputs, train_kwargs, eval_kwargs)
    return LinenModel(module, loss, call, rngs, mutable)


def collections_of(where: str, argument: str, model_state: PyTree) -> dict[str, Any]:
    """Return model state as a dict of collections; None as an empty one.

    Args:
        where: The function the user called.
        argument: The argument's name.
        model_state: The model state.

    Raises:
        TypeError: It is not a dict.
        ValueError: It holds parameters, which would replace those that are trained.
    """
    if model_state is None:
        return {}
    if not isinstance(model_state, Mapping):
        rule = "be a dict of collections"
        raise TypeError(check.message(where, argument, rule, describe(model_state)))
    if "params" in model_state:
        rule, got = "hold no collection 'params'", ", ".join(map(repr, model_state))
        todo = "Leave it out: parameters belong in params only."
        raise ValueError(check.message(where, argument, rule, got, todo))
    return unfreeze(dict(model_state))


def _unboxed(tree: PyTree) -> PyTree:
    """Unbox the values that `nn.with_partitioning` has boxed.

    Flax would constrain them to the mesh axes that `nn.with_partitioning` names, which the mesh of
    the training lacks: here every device holds the whole arrays.
    """

    def value(box: Any) -> Any:
        return box.unbox(apply_constraint=False) if isinstance(box, meta.Partitioned) else box

    return meta.map_axis_meta(value, tree)


def _reboxed(boxed: Any, tree: Any) -> Any:
    """Put the values that the module has changed back into the boxes that `_unboxed` removed."""
    if isinstance(boxed, meta.Partitioned):
        return boxed.replace_boxed(tree)
    if isinstance(boxed, Mapping) and isinstance(tree, Mapping):
        return {name: _reboxed(boxed.get(name), value) for name, value in tree.items()}
    return tree
