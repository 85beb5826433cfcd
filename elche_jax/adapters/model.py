"""`Model`: a Flax module and a loss, as the loss function that a training step takes."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.engine.loss import describe

PyTree = Any
Apply = Callable[[PyTree, PyTree, Any, Any, bool], tuple[Any, PyTree]]
"""`apply(params, model_state, batch, rng, train) -> (outputs, model_state)`."""


class Model:
    """A module and a loss; made by `from_linen`, `from_nnx` and `from_head`.

    It is a loss function: `build_train_step(model, optimizer)`. What `loss` returns is
    what the step gets, so `has_aux=True` is said there, and only there, if `loss`
    returns metrics as well. A module with a model state needs it in `train.init`.
    """

    def __init__(self, where: str, apply: Apply, loss: Callable[[Any, Any], Any]):
        if not callable(loss):
            rule = "be a function of (outputs, batch)"
            raise TypeError(check.message(where, "loss", rule, check.describe(loss)))
        self._where, self._apply, self._loss = where, apply, loss

    def __call__(self, *args: Any) -> Any:
        """The loss of a microbatch, in training mode.

        Args:
            *args: `(params, batch, rng)`, or `(params, model_state, batch, rng)`.

        Returns:
            What `build_train_step` expects of its `loss_fn`.

        Raises:
            TypeError: `loss` returns neither a loss nor `(loss, metrics)`; the module
                changes the structure, a shape or a dtype of its state.
        """
        params, state, batch, rng = self._sorted("loss_fn", ("batch", "rng"), args)
        outputs, new = self._apply(params, state, batch, rng, True)
        new = kept(self._where, state, new)
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
        """The outputs for a microbatch, in evaluation mode; for `predict`.

        Args:
            *args: `(params, batch)`, or `(params, model_state, batch)`.

        Returns:
            What the module returns.
        """
        params, state, batch = self._sorted("apply_fn", ("batch",), args)
        return self._apply(params, state, batch, None, False)[0]

    def metric_fn(self, fn: Callable[[Any, Any], dict[str, Any]]) -> Callable[..., Any]:
        """Makes a function for `build_eval_step`; the module is in evaluation mode.

        Args:
            fn: `fn(outputs, batch)`, which returns a dict of metrics.

        Returns:
            `metric_fn(params, batch)`, with model state
            `metric_fn(params, model_state, batch)`.

        Raises:
            TypeError: `fn` is not callable.
        """
        if not callable(fn):
            rule = "be a function of (outputs, batch)"
            raise TypeError(check.message("Model.metric_fn", "fn", rule, check.describe(fn)))

        def metric_fn(*args: Any) -> dict[str, Any]:
            return fn(self.apply_fn(*args), args[-1])

        return metric_fn

    def _sorted(self, name: str, last: tuple[str, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with a model state, which is None if it is left out."""
        if len(args) == 1 + len(last):
            return args[0], None, *args[1:]
        if len(args) == 2 + len(last):
            return args
        names = ", ".join(last)
        rule = f"be called with (params, {names}) or (params, model_state, {names})"
        raise TypeError(check.message(self._where, name, rule, f"{len(args)} arguments"))


def kept(where: str, old: PyTree, new: PyTree) -> PyTree:
    """The new model state in the structure of the old one.

    Raises:
        TypeError: It has other leaves, or a leaf of another shape or dtype.
    """
    typed = [jax.tree.map(jax.typeof, tree) for tree in (old, new)]
    for name, before, after in differing(*typed):
        got, todo = f"{after} for leaf {name}, which was {before}", ""
        if before is None:
            got = f"a new leaf {name}"
            todo = "Begin with a model state that holds it, or leave its collection out of "
            todo += "from_linen(mutable=)."
        elif after is None:
            got = f"none for leaf {name}"
        rule = "keep its leaves, shapes and dtypes in a step of the module"
        raise TypeError(check.message(where, "model_state", rule, got, todo))
    after = named_leaves(new)
    return jax.tree.structure(old).unflatten([after[name] for name in named_leaves(old)])


def copied(tree: PyTree) -> PyTree:
    """A pytree with arrays of its own."""
    return jax.tree.map(jnp.array, tree)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves of a pytree by their paths, in order."""
    named = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path) or "itself": leaf for path, leaf in named}


def differing(one: PyTree, other: PyTree) -> Iterator[tuple[str, str | None, str | None]]:
    """The leaves in which two pytrees differ: the name, and what each has there, if anything."""
    forms, others = (
        {name: _form(leaf) for name, leaf in named_leaves(tree).items()} for tree in (one, other)
    )
    for name in {**forms, **others}:
        if forms.get(name) != others.get(name):
            yield name, forms.get(name), others.get(name)


def _form(leaf: Any) -> str:
    aval = leaf if hasattr(leaf, "dtype") else jax.typeof(leaf)
    return f"{aval.dtype}{list(aval.shape)}"
