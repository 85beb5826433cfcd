"""Rules that merge the model states of several devices, leaf by leaf.

Each device ends a window with its own model state (BatchNorm statistics, counters).
With `b` the state before the window, `x[d]` that of device `d` after it and
`w[d]` the device's share of the window's weight, a leaf becomes

| rule | merged |
|---|---|
| `"mean"` | `b + sum_d w[d] * (x[d] - b)` |
| `"pooled"` | `mean` as above; its `var`: `sum_d w[d] * (var[d] + (mean[d] - mean)**2)` |
| `"max"` | the largest `x[d]` |
| `"first"` | `x[d]` of the lowest rank that worked |
| `"keep"` | `x[d]` stays on device `d`; only with parameter averaging |

Devices without work in the window are ignored. Changes are exchanged, not values, so that a
leaf that no device changed stays bitwise the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.spread import spread

PyTree = Any
Merge = Callable[[str, Any], str] | PyTree

RULES = ("auto", "mean", "pooled", "max", "first", "keep")


@dataclass(frozen=True)
class MergeRules:
    """One rule per leaf of a model state, in the order of `jax.tree.leaves`.

    Attributes:
        rules: The rules; none is "auto".
        mean_of: For every pooled variance the index of the leaf with its mean; None for other
            leaves.
    """

    rules: tuple[str, ...]
    mean_of: tuple[int | None, ...]

    def __add__(self, other: "MergeRules") -> "MergeRules":
        """Concatenate the rules of two lists of leaves."""
        at = len(self.rules)
        moved = tuple(mean if mean is None else mean + at for mean in other.mean_of)
        return MergeRules(self.rules + other.rules, self.mean_of + moved)

    @property
    def means(self) -> tuple[int, ...]:
        """Indices of the leaves whose rule is a mean."""
        return tuple(i for i, rule in enumerate(self.rules) if rule in ("mean", "pooled"))

    @property
    def sent(self) -> "MergeRules":
        """The rules of the leaves that are merged."""
        at = [i for i, rule in enumerate(self.rules) if rule != "keep"]
        means = [self.mean_of[i] for i in at]
        return MergeRules(
            tuple(self.rules[i] for i in at), tuple(m if m is None else at.index(m) for m in means)
        )

    def of_sent(self, tree: PyTree) -> list[Any]:
        """Return the leaves of a tree that are merged."""
        leaves = zip(jax.tree.leaves(tree), self.rules, strict=True)
        return [leaf for leaf, rule in leaves if rule != "keep"]

    @property
    def alone(self) -> "MergeRules":
        """Rules for a single device, which leave its state unchanged."""
        return MergeRules(("first",) * len(self.rules), (None,) * len(self.rules))

    def change(self, leaf: int, before: Any, after: Any) -> Any:
        """Return a device's change of a leaf in a window, if means are applied late.

        The change is a difference; for a variance it is a factor, which keeps it above 0; for
        rules that are not means it is the new value.
        """
        if self.mean_of[leaf] is not None:
            factor = _wide(after) / jnp.where(before > 0, _wide(before), 1)
            return jnp.where((before > 0) & jnp.isfinite(factor), factor, 1)
        if self.rules[leaf] in ("mean", "pooled"):
            move = _wide(after) - _wide(before)
            return jnp.where(jnp.isfinite(move), move, 0)
        return after

    def changed(self, leaf: int, value: Any, change: Any) -> Any:
        """Apply a change, of one device or the mean over several, to a leaf."""
        if self.mean_of[leaf] is not None:
            return (_wide(value) * change).astype(value.dtype)
        if self.rules[leaf] in ("mean", "pooled"):
            return (_wide(value) + change).astype(value.dtype)
        return jnp.maximum(value, change) if value.dtype != jnp.bool_ else value | change

    def unchanged(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the changes of a window in which nothing changed."""

        def change(leaf: int, value: Any) -> Any:
            if self.mean_of[leaf] is not None:
                return np.ones(value.shape, np.float32)
            if self.rules[leaf] in ("mean", "pooled"):
                return np.zeros(value.shape, np.float32)
            return value

        return [change(i, value) for i, value in enumerate(leaves)]


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32)


def opt_rules(opt_state: PyTree) -> MergeRules:
    """Return the rules of an optimizer state: `"mean"` for floats, `"first"` for PRNG keys,
    `"max"` for the rest."""

    def rule(leaf: Any) -> str:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "first"
        return "mean" if jnp.issubdtype(leaf.dtype, jnp.floating) else "max"

    rules = tuple(map(rule, jax.tree.leaves(opt_state)))
    return MergeRules(rules, (None,) * len(rules))


def resolve_merge(merge: Merge | None, model_state: PyTree, may_keep: bool = False) -> MergeRules:
    """Resolve the user's rules to one rule per leaf.

    Args:
        merge: A function `(path, leaf) -> rule`; or rules in the structure of the
            model state, where one rule may stand for a whole subtree; or None for
            "auto": the mean of floats, the maximum of the rest.
        model_state: Shapes of the model state.
        may_keep: Whether replicas may differ, so that `"keep"` is allowed.

    Raises:
        TypeError: A rule does not fit the leaf's dtype.
        ValueError: A rule is unknown, the rules have another structure, or a pooled leaf has
            no partner.
    """
    named = jax.tree_util.tree_flatten_with_path(model_state)[0]
    if callable(merge):
        given = [merge(jax.tree_util.keystr(path), leaf) for path, leaf in named]
    else:
        given = spread("merge", "model_state", "auto" if merge is None else merge, model_state)
    known = RULES if may_keep else RULES[:-1]
    rules = [
        _checked(rule, known, path, leaf) for rule, (path, leaf) in zip(given, named, strict=True)
    ]
    return MergeRules(tuple(rules), _pairs(rules, named))


def start_of(before: Any) -> Any:
    """Return the reference for changes: the state before, with 0 for values not finite."""
    return jnp.where(jnp.isfinite(before), before, 0)


def _checked(rule: Any, known: tuple[str, ...], path: Any, leaf: Any) -> str:
    name = jax.tree_util.keystr(path) or "model_state"
    if rule not in known:
        raise ValueError(
            f"TrainStep.init: merge must be one of {', '.join(map(repr, known))} for every leaf of "
            f"model_state, got {rule!r} for leaf {name}."
        )
    if rule == "auto":
        return "mean" if _is_float(leaf) else "max"
    if rule in ("mean", "pooled") and not _is_float(leaf):
        raise TypeError(
            f"TrainStep.init: merge must be 'max' or 'first' for leaves that are not floats, got "
            f"{rule!r} for leaf {name} of dtype {leaf.dtype}."
        )
    return str(rule)


def _pairs(rules: list[str], named: list[Any]) -> tuple[int | None, ...]:
    """Return, for every pooled variance, the index of the leaf `mean` beside it."""
    at: Mapping[Any, int] = {path: i for i, (path, _) in enumerate(named)}
    mean_of: list[int | None] = [None] * len(rules)
    for i, (path, leaf) in enumerate(named):
        if rules[i] != "pooled":
            continue
        last = _key(path)
        partners = {"mean": "var", "var": "mean"}
        where = [j for other, j in at.items() if other[:-1] == path[:-1] and last in partners
                 and _key(other) == partners[last] and rules[j] == "pooled"]  # fmt: skip
        if len(where) != 1 or named[where[0]][1].shape != leaf.shape:
            raise ValueError(
                "TrainStep.init: merge='pooled' must be given to pairs of leaves `mean` and `var` "
                "of one shape, side by side, got it for leaf "
                f"{jax.tree_util.keystr(path) or 'model_state'} without its partner."
            )
        if last == "var":
            mean_of[i] = where[0]
    return tuple(mean_of)


def _key(path: Any) -> str:
    """Return the last entry of a path: key, attribute or index."""
    if not path:
        return ""
    return str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1])))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
