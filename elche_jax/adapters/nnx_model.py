"""`NnxModel`: the model of a Flax NNX module. Imported on first use, as it imports `flax.nnx`.

The module is split once into its graphs, one for training and one for evaluation, and its
variables, sorted by role. A call merges them into a new module, runs it, and reads the model
state back; it does not touch the user's module.
"""

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from elche_jax import _check as check
from elche_jax.adapters.call import Call
from elche_jax.adapters.model import Model, copied, leaves_by_name
from elche_jax.train.initial import check_one_copy

PyTree = Any
Kind = Literal["params", "model_state", "random", "fixed"]
KINDS: tuple[Kind, ...] = ("random", "fixed", "params", "model_state")
"""In the order of the filters that select them: a variable has the first kind that matches."""


@dataclass(frozen=True)
class Slot:
    """A variable of the module.

    Attributes:
        path: Path in the module, as Flax gives it.
        names: The path as strings: the keys in nested dicts.
        kind: Role of the variable.
        variable: The variable with a shape in place of its value; the bare shape if the
            attribute is a plain array.
        value: The value of a random or fixed variable.
    """

    path: tuple[Any, ...]
    names: tuple[str, ...]
    kind: Kind
    variable: Any
    value: Any


class NnxModel(Model):
    """A `Model` of an NNX module; created by `from_nnx`."""

    def __init__(self, module: Any, loss: Any, call: Call, param_type: Any):
        where = call.where
        super().__init__(where, self.run, loss)
        param_type = nnx.Param if param_type is None else param_type
        self._module, self._call = module, call
        _predicate(where, "param_type", param_type)  # raises if it is not a filter
        self._filters: tuple[Any, ...] = (nnx.RngState, nnx.Intermediate, param_type, ...)
        # the mode is part of a module's graph, and `train` and `eval` write it into the module
        training, evaluating = nnx.clone(module), nnx.clone(module)
        training.train()
        evaluating.eval()
        self._graphs = {True: nnx.graphdef(training), False: nnx.graphdef(evaluating)}
        self._graph = nnx.graphdef(module)
        self._rngs = inspect.signature(type(module).__call__).parameters.get("rngs")
        shapes = jax.eval_shape(lambda: nnx.state(module, *self._filters))
        random, fixed, *_ = nnx.state(module, *self._filters)
        # copies, as the user may donate the module's own arrays
        own = {
            path: jax.tree.map(jnp.copy, _value(variable))
            for path, variable in (*nnx.to_flat_state(random), *nnx.to_flat_state(fixed))
        }
        # strings, as JAX cannot sort dict keys that mix the indices of a list with names
        self._slots = [
            Slot(path, tuple(map(str, path)), kind, variable, own.get(path))
            for kind, state in zip(KINDS, shapes, strict=True)
            for path, variable in nnx.to_flat_state(state)
        ]
        if not self._of_kind("params"):
            rule = "choose at least one variable of the module"
            got = f"{param_type!r}, which chooses none"
            raise ValueError(check.message(where, "param_type", rule, got))

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the module's current parameters: nested dicts with string keys."""
        return copied(self._where, "params", self._read("params", self._module))

    @property
    def model_state(self) -> dict[str, Any] | None:
        """A copy of the module's current model state; None if there is none."""
        return copied(self._where, "model_state", self._read("model_state", self._module))

    def merge(self, params: PyTree, model_state: PyTree = None) -> Any:
        """Return a new module with these values, in the mode of the module passed to `from_nnx`.

        Args:
            params: One copy of the parameters.
            model_state: The model state, if any.

        Returns:
            The module. Its random streams start like those of the original.

        Raises:
            ValueError: A leaf is missing or unknown, has the wrong shape, holds the copies of
                several devices, or has an integer that does not fit 32 bits while 64-bit types
                are disabled.
        """
        values = self._given("Model.merge", params, model_state)
        return nnx.merge(self._graph, self._state(values))

    def update(self, params: PyTree, model_state: PyTree = None) -> None:
        """Write these values into the module passed to `from_nnx`.

        Args:
            params: One copy of the parameters.
            model_state: The model state, if any.

        Raises:
            ValueError: As raised by `merge`.
        """
        values = self._given("Model.update", params, model_state)
        nnx.update(self._module, self._state(values, self._of_kind("params", "model_state")))

    def trainable(self, chosen: Any) -> dict[str, Any]:
        """Return the `trainable` argument of `build_train_step` for an NNX filter.

        Parameters that are not selected are frozen: no gradient, no optimizer state, no exchange.

        Args:
            chosen: An NNX filter such as `nnx.LoRAParam` or `nnx.PathContains("head")`.

        Returns:
            A pytree of bools with the structure of the parameters.

        Raises:
            TypeError: `chosen` is not a filter.
            ValueError: The filter selects no parameter.
        """
        is_chosen = _predicate("Model.trainable", "chosen", chosen)
        slots = self._of_kind("params")
        flags = {slot.names: bool(is_chosen(slot.path, slot.variable)) for slot in slots}
        if not any(flags.values()):
            rule, got = "choose at least one parameter", f"{chosen!r}, which chooses none"
            raise ValueError(check.message("Model.trainable", "chosen", rule, got))
        return unflatten_dict(flags)

    def as_state(self, params: PyTree) -> Any:
        """Return parameters as an `nnx.State`."""
        values = self._found("params", params, "Pass all of them.")
        return self._state(values, self._of_kind("params"))

    def _of_kind(self, *kinds: Kind) -> list[Slot]:
        return [slot for slot in self._slots if slot.kind in kinds]

    def _read(self, kind: Kind, module: Any) -> dict[str, Any] | None:
        """Return the module's current values of one kind, including new variables."""
        state = nnx.state(module, *self._filters)[KINDS.index(kind)]
        found = {tuple(map(str, path)): _value(leaf) for path, leaf in nnx.to_flat_state(state)}
        return unflatten_dict(found) if found else None

    def run(
        self, params: PyTree, model_state: PyTree, batch: Any, rng: Any, train: bool
    ) -> tuple[Any, PyTree]:
        """Return the outputs for a microbatch and, in training, the new model state."""
        args, kwargs = self._call.arguments(batch, train)
        if self._rngs is not None and train:
            kwargs.setdefault("rngs", nnx.Rngs(rng))
        elif self._rngs is not None and self._rngs.default is inspect.Parameter.empty:
            # evaluation has no key, but the call requires the argument
            kwargs.setdefault("rngs", None)
        values = self._found("params", params, "Start with model.params.")
        todo = "Start with train.init(model.params, model_state=model.model_state)."
        values |= self._found("model_state", model_state, todo)
        if train:
            values |= {slot.names: _reseeded(slot, rng) for slot in self._of_kind("random")}
        module = nnx.merge(self._graphs[train], self._state(values))
        outputs = module(*args, **kwargs)
        # includes variables that the call has added, so that `keep_structure` can name them
        return outputs, self._read("model_state", module) if train else None

    def _given(self, where: str, params: PyTree, model_state: PyTree) -> dict[Any, Any]:
        """Return checked copies of the values that the user passed for the variables."""
        check_one_copy(where, params=params, model_state=model_state)
        values = self._found("params", params, "Pass params=.", where)
        values |= self._found("model_state", model_state, "Pass model_state=.", where)
        for slot in self._of_kind("params", "model_state"):
            name, want, got = "/".join(slot.names), _value(slot.variable), values[slot.names]
            shapes = [[jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (want, got)]
            if shapes[0] != shapes[1]:
                rule = f"have the module's shapes, for {name} {shapes[0]}"
                raise ValueError(check.message(where, slot.kind, rule, shapes[1]))
            values[slot.names] = copied(where, slot.kind, got, name)
        return values

    def _found(
        self, kind: Kind, tree: PyTree, todo: str, where: str | None = None
    ) -> dict[tuple[str, ...], Any]:
        """Return the values of the variables of one kind, from nested dicts."""
        where = where or self._where
        found: dict[tuple[str, ...], Any] = {}
        for slot in self._of_kind(kind):
            value = tree
            for name in slot.names:
                if not isinstance(value, Mapping) or name not in value:
                    rule = f"hold the variable {'/'.join(slot.names)}"
                    got = "None" if tree is None else f"none in {_keys(value)}"
                    raise ValueError(check.message(where, kind, rule, got, todo))
                value = value[name]
            found[slot.names] = value
        known = leaves_by_name(unflatten_dict(found))
        extra = [name for name in leaves_by_name(tree) if name not in known]
        if extra:
            rule, todo = "hold the module's variables only", "Is it another module's?"
            raise ValueError(check.message(where, kind, rule, f"leaf {extra[0]} too", todo))
        return found

    def _state(self, values: Mapping[Any, Any], slots: list[Slot] | None = None) -> Any:
        """Return an `nnx.State` of new variables."""
        leaves = []
        for slot in self._slots if slots is None else slots:
            value = values.get(slot.names, slot.value)
            is_variable = isinstance(slot.variable, nnx.Variable)
            leaves.append((slot.path, slot.variable.replace(value) if is_variable else value))
        return nnx.from_flat_state(leaves)


def _predicate(where: str, argument: str, chosen: Any) -> Callable[[Any, Any], bool]:
    """Return the predicate of an NNX filter."""
    try:
        return nnx.filterlib.to_predicate(chosen)
    except (TypeError, ValueError):  # Flax fails while formatting its own message
        rule = "be an NNX filter"
        raise TypeError(check.message(where, argument, rule, check.describe(chosen))) from None


def _value(leaf: Any) -> Any:
    # not `get_value`, which a variable type may override: the module itself calls it
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _reseeded(slot: Slot, rng: Any) -> Any:
    """Return the initial value of a random stream for a microbatch."""
    if not isinstance(slot.variable, nnx.RngKey):
        return jnp.zeros_like(slot.value)
    # derived from the path, not an index, so that it does not depend on other layers; crc32, as
    # Python's hash differs between processes
    key = jax.random.fold_in(rng, zlib.crc32("/".join(slot.names).encode()))
    # a stream of layers made by `nnx.vmap` holds one key per layer
    return jax.random.split(key, slot.value.shape) if slot.value.shape else key


def _keys(tree: Any) -> str:
    if not isinstance(tree, Mapping):
        return type(tree).__name__
    return ", ".join(map(repr, tree)) or "an empty dict"
