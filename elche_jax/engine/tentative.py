"""Updates of a state that are applied only if a flag is set, which may depend on them."""

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
"""`judge(other results) -> (flag, verdict)`. The results may come in any order and as rows of
larger arrays. They are missing if the flag cannot be set, whatever their values."""

Starts = dict[int, list[Any]]
"""Where the first, second, ... row of a bundle starts along an axis, by the length of a row along
it; values that the program computes."""

IN_PLACE = 1 << 23
"""Size of a state, in bytes, from which an update is repeated in place if that is cheap. A smaller
one stays in a processor's cache, and a selection compiles faster."""


def plan_of(update: Update, grads: PyTree, state: PyTree, *rest: PyTree) -> Plan | None:
    """Plan an update with equations joined that are alike; return None if it is not worth it.

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
    """An update of a state that is applied only if a flag is set, which may depend on it.

    Attributes:
        update: Computes the new state.
        grads: The gradients.
        state: The state.
        rest: Further arguments.
    """

    update: Update
    grads: Packed
    state: PyTree
    rest: tuple[PyTree, ...] = ()

    def applied_if(self, judge: Judge) -> tuple[PyTree, PyTree]:
        """Apply the update if the flag of `judge` is set.

        A selection has to hold the new state beside the old one. As memory is slower than a
        processor, a step of Adam with a selection takes four times as long as one without. On a CPU
        a large state is therefore updated in place in a branch, which computes the update again;
        its first computation then leaves nothing but what the flag depends on. An accelerator
        always selects, as the host may have to ask which branch is taken.

        Returns:
            The new state if the flag is set, else the old one; and the verdict.
        """
        large, grads = _is_large(self.state), self.grads.tree()
        update = jax.jit(self.update) if large else self.update  # traced once, though called twice

        def updated(state: PyTree) -> tuple[PyTree, PyTree]:
            return update(grads, state, *self.rest)

        new, seen = updated(self.state)
        flag, verdict = judge(seen)
        if not (large and repeats_cheaply(updated, self.state)):
            return chosen(flag, new, self.state), verdict

        # defined in this call: JAX keeps what it has traced for as long as the function lives
        def in_place(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            del new
            return jax.lax.cond(flag, lambda old: updated(old)[0], lambda old: old, old)

        def selected(flag: Any, new: PyTree, old: PyTree) -> PyTree:
            return chosen(flag, new, old)

        made = jax.lax.platform_dependent(flag, new, self.state, cpu=in_place, default=selected)
        return made, verdict

    def joined_if(self, judge: Judge, plan: Plan, precondition: Any) -> tuple[PyTree, PyTree]:
        """Apply the update if the flag of `judge` is set, with equations joined that are alike.

        XLA would fuse filling a bundle, computing with it and reading from it into one kernel per
        row. It does not fuse across a branch. This is for CPUs only: on an accelerator the host may
        have to ask which branch is taken.

        Args:
            judge: Computes the flag.
            plan: The plan of the update.
            precondition: A flag that is set whenever that of `judge` is, and that XLA does not
                know before the program runs.

        Returns:
            The new state if the flag is set, else the old one; and the verdict.
        """
        first = len(self.grads.like)  # position of the state's first leaf among the arguments
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

        # starts are results of a branch: rows at constant places need a kernel each
        made, verdict, starts = jax.lax.cond(precondition, apply, keep, old)
        return structure.unflatten(order.leaves(made, starts)), verdict


class Arrangement:
    """The order of results that a `Plan` computes: first bundles, then single results.

    Rows start along the joined first axis, or along the bundle's own first axis if they are taken
    as entries of stacked arrays.

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
        most: dict[int, int] = defaultdict(int)  # largest number of rows, by their length
        for members, bundle in zip(self.bundles, arranged, strict=False):
            most[self._length(bundle)] = max(most[self._length(bundle)], len(members))
        return {
            length: [jax.lax.full((), length * at, jnp.int32) for at in range(count)]
            for length, count in most.items()
        }

    def leaves(self, arranged: Sequence[Any], starts: Starts) -> list[Any]:
        """Invert `arranged`: return the results one by one."""
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
