"""Updates of a state that are wanted only if a flag is set, which may depend on them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.bundles import (
    FEWEST,
    Operand,
    Plan,
    Row,
    bundled,
    is_small,
    row_length,
    rows_of,
    slices_of,
    take,
)
from elche_jax.engine.choice import chosen
from elche_jax.engine.entries import current_entries
from elche_jax.engine.exchange import Packed
from elche_jax.engine.jaxprs import repeats_cheaply

PyTree = Any
Update = Callable[..., tuple[PyTree, PyTree]]
"""`update(gradients, state, *rest) -> (new state, other results)`."""
Judge = Callable[[PyTree], tuple[Any, PyTree]]
"""`judge(other results) -> (flag, verdict)`; the results may be in any order, as rows of larger
arrays, and missing if the flag is not set whatever they are."""

Starts = dict[int, list[Any]]
"""Where the first, second, ... row of a bundle starts on an axis, by the length of a row on it;
values of the program."""

IN_PLACE = 1 << 23
"""Bytes of a state from which an update is repeated in place, if that is cheap. A smaller one stays
in a processor's cache, and a selection compiles faster."""


def plan_of(update: Update, grads: PyTree, state: PyTree, *rest: PyTree) -> Plan | None:
    """Plan an update whose equations are joined where they are alike; None if it is not worth it.

    Args:
        update: Computes the new state.
        grads, state, rest: Shapes and dtypes of its arguments.
    """
    leaves = jax.tree.leaves(state)
    alike = Counter((x.shape, x.dtype) for x in jax.tree.leaves(grads) if is_small(x))
    if _is_large(state) or max(alike.values(), default=0) < FEWEST:
        return None
    closed = jax.make_jaxpr(update)(grads, state, *rest)
    plan = None if closed.effects else Plan(closed)
    return plan if plan is not None and plan.worthwhile(len(leaves)) else None


@dataclass(frozen=True)
class TentativeUpdate:
    """An update of a state that is wanted only if a flag is set, which may depend on it.

    Attributes:
        update: Computes the new state.
        grads: The gradients.
        state: The state.
        rest: More arguments.
    """

    update: Update
    grads: Packed
    state: PyTree
    rest: tuple[PyTree, ...] = ()

    def applied_if(self, judge: Judge) -> tuple[PyTree, PyTree]:
        """Apply it if the flag of `judge` is set.

        A selection has to hold the new state beside the old one. Memory is slower than a processor:
        with Adam a step that selects takes four times as long as one that does not. On a CPU a
        large state is therefore updated in a branch, in place, where the update is computed again;
        its first computation then leaves nothing but what the flag depends on. Not on an
        accelerator, where the host may have to ask which branch is taken.

        Returns:
            The new state if the flag is set, else the old one; and the verdict.
        """
        large, grads = _is_large(self.state), self.grads.tree()
        update = jax.jit(self.update) if large else self.update  # traced once, if called again

        def updated(state: PyTree) -> tuple[PyTree, PyTree]:
            return update(grads, state, *self.rest)

        new, seen = updated(self.state)
        flag, verdict = judge(seen)
        if not (large and repeats_cheaply(updated, self.state)):
            return chosen(flag, new, self.state), verdict

        # functions of this call: JAX keeps what it has traced for as long as a function lives
        def in_place(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            del new
            return jax.lax.cond(flag, lambda old: updated(old)[0], lambda old: old, old)

        def selected(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            return chosen(flag, new, old)

        made = jax.lax.platform_dependent(flag, new, self.state, cpu=in_place, default=selected)
        return made, verdict

    def joined_if(self, judge: Judge, plan: Plan, precondition: Any) -> tuple[PyTree, PyTree]:
        """Apply it if the flag of `judge` is set, with equations joined that are alike.

        XLA would fuse what fills a bundle, what is computed from it and what is read from it into
        one kernel for every row. It does not fuse across a branch, which is for a CPU only: of an
        accelerator the host may have to ask which branch is taken.

        Args:
            judge: Computes the flag.
            plan: The plan of the update.
            precondition: A flag without which that of `judge` is not set, and that XLA does not
                know before the program runs.

        Returns:
            The new state if the flag is set, else the old one; and the verdict.
        """
        first = len(self.grads.like)  # of the state's leaves among the arguments
        leaves, structure = jax.tree.flatten(self.state)
        single = dict(enumerate([*leaves, *jax.tree.leaves(self.rest)], first))
        args, bundles = self.grads.alone() | single, self.grads.bundles()
        if not plan.reads(bundles) <= args.keys():
            args |= self.grads.leaves()

        def bundle_of(members: tuple[int, ...]) -> Any:
            if members not in bundles:
                bundles[members] = bundled([args[i] for i in members])
            return bundles[members]

        given = {members: bundle_of(members) for members in plan.bundled}
        order = Arrangement(plan.results[: len(leaves)])
        old = [bundle_of(tuple(first + i for i in members)) for members in order.bundles]
        old += [leaves[i] for i in order.singles]

        def apply(old: list[Any]) -> tuple[list[Any], PyTree, Starts]:
            results = plan.run(args, given)
            seen = Arrangement(plan.results[len(leaves) :]).arranged(results[len(leaves) :])
            flag, verdict = judge(seen)
            new = chosen(flag, order.arranged(results[: len(leaves)]), old)
            return new, verdict, order.starts(new)

        def keep(old: list[Any]) -> tuple[list[Any], PyTree, Starts]:
            return old, judge([])[1], order.starts(old)

        # results of a branch: rows at constant places are not alike, and need a kernel each
        made, verdict, starts = jax.lax.cond(precondition, apply, keep, old)
        return structure.unflatten(order.leaves(made, starts)), verdict


class Arrangement:
    """The order of results that a `Plan` computes: first bundles, then single ones.

    Rows start on their joined first axis, or on the bundle's own where they are taken as entries
    of stacked arrays.

    Args:
        results: The results.

    Attributes:
        bundles: For each bundle, the positions of its results.
        singles: The positions of the others.
    """

    def __init__(self, results: Sequence[Operand]):
        rows: dict[int, list[int]] = defaultdict(list)
        for position, result in enumerate(results):
            if isinstance(result, Row):
                rows[result.bundle].append(position)
        self.bundles = list(map(tuple, rows.values()))
        self.singles = [i for i, result in enumerate(results) if not isinstance(result, Row)]
        self._entries = current_entries()

    def arranged(self, results: Sequence[Any]) -> list[Any]:
        """Return the bundles, with their results as rows, and the single results."""
        bundles = [
            take(results[members[0]][0], tuple(results[i][1] for i in members))
            for members in self.bundles
        ]
        return [*bundles, *(jnp.asarray(results[i]) for i in self.singles)]

    def starts(self, arranged: Sequence[Any]) -> Starts:
        """Return where the rows of the bundles start, for `leaves`."""
        most: dict[int, int] = defaultdict(int)  # rows, by their length
        for members, bundle in zip(self.bundles, arranged, strict=False):
            most[self._length(bundle)] = max(most[self._length(bundle)], len(members))
        return {
            length: [jax.lax.full((), length * at, jnp.int32) for at in range(count)]
            for length, count in most.items()
        }

    def leaves(self, arranged: Sequence[Any], starts: Starts) -> list[Any]:
        """Return the results one by one, invert `arranged`."""
        found = dict(zip(self.singles, arranged[len(self.bundles) :], strict=True))
        for members, bundle in zip(self.bundles, arranged, strict=False):
            rows = self._rows(bundle, starts[self._length(bundle)][: len(members)])
            found.update(zip(members, rows, strict=True))
        return [found[position] for position in range(len(found))]

    def _length(self, bundle: Any) -> int:
        return row_length(bundle) if self._entries is None else 1

    def _rows(self, bundle: Any, starts: Sequence[Any]) -> list[Any]:
        if self._entries is None:
            return rows_of(bundle, starts)
        return list(map(self._entries.take, slices_of(bundle, starts, 1)))


def _is_large(state: PyTree) -> bool:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) >= IN_PLACE
