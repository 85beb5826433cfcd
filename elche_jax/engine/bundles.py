"""Like equations, joined into one over bundles of arrays.

An optimizer does the same computation for every parameter, and XLA compiles and runs each one
separately. A bundle holds arrays of one shape as the rows of one array. Elementwise equations, and
reductions within a row, that differ only in the rows they read are joined into one that reads whole
bundles.

See docs/design/0013-first-window.md.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core

from elche_jax.engine.entries import current_entries
from elche_jax.engine.jaxprs import CALLS, JOINABLE, called

JOIN_BELOW = 8 * 2**10
"""Arrays smaller than this, in bytes, are bundled: copying a larger one takes longer than a
separate kernel."""

FEWEST = 4
"""Smallest number of equations that are joined."""

WORTH = 3
"""Smallest number of equations to save per result array: filling the bundles and taking their rows
out costs about as much (Adam saves 5, SGD with momentum 2)."""

Number = int
"""Number of a value; arguments come first, in order."""


@dataclass(frozen=True)
class Rows:
    """Rows of a bundle.

    Attributes:
        bundle: Index of the bundle.
        at: Indices of the rows.
    """

    bundle: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """A row of a bundle."""

    bundle: int
    at: int


Operand = core.Literal | Number | Row | Rows


@dataclass(frozen=True)
class Equation:
    """An equation of a jaxpr whose calls are inlined.

    Attributes:
        eqn: The equation.
        operands: Literals, or numbers of values.
        results: Numbers of its results.
        level: Length of the longest chain of equations that it ends.
    """

    eqn: core.JaxprEqn
    operands: tuple[core.Literal | Number, ...]
    results: tuple[Number, ...]
    level: int


@dataclass(frozen=True)
class Step:
    """An equation, or several that are joined.

    Attributes:
        eqn: The equation, or one of them.
        operands: What it reads; `Rows` only if joined.
        results: Numbers of its results; if joined, the index of the bundle that holds them all.
        joined: Whether several are joined.
    """

    eqn: core.JaxprEqn
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    joined: bool


class Inlined:
    """A jaxpr with its calls inlined.

    Attributes:
        equations: Its equations.
        avals: Shapes and dtypes of all values, by number.
        consts: Values of the constants, by number.
        results: Its results.
    """

    def __init__(self, closed: core.ClosedJaxpr):
        self.equations: list[Equation] = []
        self.avals: list[Any] = []
        self.consts: dict[Number, Any] = {}
        self._levels: list[int] = []
        arguments = [self._new(var, 0) for var in closed.jaxpr.invars]
        self.results = self._add(closed, arguments)

    def _new(self, var: Any, level: int) -> Number:
        self.avals.append(var.aval)
        self._levels.append(level)
        return len(self.avals) - 1

    def _add(self, closed: Any, given: Sequence[Any]) -> list[core.Literal | Number]:
        jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        numbers: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = self._new(var, 0)
            self.consts[numbers[var]] = const
        for eqn in jaxpr.eqns:
            operands = [x if isinstance(x, core.Literal) else numbers[x] for x in eqn.invars]
            if eqn.primitive.name in CALLS:
                results = self._add(called(eqn), operands)
            else:
                levels = [self._levels[x] for x in operands if not isinstance(x, core.Literal)]
                level = max(levels, default=0) + 1
                results = [self._new(var, level) for var in eqn.outvars]
                made = Equation(eqn, tuple(operands), tuple(results), level)
                self.equations.append(made)
            numbers.update(zip(eqn.outvars, results, strict=True))
        return [x if isinstance(x, core.Literal) else numbers[x] for x in jaxpr.outvars]


class Plan:
    """A computation in steps, with like equations joined.

    Args:
        closed: The jaxpr of the computation, without side effects.

    Attributes:
        steps: The steps, in an order in which they can be run.
        bundled: Index of each bundle of arguments that is read, by their positions.
        results: The results of the computation.

    Examples:
        >>> import jax, numpy as np
        >>> from elche_jax.engine.bundles import Plan
        >>> arrays = [np.ones(3, "float32")] * 8
        >>> plan = Plan(jax.make_jaxpr(lambda *xs: [2 * x for x in xs])(*arrays))
        >>> [(step.eqn.primitive.name, step.joined) for step in plan.steps]
        [('mul', True)]
    """

    def __init__(self, closed: core.ClosedJaxpr):
        inlined = Inlined(closed)
        self._avals, self._consts = inlined.avals, inlined.consts
        self._arguments = len(closed.jaxpr.invars)
        self._same: dict[Number, Number] = {}  # each duplicate, and what stands for it
        self._rows: dict[Number, Row] = {}
        self._shapes: list[tuple[int, ...]] = []  # of the rows of each bundle
        self.bundled: dict[tuple[int, ...], int] = {}
        # a level reads only what earlier levels have computed
        levels: dict[int, list[Equation]] = defaultdict(list)
        for equation in inlined.equations:
            levels[equation.level].append(equation)
        self.steps = [
            step
            for level in sorted(levels)
            for alike in self._alike(levels[level])
            for step in self._joined(alike)
        ]
        self.results = list(map(self._read, inlined.results))
        self._saved = len(inlined.equations) - len(self.steps)

    def worthwhile(self, results: int) -> bool:
        """Return whether joining saves more than it costs, for this number of results to keep.

        Each row read individually by an equation that cannot be joined, such as a matrix product,
        takes a kernel.
        """
        read = [x for step in self.steps if not step.joined for x in step.operands]
        apart = sum(isinstance(x, Row) and self._shapes[x.bundle] != () for x in read)
        return apart < FEWEST and self._saved >= WORTH * results

    def reads(self, bundles: Collection[tuple[int, ...]]) -> set[int]:
        """Return the positions of the arguments it reads individually, given these bundles."""
        read = [x for step in self.steps for x in step.operands] + self.results
        single = {x for x in read if isinstance(x, int) and x < self._arguments}
        return single.union(*(members for members in self.bundled if members not in bundles))

    def run(self, args: Mapping[int, Any], bundles: Mapping[tuple[int, ...], Any]) -> list[Any]:
        """Return the results, an array or a pair `(bundle, row)` for each.

        Args:
            args: The arguments that are read individually, by position.
            bundles: The bundles that `bundled` lists.
        """
        values = {**args, **self._consts}
        made = {number: bundles[members] for members, number in self.bundled.items()}
        taken: dict[Operand, Any] = {}

        def read(operand: Operand) -> Any:
            if isinstance(operand, core.Literal):
                return operand.val
            if isinstance(operand, int):
                return values[operand]
            if operand not in taken:
                taken[operand] = take(made[operand.bundle], operand.at)
            return taken[operand]

        for step in self.steps:
            eqn, operands = step.eqn, list(map(read, step.operands))
            if step.joined:
                axes = [0 if isinstance(x, Rows) else None for x in step.operands]
                one = partial(eqn.primitive.bind, **eqn.params)
                made[step.results[0]] = jax.vmap(one, axes)(*operands)
                continue
            with eqn.ctx.manager:  # the settings it was traced under
                results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            several = results if eqn.primitive.multiple_results else [results]
            values.update(zip(step.results, several, strict=True))
        return [(made[x.bundle], x.at) if isinstance(x, Row) else read(x) for x in self.results]

    def _alike(self, equations: Sequence[Equation]) -> list[list[Equation]]:
        """Return the equations of one level in groups that may be joined."""
        groups: dict[Hashable, list[Equation]] = defaultdict(list)
        for equation in equations:
            groups[self._kind(equation)].append(equation)
        return list(groups.values())

    def _kind(self, equation: Equation) -> Hashable:
        """Return a key that is the same for equations that may be joined."""
        eqn = equation.eqn
        if eqn.primitive.name not in JOINABLE or not is_small(eqn.outvars[0].aval):
            return id(equation)
        params = tuple((name, str(value)) for name, value in eqn.params.items())
        return eqn.primitive, params, *map(self._kind_of, equation.operands)

    def _kind_of(self, operand: core.Literal | Number) -> Hashable:
        if isinstance(operand, core.Literal):
            return str(operand.aval), np.asarray(operand.val).tobytes()
        number = self._same.get(operand, operand)
        if number in self._rows:
            return "row", self._rows[number].bundle
        aval = self._avals[number]
        if number < self._arguments and aval.ndim and is_small(aval):
            return "argument", aval.shape, aval.dtype
        return number

    def _joined(self, alike: list[Equation]) -> Iterator[Step]:
        """Iterate over the steps that replace a group of like equations."""
        first, *others = alike
        if others and all(self._reads(one) == self._reads(first) for one in others):
            self._same.update((one.results[0], first.results[0]) for one in others)
            alike = [first]
        if len(alike) < FEWEST:
            for one in alike:
                yield Step(one.eqn, tuple(map(self._read, one.operands)), one.results, False)
            return
        columns = zip(*(one.operands for one in alike), strict=True)
        operands = tuple(map(self._column, columns))
        made = self._bundle(first.eqn.outvars[0].aval)
        self._rows.update((one.results[0], Row(made, at)) for at, one in enumerate(alike))
        yield Step(first.eqn, operands, (made,), True)

    def _reads(self, equation: Equation) -> list[Number]:
        """Return the values that an equation reads.

        Equations of one kind that read the same values have the same results.
        """
        numbers = (x for x in equation.operands if not isinstance(x, core.Literal))
        return [self._same.get(x, x) for x in numbers]

    def _column(self, column: tuple[core.Literal | Number, ...]) -> Operand:
        """Return what a joined equation reads where the single equations read these."""
        if isinstance(column[0], core.Literal):
            return column[0]
        numbers = tuple(self._same.get(x, x) for x in column if not isinstance(x, core.Literal))
        if len(set(numbers)) == 1:
            return self._read(numbers[0])
        rows = [self._rows.get(number) for number in numbers]
        if rows[0] is not None:
            return Rows(rows[0].bundle, tuple(row.at for row in rows if row is not None))
        if numbers not in self.bundled:
            self.bundled[numbers] = self._bundle(self._avals[numbers[0]])
        return Rows(self.bundled[numbers], tuple(range(len(numbers))))

    def _read(self, operand: core.Literal | Number) -> Operand:
        if isinstance(operand, core.Literal):
            return operand
        number = self._same.get(operand, operand)
        return self._rows.get(number, number)

    def _bundle(self, row: Any) -> int:
        self._shapes.append(row.shape)
        return len(self._shapes) - 1


def bundled(arrays: Sequence[Any]) -> Any:
    """Return arrays of one shape and dtype as the rows of a bundle."""
    entries = current_entries()
    stacked = [] if entries is None else list(map(entries.stacked, arrays))
    if stacked and all(array is not None for array in stacked):
        return jax.lax.concatenate(stacked, 0)
    shape = arrays[0].shape
    if not shape:
        arrays = [jax.lax.expand_dims(array, (0,)) for array in arrays]
    # along their first axis: a new axis would take one more operation per array
    return jax.lax.concatenate(arrays, 0).reshape(len(arrays), *shape)


def rows_of(bundle: Any, starts: Sequence[Any]) -> list[Any]:
    """Return rows of a bundle at places computed by the program, the inverse of `bundled`.

    Args:
        bundle: The bundle, `(count, ...)`.
        starts: For each row `i` to return, `i * row_length(bundle)`, int32.
    """
    length, (count, *shape) = row_length(bundle), bundle.shape
    rows = slices_of(bundle.reshape(count * length, *shape[1:]), starts, length)
    return rows if shape else [row.reshape(()) for row in rows]


def slices_of(array: Any, starts: Sequence[Any], length: int) -> list[Any]:
    """Return slices of this length of the first axis, at places computed by the program."""
    shape = length, *array.shape[1:]
    # a slice spans the other axes, so any start there is clamped to 0; a literal would be a
    # separate constant for every slice
    rest = [starts[0]] * (array.ndim - 1)
    return [
        # the default wraps negative indices, which takes three more operations per slice
        jax.lax.dynamic_slice(array, (start, *rest), shape, allow_negative_indices=False)
        for start in starts
    ]


def row_length(bundle: Any) -> int:
    """Return the length of a row along its first axis; 1 for a scalar."""
    return bundle.shape[1] if bundle.ndim > 1 else 1


def take(bundle: Any, at: int | tuple[int, ...]) -> Any:
    """Return one or several rows of a bundle, at places known when tracing."""
    if isinstance(at, int):
        return jax.lax.index_in_dim(bundle, at, keepdims=False)
    return bundle if at == tuple(range(len(bundle))) else bundle[np.array(at)]


def is_small(aval: Any) -> bool:
    """Return whether an array may be a row of a bundle."""
    return aval.size * aval.dtype.itemsize < JOIN_BELOW
