"""Checks of pytrees from the user, before JAX raises an error that does not name their origin."""

from typing import Any

import jax

from elche_jax import _check as check
from elche_jax.data.convert import sorted_keys

PyTree = Any


def named_leaves(where: str, what: str, tree: PyTree) -> list[tuple[Any, Any]]:
    """Return the leaves of a pytree with their paths.

    Args:
        where: The function that takes or returns the pytree, for the message.
        what: Name of the pytree there.
        tree: The pytree.

    Raises:
        TypeError: If the keys of a dict in it cannot be sorted.
    """
    with sorted_keys(where, what):
        return jax.tree_util.tree_flatten_with_path(tree)[0]


def checked_output(name: str, tree: PyTree) -> PyTree:
    """Check and return what a user's function returned; called while tracing.

    Args:
        name: Name of the function.
        tree: What it returned.

    Raises:
        TypeError: If it is not a pytree of arrays and numbers.
    """
    for _, leaf in named_leaves(name, "what it returns", tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise TypeError(
                f"{name}: must return only arrays and numbers, got {check.describe(leaf)}."
            )
    return tree


def check_metric_name(where: str, name: object) -> None:
    """Raise `TypeError` if the name of a metric is not a string."""
    check.instance(where, "names of metrics", name, str, "be strings")
