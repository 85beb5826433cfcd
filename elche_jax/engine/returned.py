"""What functions of the user's hand over, looked at before JAX does, which could not say whose
it is."""

from typing import Any

import jax

from elche_jax import _check as check

PyTree = Any


def named_leaves(where: str, what: str, tree: PyTree) -> list[tuple[Any, Any]]:
    """The leaves of a pytree with their paths.

    Args:
        where: The function of whom it is.
        what: What it is there.
        tree: The pytree.

    Raises:
        TypeError: The keys of a dict in it cannot be sorted.
    """
    try:
        return jax.tree_util.tree_flatten_with_path(tree)[0]
    except ValueError as error:
        raise TypeError(
            f"{where}: dicts in {what} must have keys of one type, as JAX sorts them, got several "
            f"({error.__cause__ or error}). Use strings."
        ) from error


def returned(name: str, tree: PyTree) -> PyTree:
    """Gives what a function has returned; to be called where it is traced.

    Args:
        name: What the user calls the function.
        tree: What it has returned.

    Raises:
        TypeError: It is no pytree of arrays and numbers.
    """
    for _, leaf in named_leaves(name, "what it returns", tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"{name}: must return arrays and numbers alone, got {check.describe(leaf)}."
            )
    return tree


def check_metric_name(where: str, name: object) -> None:
    """Raises `TypeError` where the name of a metric is no string."""
    if not isinstance(name, str):
        raise TypeError(f"{where}: names of metrics must be strings, got {check.describe(name)}.")
