"""Broadcasting of values, which may stand for whole subtrees, to one value per leaf."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from elche_jax import _check as check
from elche_jax.engine.shapes import named

PyTree = Any


def spread(argument: str, of: str, values: PyTree, tree: PyTree) -> list[Any]:
    """Return one value per leaf of a tree, in the order of `jax.tree.leaves`.

    Args:
        argument: Name of the values in the error message.
        of: Name of the tree in the error message.
        values: A function `(path, leaf) -> value`; or one value; or values in the structure of
            the tree, where one may stand for a whole subtree.
        tree: The tree.

    Raises:
        TypeError: The function takes other arguments.
        ValueError: The structures do not match; the message says where.

    Examples:
        >>> from elche_jax.engine.spread import spread
        >>> spread("trainable", "params", {"a": True, "b": False}, {"a": 0, "b": (1, 2)})
        [True, False, False]
    """
    # a tree of a class with `__call__`, as models in Equinox are, is no function
    is_tree = not jax.tree_util.all_leaves([values])
    if callable(values) and (not is_tree or isinstance(values, jax.tree_util.Partial)):
        check.takes(f"TrainStep.init: {argument}", values, ("path", "leaf"))
        return [values(name, leaf) for name, leaf in named(tree, of)]
    try:
        spread_out = jax.tree.map(
            lambda value, part: jax.tree.map(lambda _: value, part), values, tree
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"TrainStep.init: {argument} must have the structure of {of}, or one value where that "
            f"has a subtree, {_difference(argument, of, values, tree)}."
        ) from error
    return jax.tree.leaves(spread_out)


def _difference(argument: str, of: str, values: PyTree, tree: PyTree, at: str = "") -> str:
    """Describe the first place where the structures differ."""
    if isinstance(values, Mapping) and isinstance(tree, Mapping):
        given, wanted = cast(Mapping[Any, Any], values), cast(Mapping[Any, Any], tree)
        unknown = [key for key in given if key not in wanted]
        missing = [key for key in wanted if key not in given]
        if unknown or missing:
            what = f"{unknown[0]!r} is not there" if unknown else f"{missing[0]!r} is missing"
            place = f"{of}{at}" if unknown else f"{argument}{at}"
            return f"but in {place} {what} ({of}{at} has {', '.join(map(repr, wanted))})"
        below = [(key, value, wanted[key]) for key, value in given.items()]
    elif isinstance(values, list | tuple) and type(values) is type(tree):
        given, wanted = cast(Sequence[Any], values), cast(Sequence[Any], tree)
        if len(given) != len(wanted):
            return f"but {argument}{at} has {len(given)} entries where {of}{at} has {len(wanted)}"
        below = list(zip(range(len(given)), given, wanted, strict=True))
    else:
        below = []
    for key, value, part in below:
        if not _fits(value, part):
            return _difference(argument, of, value, part, f"{at}[{key!r}]")
    kinds = type(values).__name__, type(tree).__name__
    return f"but {argument}{at} is a {kinds[0]} where {of}{at} is a {kinds[1]}"


def _fits(values: PyTree, tree: PyTree) -> bool:
    try:
        jax.tree.map(lambda value, part: None, values, tree)
    except (ValueError, TypeError, KeyError):
        return False
    return True
