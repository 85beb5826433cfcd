"""Selection of trained parameters; frozen ones are left out of gradients, sums and exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from elche_jax import _check as check
from elche_jax.engine.loss import describe
from elche_jax.engine.shapes import named
from elche_jax.engine.spread import spread

PyTree = Any
Trainable = Callable[[str, Any], bool] | PyTree


@dataclass(frozen=True)
class Selection:
    """Splits parameters into a trained and a frozen half.

    In each half the leaves of the other are replaced by `optax.MaskedNode()`, a node without
    leaves, as in optax's own masks.

    Attributes:
        trained: Whether each leaf is trained, in the order of `jax.tree.leaves`; None if all
            leaves are.
    """

    trained: tuple[bool, ...] | None = None

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the trained and the frozen half."""
        leaves, structure = jax.tree.flatten(params)
        pairs = list(zip(leaves, self.trained or (True,) * len(leaves), strict=True))
        trained = structure.unflatten([x if flag else _MASKED for x, flag in pairs])
        return trained, structure.unflatten([_MASKED if flag else x for x, flag in pairs])

    def join(self, trained: PyTree, frozen: PyTree) -> PyTree:
        """Merge the two halves into the whole parameters."""
        if self.trained is None:
            return trained
        return jax.tree.map(
            lambda t, f: f if _is_masked(t) else t, trained, frozen, is_leaf=_is_masked
        )


_MASKED = optax.MaskedNode()


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def select_trainable(trainable: Trainable | None, params: PyTree) -> Selection:
    """Convert the user's choice to one flag per leaf.

    Args:
        trainable: A function `(path, leaf) -> bool`; or a prefix tree of the parameters with
            bool leaves; or None to train all leaves.
        params: The parameters.

    Raises:
        ValueError: If no leaf is trained, or the structure does not match.
        TypeError: If a flag is not a bool, or the function takes other arguments.

    Examples:
        >>> from elche_jax.engine.trainable import select_trainable
        >>> params = {"body": {"w": 1.0, "b": 2.0}, "head": 3.0}
        >>> select_trainable({"body": False, "head": True}, params).trained
        (False, False, True)
        >>> select_trainable(lambda path, leaf: "head" in path, params).split(params)[0]
        {'body': {'b': MaskedNode(), 'w': MaskedNode()}, 'head': 3.0}
    """
    if trainable is None:
        return Selection()
    flags = spread("trainable", "params", trainable, params)
    for (name, _), flag in zip(named(params, "params"), flags, strict=True):
        if not isinstance(flag, bool | np.bool_):
            rule = "be True or False for every leaf of params"
            got = describe(flag) if hasattr(flag, "shape") else repr(flag)
            got = f"{got} for leaf {name}"
            raise TypeError(check.message("TrainStep.init", "trainable", rule, got))
    if not any(flags):
        rule = "leave at least one leaf of params to train"
        raise ValueError(check.message("TrainStep.init", "trainable", rule, "none"))
    return Selection(tuple(map(bool, flags)))
