"""How the model state of several devices becomes one, leaf by leaf.

Each device ends a window with a model state of its own (BatchNorm statistics, counters).
With `b` the state before the window, `x[d]` that of device `d` after it and
`w[d]` the device's share of the window's weight, a leaf becomes

| rule | merged |
|---|---|
| `"mean"` | `b + sum_d w[d] * (x[d] - b)` |
| `"pooled"` | a `mean` as above; its `var`: `sum_d w[d] * (var[d] + (mean[d] - mean)**2)` |
| `"max"` | the largest `x[d]` |
| `"first"` | `x[d]` of the lowest rank that worked |
| `"keep"` | `x[d]` stays on device `d`; with averaging in parameter space only |

Devices without work in the window have no say. Changes are exchanged, not values: what no
device changed stays bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.collectives import broadcast_from
from elche_jax.engine.exchange import packed_psum
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.spread import spread

PyTree = Any
Merge = Callable[[str, Any], str] | PyTree

RULES = ("auto", "mean", "pooled", "max", "first", "keep")


@dataclass(frozen=True)
class MergeRules:
    """A rule for every leaf of a model state, in the order of `jax.tree.leaves`.

    Attributes:
        rules: The rules; none is "auto".
        mean_of: For every leaf the number of the leaf that holds its mean where it is a
            pooled variance, else None.
    """

    rules: tuple[str, ...]
    mean_of: tuple[int | None, ...]


def resolve_merge(merge: Merge | None, model_state: PyTree, may_keep: bool = False) -> MergeRules:
    """Brings the user's rules to one rule per leaf.

    Args:
        merge: A function `(path, leaf) -> rule`; or rules in the structure of the
            model state, where one rule may stand for a whole subtree; or None, which is
            "auto": the mean of floats, the maximum of the rest.
        model_state: Shapes of the model state.
        may_keep: Whether replicas may differ, so that `"keep"` is a rule.

    Raises:
        TypeError: A rule does not fit the leaf's dtype.
        ValueError: An unknown rule, rules of another structure, or a pooled leaf without
            its partner.
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


def changes(rules: MergeRules, new: PyTree, old: PyTree, weight: Any) -> dict[int, Any]:
    """This device's part of the sums that `merged` needs: weighted changes, float32.

    Args:
        rules: A rule per leaf.
        new: This device's state after its work.
        old: The state before it, the same on all devices.
        weight: This device's weight, float32.

    Returns:
        By number of the leaf, for those whose rule is a mean.
    """
    after, before = jax.tree.leaves(new), jax.tree.leaves(old)
    named = zip(range(len(after)), rules.rules, strict=True)  # a rule for every leaf
    means = [i for i, rule in named if rule in ("mean", "pooled")]
    return {i: _weighted(_wide(after[i]) - _start(_wide(before[i])), weight) for i in means}


def merged(
    rules: MergeRules, new: PyTree, old: PyTree, weight: Any, moves: dict[int, Any], total: Any
) -> PyTree:
    """The merged state, the same on all devices; inside a mapped function.

    Args:
        rules: A rule per leaf.
        new: This device's state after its work.
        old: The state before it, the same on all devices.
        weight: This device's weight, float32.
        moves: The sums of the `changes` over the devices.
        total: The sum of the weights; where it is 0 the state is not a number.
    """
    after, structure = jax.tree.flatten(new)
    before, worked = jax.tree.leaves(old), weight > 0
    spreads = _spreads(rules, after, before, weight, moves, total)
    leaves = list(after)
    for i, rule in enumerate(rules.rules):
        if rule == "max":
            leaves[i] = _maximum(after[i], worked)
        elif rule == "keep":
            leaves[i] = after[i]
        elif rule == "first":
            leaves[i] = broadcast_from(after[i], _first_that(worked), AXIS)
        else:
            move = moves[i] / total + (spreads[i] / total if i in spreads else 0)
            leaves[i] = _start(before[i]) + move.astype(before[i].dtype)
    return jax.tree.unflatten(structure, leaves)


def _spreads(
    rules: MergeRules, after: list[Any], before: list[Any], weight: Any, moves: Any, total: Any
) -> dict[int, Any]:
    """For pooled variances the weighted squares of how far the means lie apart, summed.

    Around the merged mean, which is why it takes a second sum over the devices: as a
    difference of squares it would be lost in the rounding of a mean that is far from 0.
    """
    spreads = {}
    for i, mean in enumerate(rules.mean_of):
        if mean is not None:
            middle = _start(_wide(before[mean])) + moves[mean] / total
            spreads[i] = _weighted((_wide(after[mean]) - middle) ** 2, weight)
    return packed_psum(spreads, AXIS) if spreads else {}


def _start(before: Any) -> Any:
    """What changes are counted from: the state before, or 0 where that was not finite."""
    return jnp.where(jnp.isfinite(before), before, 0)


def _weighted(value: Any, weight: Any) -> Any:
    return jnp.where(weight > 0, value * weight, 0)


def _wide(leaf: Any) -> Any:
    return leaf.astype(jnp.float32)


def _maximum(leaf: Any, worked: Any) -> Any:
    if leaf.dtype == jnp.bool_:
        return _maximum(leaf.astype(jnp.int32), worked).astype(jnp.bool_)
    lowest = -jnp.inf if _is_float(leaf) else jnp.iinfo(leaf.dtype).min
    return jax.lax.pmax(jnp.where(worked, leaf, jnp.asarray(lowest, leaf.dtype)), AXIS)


def _first_that(worked: Any) -> Any:
    """The lowest rank where it is true; of a rank that does not exist where nowhere."""
    rank = jax.lax.axis_index(AXIS)
    return jax.lax.pmin(jnp.where(worked, rank, jnp.iinfo(jnp.int32).max), AXIS)


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
            f"TrainStep.init: merge must be 'max' or 'first' for leaves that are no floats, got "
            f"{rule!r} for leaf {name} of dtype {leaf.dtype}."
        )
    return str(rule)


def _pairs(rules: list[str], named: list[Any]) -> tuple[int | None, ...]:
    """For every pooled variance the leaf `mean` beside it."""
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
    """The last step of a path: key, attribute or index."""
    if not path:
        return ""
    return str(getattr(path[-1], "key", getattr(path[-1], "name", path[-1])))


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
