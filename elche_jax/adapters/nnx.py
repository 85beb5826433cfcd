"""`from_nnx`: a Flax NNX module as a loss function.

The module is taken apart once: its graph, in training and in evaluation mode, and its
variables, by what becomes of them. A call puts a module together, runs it, and reads the
model state off it again; the user's module takes no part.
"""

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from elche_jax import _check as check
from elche_jax.adapters.call import Call, Inputs, call_of
from elche_jax.adapters.model import Model, named_leaves
from elche_jax.train.initial import check_one_copy

PyTree = Any
Kind = Literal["params", "model_state", "random", "fixed"]


@dataclass(frozen=True)
class Slot:
    """A variable of the module.

    Attributes:
        path: Where it is, for flax.
        names: The same as strings: its place in nested dicts.
        kind: What becomes of it.
        variable: The variable with shapes for its value; of an array that is an attribute
            without a variable its shape.
        value: Its value, where it is random or fixed.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    kind: Kind
    variable: Any
    value: Any


class NnxModel(Model):
    """A `Model` of an NNX module; made by `from_nnx`."""

    def __init__(self, where: str, module: Any, call: Call, loss: Any, param_type: Any):
        from flax import nnx

        super().__init__(where, self.run, loss)
        self._module, self._call = module, call
        self._is_param = _predicate(where, "param_type", param_type)
        training, evaluating = nnx.clone(module), nnx.clone(module)
        training.train()
        evaluating.eval()
        self._graphs = {True: nnx.graphdef(training), False: nnx.graphdef(evaluating)}
        self._graph = nnx.graphdef(module)
        self._rngs = inspect.signature(type(module).__call__).parameters.get("rngs")
        shapes = jax.eval_shape(lambda: nnx.state(module))
        values = {path: _value(variable) for path, variable in _flat(module)}
        self._slots = [
            self._slot(path, variable, values[path]) for path, variable in nnx.to_flat_state(shapes)
        ]
        if not any(slot.kind == "params" for slot in self._slots):
            rule = "choose at least one variable of the module"
            got = f"{param_type!r}, which chooses none"
            raise ValueError(check.message(where, "param_type", rule, got))

    @property
    def params(self) -> dict[str, Any]:
        """The module's parameters as they are now, copied: nested dicts, keys are strings."""
        return _copied(self._read("params", self._module))

    @property
    def model_state(self) -> dict[str, Any] | None:
        """The module's other variables as they are now, copied; None where there are none."""
        return _copied(self._read("model_state", self._module))

    def merge(self, params: PyTree, model_state: PyTree = None) -> Any:
        """A new module with these values, in the mode of the one given to `from_nnx`.

        Args:
            params: Parameters, one copy of them.
            model_state: The model state, where there is one.

        Returns:
            The module. Its random streams begin as those of the original.

        Raises:
            ValueError: A leaf is missing, unknown, of another shape, or holds the copies
                of several devices.
        """
        from flax import nnx

        values = self._given("Model.merge", params, model_state)
        return nnx.merge(self._graph, self._state(values))

    def update(self, params: PyTree, model_state: PyTree = None) -> None:
        """Writes these values into the module given to `from_nnx`.

        Args:
            params: Parameters, one copy of them.
            model_state: The model state, where there is one.

        Raises:
            ValueError: As by `merge`.
        """
        from flax import nnx

        values = self._given("Model.update", params, model_state)
        trained = [slot for slot in self._slots if slot.kind in ("params", "model_state")]
        nnx.update(self._module, self._state(values, trained))

    def trainable(self, chosen: Any) -> dict[str, Any]:
        """What `build_train_step(..., trainable=)` takes, from a filter of flax.

        Parameters that the filter leaves out are frozen: no gradient, no optimizer state,
        no exchange.

        Args:
            chosen: An NNX filter, `nnx.LoRAParam` or `nnx.PathContains("head")` say.

        Returns:
            Bools in the structure of the parameters.

        Raises:
            TypeError: It is no filter.
            ValueError: The filter chooses no parameter.
        """
        is_chosen = _predicate("Model.trainable", "chosen", chosen)
        slots = [slot for slot in self._slots if slot.kind == "params"]
        flags = {slot.names: bool(is_chosen(slot.path, slot.variable)) for slot in slots}
        if not any(flags.values()):
            rule, got = "choose at least one parameter", f"{chosen!r}, which chooses none"
            raise ValueError(check.message("Model.trainable", "chosen", rule, got))
        return unflatten_dict(flags)

    def as_state(self, params: PyTree) -> Any:
        """Parameters as an `nnx.State`."""
        slots = [slot for slot in self._slots if slot.kind == "params"]
        return self._state(self._found("params", params, "Pass all of them."), slots)

    def _slot(self, path: tuple[Any, ...], variable: Any, value: Any) -> Slot:
        kind = self._kind(path, variable)
        own = jax.tree.map(jnp.copy, value) if kind in ("random", "fixed") else None
        return Slot(path, tuple(map(str, path)), kind, variable, own)

    def _kind(self, path: tuple[Any, ...], variable: Any) -> Kind:
        from flax import nnx

        if isinstance(variable, nnx.RngState):
            return "random"
        if isinstance(variable, nnx.Intermediate):
            return "fixed"
        return "params" if self._is_param(path, variable) else "model_state"

    def _read(self, kind: Kind, module: Any) -> dict[str, Any] | None:
        """The values of a kind that a module has now, new variables among them."""
        found = {
            tuple(map(str, path)): _value(variable)
            for path, variable in _flat(module)
            if self._kind(path, variable) == kind
        }
        return unflatten_dict(found) if found else None

    def run(
        self, params: PyTree, model_state: PyTree, batch: Any, rng: Any, train: bool
    ) -> tuple[Any, PyTree]:
        """The outputs for a microbatch, and in training the model state after it."""
        from flax import nnx

        args, kwargs = self._call.arguments(batch, train)
        if self._rngs is not None and train:
            kwargs.setdefault("rngs", nnx.Rngs(rng))
        elif self._rngs is not None and self._rngs.default is inspect.Parameter.empty:
            kwargs.setdefault("rngs", None)
        values = self._found("params", params, "Begin with model.params.")
        todo = "Begin with train.init(model.params, model_state=model.model_state)."
        values |= self._found("model_state", model_state, todo)
        random = [slot for slot in self._slots if slot.kind == "random"]
        if train:
            values |= {slot.names: _reseeded(slot, rng) for slot in random}
        module = nnx.merge(self._graphs[train], self._state(values))
        outputs = module(*args, **kwargs)
        return outputs, self._read("model_state", module) if train else None

    def _given(self, where: str, params: PyTree, model_state: PyTree) -> dict[Any, Any]:
        """Copies of what the user gives for the module's variables, checked."""
        check_one_copy(where, "params", params)
        check_one_copy(where, "model_state", model_state)
        values = self._found("params", params, "Pass params=.", where)
        values |= self._found("model_state", model_state, "Pass model_state=.", where)
        for slot in self._slots:
            if slot.names not in values:
                continue
            want, got = _value(slot.variable), values[slot.names]
            shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (want, got)]
            if shapes[0] != shapes[1]:
                rule = f"have the module's shapes, for {'/'.join(slot.names)} {shapes[0]}"
                raise ValueError(check.message(where, slot.kind, rule, shapes[1]))
        return {names: jax.tree.map(jnp.array, value) for names, value in values.items()}

    def _found(
        self, kind: Kind, tree: PyTree, todo: str, where: str | None = None
    ) -> dict[tuple[str, ...], Any]:
        """The values of the variables of a kind, from nested dicts."""
        where = where or self._where
        found: dict[tuple[str, ...], Any] = {}
        for slot in self._slots:
            if slot.kind != kind:
                continue
            value = tree
            for name in slot.names:
                if not isinstance(value, Mapping) or name not in value:
                    rule = f"hold the variable {'/'.join(slot.names)}"
                    got = "None" if tree is None else f"none in {_keys(value)}"
                    raise ValueError(check.message(where, kind, rule, got, todo))
                value = value[name]
            found[slot.names] = value
        known = named_leaves(unflatten_dict(found))
        extra = [name for name in named_leaves(tree) if name not in known]
        if extra:
            rule, todo = "hold the module's variables only", "Is it another module's?"
            raise ValueError(check.message(where, kind, rule, f"leaf {extra[0]} too", todo))
        return found

    def _state(self, values: Mapping[Any, Any], slots: list[Slot] | None = None) -> Any:
        """An `nnx.State` of fresh variables."""
        from flax import nnx

        chosen = self._slots if slots is None else slots
        held = [values.get(slot.names, slot.value) for slot in chosen]
        return nnx.from_flat_state(
            (slot.path, slot.variable.replace(value) if _is_variable(slot.variable) else value)
            for slot, value in zip(chosen, held, strict=True)
        )


def from_nnx(
    model: Any,
    loss: Callable[[Any, Any], Any],
    *,
    inputs: Inputs | None = None,
    param_type: Any = None,
    train_kwargs: Mapping[str, Any] | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
) -> NnxModel:
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
            `rngs` where it takes them.
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
    from flax import nnx

    if not isinstance(model, nnx.Module) or not callable(model):
        rule = "be a flax.nnx module with __call__"
        got = f"the class {model.__name__}" if isinstance(model, type) else check.describe(model)
        todo = "A flax.linen module: from_linen."
        raise TypeError(check.message("from_nnx", "model", rule, got, todo))
    return nnx_model("from_nnx", model, loss, inputs, param_type, train_kwargs, eval_kwargs)


def nnx_model(
    where: str, module: Any, loss: Any, inputs: Any, param_type: Any, train_kwargs: Any,
    eval_kwargs: Any,
) -> NnxModel:  # fmt: skip
    """The model of a module; `where` is what the user called."""
    from flax import nnx

    call = call_of(where, module, inputs, train_kwargs, eval_kwargs)
    return NnxModel(where, module, call, loss, nnx.Param if param_type is None else param_type)


def _predicate(where: str, argument: str, chosen: Any) -> Callable[[Any, Any], bool]:
    """What a filter of flax chooses."""
    from flax import nnx

    try:
        return nnx.filterlib.to_predicate(chosen)
    except (TypeError, ValueError):  # flax fails where it words its own
        rule = "be an NNX filter"
        raise TypeError(check.message(where, argument, rule, check.describe(chosen))) from None


def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def _flat(module: Any) -> Any:
    from flax import nnx

    return nnx.to_flat_state(nnx.state(module))


def _is_variable(leaf: Any) -> bool:
    from flax import nnx

    return isinstance(leaf, nnx.Variable)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if _is_variable(leaf) else leaf


def _reseeded(slot: Slot, rng: Any) -> Any:
    """What a random stream begins a microbatch with."""
    from flax import nnx

    if not isinstance(slot.variable, nnx.RngKey):
        return jnp.zeros_like(slot.value)
    # of its place, not its number, so that other layers do not change it; and not Python's
    # own hash, which is another one in every process
    key = jax.random.fold_in(rng, zlib.crc32("/".join(slot.names).encode()))
    return jax.random.split(key, slot.value.shape) if slot.value.shape else key


def _keys(tree: Any) -> str:
    if not isinstance(tree, Mapping):
        return type(tree).__name__
    return ", ".join(map(repr, tree)) or "an empty dict"
