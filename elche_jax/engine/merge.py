"""Rules that merge the model states of several devices, leaf by leaf.

Each device ends a window with its own model state (BatchNorm statistics, counters).
With `b` the state before the window, `x[d]` the state of device `d` after it and
`w[d]` the device's share of the window's weight, a leaf becomes

| rule | merged |
|---|---|
| `"mean"` | `b + sum_d w[d] * (x[d] - b)` |
| `"pooled"` | `mean` as above; its `var`: `sum_d w[d] * (var[d] + (mean[d] - mean)**2)` |
| `"max"` | the largest `x[d]` |
| `"first"` | `x[d]` of the lowest rank that worked |
| `"keep"` | `x[d]` stays on device `d`; only with parameter averaging |

Devices without work in the window are ignored. For means, devices exchange changes instead of
values, so a leaf that no device changed stays bitwise the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax.engine.bits import is_float, is_key, raw, wide, wide_dtype, with_type_of
from elche_jax.engine.spread import spread

PyTree = Any
Merge = Callable[[str, Any], str] | PyTree

RULES = ("auto", "mean", "pooled", "max", "first", "keep")
MEANS = ("mean", "pooled")


@dataclass(frozen=True)
class MergeRules:
    """One rule per leaf of a model state, in the order of `jax.tree.leaves`.

    Attributes:
        rules: The rules; none is "auto".
        mean_of: For every pooled variance, the index of the leaf with its mean; None for other
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
        return tuple(i for i, rule in enumerate(self.rules) if rule in MEANS)

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

    def with_sent(self, tree: PyTree, merged: Sequence[Any]) -> PyTree:
        """Replace the leaves of a tree that are merged."""
        leaves, structure = jax.tree.flatten(tree)
        new = iter(merged)
        pairs = zip(leaves, self.rules, strict=True)
        return structure.unflatten([old if rule == "keep" else next(new) for old, rule in pairs])

    @property
    def alone(self) -> "MergeRules":
        """Rules for a single device, which leave its state unchanged."""
        # not "mean": `b + (x - b)` may round
        return MergeRules(("first",) * len(self.rules), (None,) * len(self.rules))

    def differences(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Return a device's differences for leaves whose rule is a mean, its values for others.

        With differences, a leaf that no device changed stays bitwise the same.
        """
        return [
            _difference(new, old) if rule in MEANS else raw(new)
            for rule, old, new in zip(self.rules, before, after, strict=True)
        ]

    def apply_differences(
        self, before: Sequence[Any], mean: Sequence[Any], spread: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the merged leaves, given the mean of what `differences` returned."""
        triples = zip(self.rules, before, self.with_spread(mean, spread), strict=True)
        return [
            _moved(old, new) if rule in MEANS else with_type_of(old, new)
            for rule, old, new in triples
        ]

    def changes(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """Return a device's changes in a window, for means that are applied late.

        A change is a difference. For a pooled variance it is a factor, which keeps the variance
        above 0; for rules that are not means it is the new value.
        """

        def change(rule: str, mean_of: int | None, old: Any, new: Any) -> Any:
            if mean_of is not None:
                # a variance of 0 stays 0, as no factor leads away from it
                factor = wide(new) / jnp.where(old > 0, wide(old), 1)
                factor = jnp.where((old > 0) & jnp.isfinite(factor), factor, 1)
                return factor
            return _finite(difference(new, old)) if rule in MEANS else new

        return list(map(change, self.rules, self.mean_of, before, after))

    def apply_changes(self, before: Sequence[Any], changes: Sequence[Any]) -> list[Any]:
        """Apply changes, of one device or the mean over several, to the merged leaves."""

        def changed(rule: str, mean_of: int | None, old: Any, change: Any) -> Any:
            if rule in MEANS:
                new = wide(old) + change if mean_of is None else wide(old) * change
                return new.astype(old.dtype)
            return jnp.maximum(old, change) if old.dtype != jnp.bool_ else old | change

        return list(map(changed, self.rules, self.mean_of, before, changes))

    def halfway(self, leaves: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """Return means halfway between the given leaves and a device's own.

        Leaves of other rules stay as given, as do elements of which one of the two is not finite.

        A device's change undoes what its window has forgotten of earlier changes. Without the own
        value, which remembers them, this would repeat with alternating sign.
        """

        def half(rule: str, common: Any, mine: Any) -> Any:
            if rule not in MEANS:
                return common
            fine = jnp.isfinite(common) & jnp.isfinite(mine)
            middle = wide(common) + (wide(mine) - wide(common)) / 2
            return jnp.where(fine, middle, wide(common)).astype(common.dtype)

        return list(map(half, self.rules, leaves, own))

    def with_spread(self, leaves: Sequence[Any], spread: Sequence[Any]) -> list[Any]:
        """Add the variance of the devices' means to pooled variances."""
        more = iter(spread)
        return [
            leaf if mean_of is None else leaf + next(more).astype(leaf.dtype)
            for leaf, mean_of in zip(leaves, self.mean_of, strict=True)
        ]

    def unchanged(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the changes of a window in which nothing changed; an empty list for no leaves."""
        return [
            # 1 for factors, 0 for differences, see `changes`
            leaf
            if rule not in MEANS
            else np.full(leaf.shape, mean_of is not None, wide_dtype(leaf))
            for rule, mean_of, leaf in zip(self.rules, self.mean_of, leaves, strict=bool(leaves))
        ]


def difference(new: Any, old: Any) -> Any:
    """Return a difference in the dtype of sums, which keeps small changes."""
    return wide(new) - wide(old)


def _difference(new: Any, old: Any) -> Any:
    """Return a difference, or the new value if the old one is not finite, to replace it."""
    # a selection here and in `_moved`: an old value with 0 put in its place would stay in memory
    return jnp.where(jnp.isfinite(wide(old)), difference(new, old), wide(new))


def _moved(old: Any, change: Any) -> Any:
    """Invert `_difference`, given a mean of differences."""
    # rounded once: a value much smaller than the old one would lose all its bits
    start = wide(old)
    new = start + change
    # a value that falls to nearly 0 must not change its sign by rounding: it may be a variance
    across = (new * jnp.sign(start) < 0) & (jnp.abs(new) < 2.0**-20 * jnp.abs(start))
    return jnp.where(jnp.isfinite(start), jnp.where(across, 0, new), change).astype(old.dtype)


def opt_rules(opt_state: PyTree) -> MergeRules:
    """Return the rules of an optimizer state.

    They are `"mean"` for floats, `"first"` for PRNG keys and `"max"` for the rest.
    """

    def rule(leaf: Any) -> str:
        if is_key(leaf):
            return "first"
        return "mean" if is_float(leaf) else "max"

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
        TypeError: A rule does not fit the leaf's dtype, or the function takes other arguments.
        ValueError: A rule is unknown, the rules have a different structure, or a pooled leaf has
            no partner.
    """
    named = jax.tree_util.tree_flatten_with_path(model_state)[0]
    given = spread("merge", "model_state", "auto" if merge is None else merge, model_state)
    known = RULES if may_keep else RULES[:-1]
    rules = [
        _checked(rule, known, path, leaf) for rule, (path, leaf) in zip(given, named, strict=True)
    ]
    return MergeRules(tuple(rules), _pairs(rules, named))


def _finite(values: Any) -> Any:
    """Replace values that are not finite by 0."""
    return jnp.where(jnp.isfinite(values), values, 0)


def _checked(rule: Any, known: tuple[str, ...], path: Any, leaf: Any) -> str:
    name = jax.tree_util.keystr(path) or "model_state"
    if rule not in known:
        must = f"be one of {', '.join(map(repr, known))} for every leaf of model_state"
        got = f"{rule!r} for leaf {name}"
        raise ValueError(check.message("TrainStep.init", "merge", must, got))
    if rule == "auto":
        return "mean" if is_float(leaf) else "max"
    if rule in MEANS and not is_float(leaf):
        must = "be 'max' or 'first' for leaves that are not floats"
        got = f"{rule!r} for leaf {name} of dtype {leaf.dtype}"
        raise TypeError(check.message("TrainStep.init", "merge", must, got))
    return str(rule)


def _pairs(rules: list[str], named: list[Any]) -> tuple[int | None, ...]:
    """Return, for every pooled variance, the index of the leaf `mean` beside it."""
    keystr = jax.tree_util.keystr
    pooled = {
        (path[:-1], keystr(path[-1:], simple=True)): i
        for i, (path, _) in enumerate(named)
        if rules[i] == "pooled"
    }
    mean_of: list[int | None] = [None] * len(rules)
    for (parent, name), i in pooled.items():
        path, leaf = named[i]
        partner = pooled.get((parent, {"mean": "var", "var": "mean"}.get(name, "")))
        if partner is None or named[partner][1].shape != leaf.shape:
            must = "be given to pairs of leaves `mean` and `var` of one shape, side by side"
            got = f"it for leaf {keystr(path) or 'model_state'} without its partner"
            raise ValueError(check.message("TrainStep.init", "merge='pooled'", must, got))
        if name == "var":
            mean_of[i] = partner
    return tuple(mean_of)
