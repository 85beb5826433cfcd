"""`from_head`: objects that hold a module and its parameters, or apply parameters themselves."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from flax import linen as nn
from flax.core import unfreeze

from elche_jax import _check as check
from elche_jax.adapters.call import Call, Inputs
from elche_jax.adapters.linen import TRANSIENT, LinenModel, collections_of
from elche_jax.adapters.model import Apply, Model, copied
from elche_jax.adapters.nnx import is_nnx
from elche_jax.engine.loss import describe
from elche_jax.train.initial import check_one_copy

if TYPE_CHECKING:
    from elche_jax.adapters.nnx_model import NnxModel

PyTree = Any


class Head(Protocol):
    """Interface of a trainable object that holds no Flax module.

    `apply` is traced. Neither method may modify the object.

    Examples:
        >>> import numpy as np
        >>> class Scale:
        ...     def variables(self):
        ...         return {"w": np.ones((), "float32")}, None
        ...
        ...     def apply(self, params, model_state, batch, rng, train):
        ...         return batch["x"] * params["w"], model_state
    """

    def variables(self) -> tuple[PyTree, PyTree]:
        """Return the initial `(params, model_state)`; `model_state` is None if there is none."""
        ...

    def apply(
        self, params: PyTree, model_state: PyTree, batch: Any, rng: Any, train: bool
    ) -> tuple[Any, PyTree]:
        """Return `(outputs, model_state)` for a microbatch; `rng` is None if `train` is False."""
        ...


class _Form:
    """How to read a head's variables and write them back; here for an implementation of `Head`."""

    def variables(self, head: Any) -> tuple[PyTree, PyTree]:
        return _pair("variables", "(params, model_state)", head.variables())

    def fields(self, head: Any, params: PyTree, model_state: PyTree) -> dict[str, Any]:
        return {"params": params} | ({} if model_state is None else {"model_state": model_state})


class _LinenForm(_Form):
    """A head with a Linen module; `.params` holds parameters or all variables."""

    def variables(self, head: Any) -> tuple[PyTree, PyTree]:
        given = getattr(head, "model_state", None)
        apart = collections_of("from_head", "obj.model_state", given)
        if not _has_collections(head.params):
            return head.params, given
        inside = _collections(head.params)
        twice = [name for name in apart if name in inside]
        if twice:
            rule = "hold no collection that obj.params has too"
            got = ", ".join(map(repr, twice))
            raise ValueError(check.message("from_head", "obj.model_state", rule, got))
        return unfreeze(head.params)["params"], {**inside, **apart} or None

    def fields(self, head: Any, params: PyTree, model_state: PyTree) -> dict[str, Any]:
        state = collections_of("Model.write_back", "model_state", model_state)
        if not _has_collections(head.params):
            return super().fields(head, params, model_state)
        apart = getattr(head, "model_state", None)
        there = {} if apart is None else {k: state.get(k, part) for k, part in apart.items()}
        inside = _collections(head.params)
        inside |= {name: part for name, part in state.items() if name not in there}
        fields = {"params": {"params": params, **inside}}
        return fields if apart is None else {**fields, "model_state": there}


class _NnxForm(_Form):
    """A head with an NNX module; `.params` holds nested dicts or an `nnx.State`."""

    def __init__(self, model: "NnxModel"):
        self._model = model

    def variables(self, head: Any) -> tuple[PyTree, PyTree]:
        state = getattr(head, "model_state", None)
        return _plain(head.params), self._model.model_state if state is None else _plain(state)

    def fields(self, head: Any, params: PyTree, model_state: PyTree) -> dict[str, Any]:
        from flax import nnx

        module = self._model.merge(params, model_state)
        given = self._model.as_state(params) if isinstance(head.params, nnx.State) else params
        fields = {"module": module, "params": given}
        return fields | ({"model_state": model_state} if hasattr(head, "model_state") else {})


class HeadModel(Model):
    """A `Model` of a head; created by `from_head`."""

    def __init__(self, head: Any, form: _Form, apply: Apply, loss: Callable[[Any, Any], Any]):
        super().__init__("from_head", apply, loss)
        self._head, self._form = head, form

    @property
    def params(self) -> PyTree:
        """A copy of the head's current parameters."""
        return copied("from_head", "params", self._form.variables(self._head)[0])

    @property
    def model_state(self) -> PyTree:
        """A copy of the head's current model state; None if there is none."""
        return copied("from_head", "model_state", self._form.variables(self._head)[1])

    def write_back(self, head: Any, params: PyTree, model_state: PyTree = None) -> Any:
        """Return a copy of a head that holds these values; the head itself is not modified.

        Args:
            head: The head passed to `from_head`, or one like it.
            params: One copy of the parameters.
            model_state: The model state, if any; None keeps the model state of a head with a
                Linen module.

        Returns:
            The head with new `.params` in their original form (but a dict for a `FrozenDict`), new
            `.model_state` unless `.params` holds it, and, with an NNX module, a new `.module`.
            Neither `__init__` nor `__post_init__` runs.

        Raises:
            TypeError: The head lacks one of these attributes, or one of them cannot be set; or
                the model state of a Linen module is not a dict.
            ValueError: A leaf holds the copies of several devices, or the model state of a Linen
                module holds parameters.
        """
        check_one_copy("Model.write_back", params=params, model_state=model_state)
        fields = self._form.fields(head, params, model_state)
        for name in fields:
            if not hasattr(head, name):
                rule, got = f"have an attribute {name} to write to", type(head).__name__
                raise TypeError(check.message("Model.write_back", "head", rule, got))
        # not `dataclasses.replace`: it runs `__init__`, which may create new parameters
        new = copy.copy(head)
        # a dataclass may be frozen
        put = object.__setattr__ if dataclasses.is_dataclass(head) else setattr
        for name, value in fields.items():
            try:
                put(new, name, value)
            except AttributeError as error:
                rule = f"have an attribute {name} that can be set"
                got = f"{type(head).__name__}: {error}"
                raise TypeError(check.message("Model.write_back", "head", rule, got)) from error
        return new


def from_head(
    obj: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    inputs: Inputs | None = None,
    rngs: str | Sequence[str] | None = None,
    mutable: Any = None,
    param_type: Any = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> HeadModel:
    """Build a loss function from an object that holds a module and its parameters.

    Args:
        obj: An object with `.module`, Linen or NNX, and `.params`: the parameters, or all
            variables of a Linen module. Its `.model_state`, if any, is used too; no collection
            may be in both. Or an object with the two methods of `Head`.
        loss: `loss(outputs, batch)`, as for `from_linen`; None for `obj.loss`.
        inputs: As for `from_linen`; this and all arguments below require a `.module`.
        rngs: As for `from_linen`; None for `"dropout"`.
        mutable: As for `from_linen`; None for all collections except "params".
        param_type: As for `from_nnx`.
        train_kwargs: As for `from_linen`.
        eval_kwargs: As for `from_linen`.

    Returns:
        The model, with initial `params` and `model_state`, and `write_back`.

    Raises:
        TypeError: `obj` is neither kind of object, there is no loss, or an argument does not
            apply to this kind of object.
        ValueError: As raised by `from_linen` and `from_nnx`. Reading `params` or `model_state`
            raises it if a collection is in both, if parameters are in `obj.model_state`, or if an
            integer does not fit 32 bits and 64-bit types are disabled.

    Examples:
        >>> from dataclasses import dataclass
        >>> import jax, numpy as np, optax
        >>> from flax import linen as nn
        >>> import elche_jax as elche
        >>> @dataclass
        ... class Regression:
        ...     module: nn.Module
        ...     params: dict
        ...
        ...     def loss(self, outputs, batch):
        ...         return (outputs[:, 0] - batch["y"]) ** 2
        >>> x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
        >>> data = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0], "float32")}
        >>> module = nn.Dense(1)
        >>> head = Regression(module, module.init(jax.random.key(0), x[:1]))
        >>> model = elche.from_head(head)
        >>> train = elche.build_train_step(model, optax.adam(0.1), devices=jax.devices()[:2])
        >>> state = train.init(model.params, model_state=model.model_state)
        >>> for window in train.windows(data, batch_size=16, epochs=20):
        ...     state, metrics = train(state, window)
        >>> head = model.write_back(head, elche.unreplicate(state.params))
        >>> head.params["params"]["kernel"].round(1).tolist()
        [[1.0], [-2.0], [3.0]]
    """
    module = getattr(obj, "module", None)
    if loss is None:
        loss = getattr(obj, "loss", None)
        if not callable(loss):
            rule = "be given, as obj has no method loss(outputs, batch)"
            raise TypeError(check.message("from_head", "loss", rule, "None"))
    options = {
        "rngs": rngs, "mutable": mutable, "param_type": param_type, "inputs": inputs,
        "train_kwargs": train_kwargs, "eval_kwargs": eval_kwargs,
    }  # fmt: skip
    if isinstance(module, nn.Module) and hasattr(obj, "params"):
        _reject(options, "an NNX module", "param_type")
        rngs, mutable = ("dropout",) if rngs is None else rngs, mutable is None or mutable
        call = Call("from_head", module, inputs, train_kwargs, eval_kwargs)
        linen = LinenModel(module, loss, call, rngs, mutable)
        return HeadModel(obj, _LinenForm(), linen.run, loss)
    if is_nnx(module) and hasattr(obj, "params"):
        _reject(options, "a Linen module", "rngs", "mutable")
        from elche_jax.adapters.nnx_model import NnxModel

        call = Call("from_head", module, inputs, train_kwargs, eval_kwargs)
        made = NnxModel(module, loss, call, param_type)
        return HeadModel(obj, _NnxForm(made), made.run, loss)
    # checked first: a Linen module has both methods, too, but raises when `variables` is read
    is_module = isinstance(obj, nn.Module) or is_nnx(obj)
    if is_module or not all(callable(getattr(obj, n, None)) for n in ("variables", "apply")):
        rule = "have .module, a flax module, and .params, or the methods variables and apply"
        todo = "For a module itself, use from_linen or from_nnx." if is_module else ""
        raise TypeError(check.message("from_head", "obj", rule, type(obj).__name__, todo))
    _reject(options, "a .module", *options)
    head = cast(Head, obj)

    def apply(*args: Any) -> tuple[Any, PyTree]:
        return _pair("apply", "(outputs, model_state)", head.apply(*args))

    return HeadModel(obj, _Form(), apply, loss)


def _reject(options: Mapping[str, Any], what: str, *names: str) -> None:
    """Raise an error if an option that has no effect is given."""
    for name in names:
        if options[name] is not None:
            rule, got = f"be left out for a head without {what}", check.describe(options[name])
            raise TypeError(check.message("from_head", name, rule, got))


def _pair(method: str, what: str, got: Any) -> tuple[Any, Any]:
    if not isinstance(got, tuple) or len(got) != 2:
        rule = f"return {what}"
        raise TypeError(check.message("from_head", f"obj.{method}", rule, describe(got)))
    return got


def _has_collections(params: Any) -> bool:
    """Return whether `params` holds all variables of a Linen module, not only its parameters."""
    return isinstance(params, Mapping) and "params" in params


def _collections(whole: Any) -> dict[str, Any]:
    """Return the collections that make up the model state."""
    skipped = ("params", *TRANSIENT)
    return {name: part for name, part in unfreeze(whole).items() if name not in skipped}


def _plain(tree: Any) -> Any:
    """Convert nested dicts or an `nnx.State` to nested dicts of values with string keys."""
    from flax import nnx

    if isinstance(tree, nnx.Variable):
        return tree.get_raw_value()
    if isinstance(tree, Mapping):
        return {str(name): _plain(value) for name, value in tree.items()}
    return tree
