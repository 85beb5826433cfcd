"""`Model`: a Flax module and a loss as one loss function for `build_train_step`."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax.engine.bits import check_integers
from elche_jax.engine.loss import describe
from elche_jax.engine.shapes import named

PyTree = Any
Apply = Callable[[PyTree, PyTree, Any, Any, bool], tuple[Any, PyTree]]
"""`apply(params, model_state, batch, rng, train) -> (outputs, model_state)`."""


class Model:
    """A module and a loss; created by `from_linen`, `from_nnx` and `from_head`.

    A model is a loss function: `build_train_step(model, optimizer)`. It returns what `loss`
    returns, so pass `has_aux=True` to `build_train_step` if `loss` also returns metrics. If the
    module has model state, pass it to `train.init`.
    """

    def __init__(self, where: str, apply: Apply, loss: Callable[[Any, Any], Any]):
        check.instance(where, "loss", loss, Callable, "be a function of (outputs, batch)")
        self._where, self._apply, self._loss = where, apply, loss

    def __call__(self, *args: Any) -> Any:
        """Return the loss of a microbatch in training mode.

        Args:
            *args: `(params, batch, rng)`, or `(params, model_state, batch, rng)`.

        Returns:
            The return value that `build_train_step` expects from `loss_fn`.

        Raises:
            TypeError: `loss` returns neither a loss nor `(loss, metrics)`, or the module
                changes the structure, a shape or a dtype of its state.
        """
        params, state, batch, rng = self._unpack("loss_fn", ("batch", "rng"), args)
        outputs, new = self._apply(params, state, batch, rng, True)
        new = keep_structure(self._where, state, new)
        out = self._loss(outputs, batch)
        if isinstance(out, tuple) and len(out) != 2:
            rule = "return a loss or (loss, metrics)"
            raise TypeError(check.message(self._where, "loss", rule, describe(out)))
        if len(args) == 3:
            return out
        if isinstance(out, tuple):
            loss, metrics = out
            return loss, (new, metrics)
        return out, new

    def apply_fn(self, *args: Any) -> Any:
        """Return the outputs for a microbatch in evaluation mode, for `predict`.

        Args:
            *args: `(params, batch)`, or `(params, model_state, batch)`.

        Returns:
            The return value of the module.
        """
        params, state, batch = self._unpack("apply_fn", ("batch",), args)
        return self._apply(params, state, batch, None, False)[0]

    def metric_fn(self, fn: Callable[[Any, Any], dict[str, Any]]) -> Callable[..., Any]:
        """Build a `metric_fn` for `build_eval_step`, with the module in evaluation mode.

        Args:
            fn: `fn(outputs, batch)`, returning a dict of metrics.

        Returns:
            `metric_fn(params, batch)`, or `metric_fn(params, model_state, batch)` with model
            state.

        Raises:
            TypeError: `fn` is not callable.
        """
        rule = "be a function of (outputs, batch)"
        check.instance("Model.metric_fn", "fn", fn, Callable, rule)

        def metric_fn(*args: Any) -> dict[str, Any]:
            return fn(self.apply_fn(*args), args[-1])

        return metric_fn

    def _unpack(self, name: str, last: tuple[str, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments with the model state, None if it was omitted."""
        if len(args) == 1 + len(last):
            return args[0], None, *args[1:]
        if len(args) == 2 + len(last):
            return args
        names = ", ".join(last)
        rule = f"be called with (params, {names}) or (params, model_state, {names})"
        raise TypeError(check.message(self._where, name, rule, f"{len(args)} arguments"))


def keep_structure(where: str, old: PyTree, new: PyTree) -> PyTree:
    """Return the new model state in the structure of the old one.

    Raises:
        TypeError: Leaves, shapes or dtypes have changed.
    """
    typed = [jax.tree.map(jax.typeof, tree) for tree in (old, new)]
    for name, before, after in differing(*typed):
        got, todo = f"{after} for leaf {name}, which was {before}", ""
        if before is None:
            got = f"a new leaf {name}"
            todo = "Start with a model state that has it"
            todo += "." if where == "from_nnx" else ", or leave its collection out of mutable=."
        elif after is None:
            got = f"none for leaf {name}"
        rule = "keep its leaves, shapes and dtypes in a step of the module"
        raise TypeError(check.message(where, "model_state", rule, got, todo))
    # by name, as the module may return its state in a different order or container
    after = leaves_by_name(new)
    return jax.tree.structure(old).unflatten([after[name] for name in leaves_by_name(old)])


def described(module: Any) -> str:
    """Describe what was passed instead of a module, for a message."""
    return f"the class {module.__name__}" if isinstance(module, type) else check.describe(module)


def copied(where: str, argument: str, tree: PyTree, root: str = "itself") -> PyTree:
    """Copy all arrays of a pytree.

    Args:
        where: The function the user called.
        argument: What the pytree is, for the message.
        tree: The pytree.
        root: Name of the pytree if it is a leaf.

    Raises:
        ValueError: An integer would be truncated, see `check_integers`.
    """
    for name, leaf in named(tree, root):
        array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
        check_integers(where, f"integers of {argument}", name, array)
    # `asarray` would share buffers, which the user's own loop may donate
    return jax.tree.map(jnp.array, tree)


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a pytree by name, in order."""
    return dict(named(tree, "itself"))


def differing(one: PyTree, other: PyTree) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield `(name, form, other form)` of the leaves that differ; None for a missing leaf."""
    forms, others = (
        {name: _form(leaf) for name, leaf in leaves_by_name(tree).items()} for tree in (one, other)
    )
    for name in {**forms, **others}:
        if forms.get(name) != others.get(name):
            yield name, forms.get(name), others.get(name)


def _form(leaf: Any) -> str:
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    return f"{aval.dtype}{list(aval.shape)}"
