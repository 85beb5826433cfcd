"""A function of microbatches, run over data on all devices without synchronization.

Metrics are summed on each device; outputs are kept in the order of the microbatches. The
devices never communicate: the host combines their results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax.data.split import piece_lengths
from elche_jax.engine.bits import is_key
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.lane import Fleet
from elche_jax.engine.loop import LoopHook, emulated_loop
from elche_jax.engine.loss import (
    Weighted,
    batch_size_of,
    check_takes,
    check_weight,
    describe,
    is_real,
    sound_weight,
)
from elche_jax.engine.returned import check_metric_name
from elche_jax.engine.runner import Call, FleetRunner, Program
from elche_jax.engine.shapes import named
from elche_jax.engine.traced import Traced, trace

PyTree = Any

ARGUMENTS = ("params", "model_state", "batch")
"""Arguments of the user's function."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Variables:
    """Arguments of the user's function besides the data, stacked."""

    params: PyTree
    model_state: PyTree


@dataclass(frozen=True)
class BatchFn:
    """The user's function of a microbatch and its calling convention.

    Attributes:
        fn: `fn(params, batch)`, or `fn(params, model_state, batch)` with model state.
        has_model_state: Whether a model state is passed.
        mask_key: Key under which the mask of valid examples is added to the batch; None for
            no mask.
    """

    fn: Callable[..., Any]
    has_model_state: bool = False
    mask_key: str | None = None

    def __call__(self, variables: Variables, batch: PyTree, mask: Any) -> Any:
        """Call the function."""
        if self.mask_key is not None:
            batch = {**batch, self.mask_key: mask}
        state = (variables.model_state,) if self.has_model_state else ()
        return self.fn(variables.params, *state, batch)

    def trace(self, name: str, variables: Variables, batch: PyTree) -> Traced:
        """Trace the function for a microbatch of these shapes.

        Args:
            name: Name of the function, for messages.
            variables: Shapes on one device.
            batch: Shapes of one microbatch.

        Raises:
            TypeError: If the function takes other arguments.
            ValueError: If it uses a named axis.
        """
        check_takes(name, self.fn, ARGUMENTS, self.has_model_state)
        mask = jax.ShapeDtypeStruct((batch_size_of(batch),), jnp.bool_)
        return trace(name, self, variables, batch, mask)


PerBatch = Callable[[Variables, PyTree, Any], Any]
"""`fn(variables, microbatch, mask of valid examples)`: a `BatchFn`, or a traced one."""


@dataclass(frozen=True)
class Score:
    """Sums of metrics over the microbatches of a call.

    Attributes:
        fn: Returns a dict of metrics.
        shapes: Name of every metric and shape of its sum.
        hook: Emulation, or None.
    """

    fn: PerBatch
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    hook: LoopHook | None = None

    def call(
        self, variables: Variables, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[PyTree, Any], None]:
        zero = jnp.zeros((), jnp.float32)
        # float32 for one call; calls and devices are summed on the host in float64
        start = {name: (jnp.zeros(shape, jnp.float32), zero) for name, shape in self.shapes}

        def body(i: Any, sums: PyTree) -> PyTree:
            batch, mask, valid = _microbatch(payload, call_args, i)
            metrics = self.fn(variables, batch, mask)
            return {name: _add(sums[name], value, mask, valid) for name, value in metrics.items()}

        return _run(self.hook, call_args, body, start), None


@dataclass(frozen=True)
class Apply:
    """Outputs of the microbatches of a call, in order.

    They are returned in pieces of power-of-two length, like the data: the binary digits of the
    count tell which pieces hold outputs, and only those are fetched.

    Attributes:
        fn: Returns a pytree of arrays with one entry per example.
        hook: Emulation, or None.
    """

    fn: PerBatch
    hook: LoopHook | None = None

    def call(
        self, variables: Variables, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[PyTree, Any], None]:
        capacity = payload.capacity(stacked=False)

        def outputs(i: Any) -> PyTree:
            batch, mask, _ = _microbatch(payload, call_args, i)
            return self.fn(variables, batch, mask)

        one = jax.eval_shape(outputs, jnp.int32(0))
        start = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), one)

        def body(i: Any, rows: PyTree) -> PyTree:
            put = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda all_, new: put(all_, new, i, 0), rows, outputs(i))

        rows, token = _run(self.hook, call_args, body, start)
        pieces = tuple(_piece(rows, call_args.count, n) for n in piece_lengths(capacity))
        return (pieces, token), None


SweepProgram = Score | Apply


class SweepRunner(FleetRunner):
    """Compiles and dispatches the program of a sweep.

    Args:
        program: The computation of one device.
        fleet: The devices.
        cache: Cache of compiled programs.
        variables: Shapes of the stacked variables.
    """

    def __init__(
        self, program: SweepProgram, fleet: Fleet, cache: CompileCache, variables: Variables
    ):
        super().__init__(fleet, cache)
        self._variables, self._call = variables, fleet.mapped(program.call)

    def begin(self, calls: Sequence[Call]) -> None:
        """See `FleetRunner.begin`."""
        for call in calls:
            self._get(self._program(call.payload))
        self.begun = True

    def run(self, variables: Variables, call: Call) -> tuple[PyTree, jax.Array]:
        """Dispatch a call; return its results and its token, stacked."""
        program = self._get(self._program(call.payload))
        return program(variables, call.payload, call.call_args)[0]

    def _programs(self, payload: Payload) -> list[Program]:
        return [self._program(payload)]

    def _program(self, payload: Payload) -> Program:
        return self._mapped("sweep", self._call, payload, self._variables)


def inspect_metrics(
    fn: BatchFn, variables: Variables, batch: PyTree, ragged: bool
) -> tuple[Traced, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Trace a metric function.

    Args:
        fn: The function.
        variables: Shapes on one device.
        batch: Shapes of one microbatch.
        ragged: Whether the last microbatch may have fewer examples.

    Returns:
        The traced function; names of the metrics and shapes of their means.

    Raises:
        TypeError: If the function does not return a dict of metrics.
        ValueError: If a metric cannot exclude the missing examples of a ragged microbatch.
    """
    size = batch_size_of(batch)
    traced = fn.trace("metric_fn", variables, batch)
    metrics = traced.outputs
    if not isinstance(metrics, dict) or not metrics:
        got = "an empty one" if isinstance(metrics, dict) else describe(metrics)
        raise TypeError(f"metric_fn: must return a dict of metrics, name to value, got {got}.")
    for name in metrics:
        check_metric_name("metric_fn", name)
    shapes = tuple(
        (name, _check_metric(name, value, size, ragged and fn.mask_key is None))
        for name, value in sorted(metrics.items())
    )
    return traced, shapes


def inspect_outputs(fn: BatchFn, variables: Variables, batch: PyTree) -> Traced:
    """Trace a function of outputs.

    Raises:
        TypeError: If there is no output, or one does not have one entry per example or holds PRNG
            keys.
    """
    size = batch_size_of(batch)
    traced = fn.trace("apply_fn", variables, batch)
    outputs = traced.outputs
    leaves = named(outputs, "output")
    for name, leaf in leaves:
        got = f"{describe(leaf)} for leaf {name}"
        if leaf.shape[:1] != (size,):
            rule = f"have one entry per example ({size}) on its first axis"
            raise TypeError(check.message("predict", "every output of apply_fn", rule, got))
        if is_key(leaf):  # NumPy has no such dtype
            rule, todo = "be of numbers or bools", "Return jax.random.key_data of it."
            raise TypeError(check.message("predict", "every output of apply_fn", rule, got, todo))
    if not leaves:
        raise TypeError(f"predict: apply_fn must return arrays, got {describe(outputs)}.")
    return traced


def _check_metric(name: str, value: Any, size: int, ragged: bool) -> tuple[int, ...]:
    parts = (value.loss, value.weight) if isinstance(value, Weighted) else (value,)
    shapes = [getattr(part, "shape", None) for part in parts]
    plain = not isinstance(value, Weighted)
    known = [shape for shape in shapes if shape is not None]
    allowed = all(s[:1] in ((), (size,)) and (plain or len(s) < 2) for s in known)
    got = " and ".join(map(describe, parts))
    if len(known) < len(shapes) or not allowed:
        raise TypeError(
            f"metric_fn: metric {name!r} must be a scalar, an array of one entry per example "
            f"({size}), or Weighted of scalars or of vectors, got {got}."
        )
    if not all(map(is_real, parts)):
        raise TypeError(f"metric_fn: metric {name!r} must be of real numbers or bools, got {got}.")
    if isinstance(value, Weighted):
        check_weight(f"metric_fn: the weight of metric {name!r}", value.weight)
    if known[0] != known[-1]:
        rule = f"have a weight of the shape of its value ({known[0]})"
        raise TypeError(check.message("metric_fn", f"metric {name!r}", rule, known[-1]))
    if ragged and known[0] == ():
        raise ValueError(
            f"metric_fn: metric {name!r} must have one entry per example ({size}), as the last "
            "microbatch of these data may have fewer, got a scalar. Or pass mask_key, and return "
            "Weighted(mean over the valid ones, their number)."
        )
    return known[0][1:]


def _add(sums: tuple[Any, Any], value: Any, mask: Any, valid: Any) -> tuple[Any, Any]:
    """Add a microbatch's metric to its weighted sums, ignoring invalid examples."""
    weight: Any = jnp.float32(1)
    if isinstance(value, Weighted):
        value, weight = value.loss, value.weight
    elif jnp.ndim(value) == 0:
        weight = valid  # a mean over the microbatch
    value = jnp.asarray(value, jnp.float32)
    weight = sound_weight(jnp.asarray(weight, jnp.float32))
    # `!= 0`, not `> 0`: a NaN weight must show in the sums
    if value.ndim == 0:
        return sums[0] + jnp.where(weight != 0, value * weight, 0), sums[1] + weight
    keep = mask.reshape(-1, *(1,) * (value.ndim - 1))
    weight = jnp.where(mask, jnp.broadcast_to(weight, mask.shape), 0)
    wide = weight.reshape(keep.shape)
    total = jnp.where(wide != 0, value * wide, 0).sum(axis=0)
    return sums[0] + total, sums[1] + weight.sum()


def _microbatch(payload: Payload, call_args: CallArgs, i: Any) -> tuple[PyTree, Any, Any]:
    """Return microbatch `i` of a call, the mask of its valid examples, and their number."""
    batch = payload.fetch(i, call_args.count)
    size = batch_size_of(batch)
    valid = call_args.valid(call_args.start + i, size)
    return batch, jnp.arange(size, dtype=valid.dtype) < valid, valid


def _piece(rows: PyTree, total: Any, length: int) -> PyTree:
    """Return the rows of the piece of this length; valid if `total` has this binary digit."""
    start = total & ~(2 * length - 1)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), rows)


def _run(
    hook: LoopHook | None, call_args: CallArgs, body: Any, start: PyTree
) -> tuple[PyTree, Any]:
    """Run the loop; return its results, and a small token that depends on them."""
    results, zero = emulated_loop(hook, jnp.int32(0), call_args, body, start)
    token = _touch(results)
    return results, token if zero is None else token + zero


def _touch(tree: PyTree) -> Any:
    """Return a scalar that depends on the smallest of the results."""
    leaves = [x for x in jax.tree.leaves(tree) if x.size]
    if not leaves:  # nothing to compute
        return jnp.zeros((), jnp.float32)
    leaf = min(leaves, key=lambda x: x.size)
    # the barrier keeps XLA from computing this element without the rest of the leaf
    return jnp.isnan(jax.lax.optimization_barrier(leaf).reshape(-1)[0]).astype(jnp.float32)
