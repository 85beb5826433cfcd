"""Checks that the parts of a microbatch add up to its gradient, see `microbatch_split`.

The jaxpr of the loss says whether it changes the model state or uses its random key. Whether it
treats every example independently is measured: the gradient of a few examples of the data, near the
initial parameters, must match that of two halves. This misses what those examples and parameters do
not show, such as a branch that is not taken, or an effect below the tolerance.

Under `compute_dtype` the comparison is in float32. If the model itself computes in 16 bits, only
losses and metrics are compared. Gradients are sums over all examples and then round too much (that
of a bias in bfloat16 was 74 % off): no tolerance could tell rounding from an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.data.source import IterableSource
from elche_jax.engine.bits import is_float
from elche_jax.engine.bundles import Inlined
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.jaxprs import arguments_read, smallest_float
from elche_jax.engine.loss import LossForm, batch_size_of, inspect_loss
from elche_jax.engine.microbatch import Microbatches, Terms
from elche_jax.engine.precision import Precision
from elche_jax.engine.shapes import named, one_of, stacked
from elche_jax.engine.state import TrainState
from elche_jax.engine.traced import trace
from elche_jax.train.spec import DataPlan

PyTree = Any

TOLERANCE = 3e-3
"""Largest relative difference that counts as rounding in float32."""

TOLERANCE_OF_LOSS = 3e-4
"""The same if gradients are not compared. An example rounds alike in a part and in the whole, while
BatchNorm in bfloat16 changed a loss by 7e-4."""

FLOOR = 1e-2
"""If a leaf's gradient is smaller than this share of the whole gradient, its difference is relative
to that share: it may be nothing but rounding, like that of a bias that a norm cancels. The
difference of a loss or a metric closer to 0 than this number is relative to this number."""

NOISE = 0.1
"""How far the parameters are moved for the comparison, relative to their size. The initial ones
may hide a difference: behind a layer of zeros, no example affects another."""

GRADIENT = "a gradient "
"""Prefix of gradients' names in messages."""

INSTEAD = "Leave microbatch_split out, so that every device runs whole microbatches."


@dataclass(frozen=True)
class LossCall:
    """A loss function and the shapes of its arguments.

    Attributes:
        work: Computes its gradients.
        form: What it returns for a microbatch.
        params: Shapes of the parameters, in the dtypes that the loss gets.
        model_state: Shapes of the model state.
        batch: Shapes of a microbatch, in the dtypes that the loss gets.
        key: Shape of the random key.
    """

    work: Microbatches
    form: LossForm
    params: PyTree
    model_state: PyTree
    batch: PyTree
    key: Any


def check_shapes(call: LossCall, split: int) -> None:
    """Check the parts of a microbatch as far as possible without running the loss.

    Args:
        call: The loss.
        split: Number of parts.

    Raises:
        ValueError: If the loss does not take parts, changes the model state, or uses its key.
    """
    size = batch_size_of(call.batch)
    batch = stacked(one_of(call.batch), size // split)
    _check_form(call, batch, size)
    mask = jax.ShapeDtypeStruct((size // split,), jnp.bool_)
    args = (call.params, call.model_state, batch, mask, call.key)
    traced = trace("loss_fn", call.work.loss_fn, *args)
    results = Inlined(traced.closed).results
    loss, new_state, _ = traced.outputs
    first = len(jax.tree.leaves(call.params))
    after = len(jax.tree.leaves(loss))
    for at, (name, _) in enumerate(named(new_state, "model_state")):
        if results[after + at] != first + at:
            rule = "return model_state unchanged under microbatch_split"
            got = f"another value of leaf {name}"
            todo = f"Statistics of parts (BatchNorm) are not those of the microbatch. {INSTEAD}"
            raise ValueError(check.message("windows", "loss_fn", rule, got, todo))
    *_, reads_key = arguments_read(traced.closed)
    if reads_key:
        rule, got = "not use its rng under microbatch_split", "a loss that does"
        todo = f"Parts would draw other numbers (dropout) than the microbatch. {INSTEAD}"
        raise ValueError(check.message("windows", "loss_fn", rule, got, todo))


def _check_form(call: LossCall, batch: PyTree, size: int) -> None:
    """Check that the loss takes parts, and returns the same form as for a whole microbatch."""
    part = batch_size_of(batch)
    rule = f"take {part} examples, a part of {size}, under microbatch_split"
    args = (call.params, call.model_state, batch, call.key)
    try:
        form = inspect_loss(call.work.loss_fn, *args)
    except Exception as error:  # it has passed with whole microbatches
        got = f"{type(error).__name__}: {str(error).rstrip('.')}"
        todo = "Take the number of examples from the batch."
        raise ValueError(check.message("windows", "loss_fn", rule, got, todo)) from error
    if _summary(form) != _summary(call.form):
        got = f"{_summary(form)} instead of {_summary(call.form)}"
        raise ValueError(check.message("windows", "loss_fn", rule, got))


def _summary(form: LossForm) -> str:
    aux = [f"{name} ({'scalar' if x.shape == () else 'vector'})" for name, x in form.aux.items()]
    return f"a {form.form} loss" + (f" with {', '.join(sorted(aux))}" if aux else "")


def check_values(
    work: Microbatches, size: int, start: tuple[PyTree, PyTree], plan: DataPlan,
    devices: Sequence[jax.Device],
) -> None:  # fmt: skip
    """Check that the gradient of two parts together is the mean of the parts' gradients.

    Args:
        work: Computes the gradient.
        size: Number of examples of a part.
        start: Parameters and model state to compute with.
        plan: The data.
        devices: Devices to compute on; the next one is tried if one has too little memory.

    Raises:
        ValueError: If it is not.
    """
    params, model_state, batch = _near(start[0]), start[1], _examples(plan, 2 * size)
    work, sharp = _in_float32(work, params, model_state, batch)
    # with one example fewer, parts have different weights
    valid = [2 * size, 2 * size - 1] if plan.ragged else [2 * size]
    for count in valid:
        found = _compare(work, params, model_state, batch, count, devices)
        if found is None:
            logger.warning(
                "elche: microbatch_split was not checked, as the gradient of %d examples is not "
                "finite or does not fit the memory; the loss must treat every example by itself.",
                2 * size,
            )
            return
        if not sharp:
            found = {name: by for name, by in found.items() if not name.startswith(GRADIENT)}
        _judge(found, size, TOLERANCE if sharp else TOLERANCE_OF_LOSS)


def _in_float32(
    work: Microbatches, params: PyTree, model_state: PyTree, batch: PyTree
) -> tuple[Microbatches, bool]:
    """Return the work, in float32 if its loss takes that, and whether it has no smaller floats."""
    key = jax.random.key(0, impl=work.key_impl)
    mask = np.ones(batch_size_of(batch), bool)
    # without the scale, which is for gradients too small for float16: comparisons ignore these
    for precision in (Precision(), Precision(work.precision.compute_dtype)):
        cast, work = precision.cast, replace(work, precision=precision)
        try:
            args = cast(params), model_state, cast(batch), mask, key
            return work, smallest_float(jax.make_jaxpr(work.loss_fn)(*args)) >= 4
        except TypeError:  # some operations do not accept floats of two sizes
            continue
    return work, False


def _judge(found: dict[str, float], size: int, tolerance: float) -> None:
    # if differences are about equal, one that is not of a gradient says more
    name = max(found, key=lambda name: (round(found[name], 4), not name.startswith(GRADIENT)))
    worst = found[name]
    if worst <= tolerance:
        return
    rule = "treat every example of a microbatch by itself under microbatch_split"
    got = f"{name} of {2 * size} examples that differs by {worst:.2%} from that of two halves"
    todo = (
        "Statistics over the microbatch, pairs of its examples, sums divided by a fixed number and "
        f"fixed weights need it whole. {INSTEAD}"
    )
    raise ValueError(check.message("windows", "loss_fn", rule, got, todo))


def _compare(
    work: Microbatches, params: PyTree, model_state: PyTree, batch: PyTree, valid: int,
    devices: Sequence[jax.Device],
) -> dict[str, float] | None:  # fmt: skip
    """Return by how much the results of a microbatch differ from those of two halves.

    Returns:
        Relative differences by name; None if nothing can be concluded.
    """
    numbers = np.zeros(CallArgs.WIDTH, np.int32)
    numbers[[0, 2, 4, 9]] = 1, 1, valid, 1
    # on the host: a constant of the program must not be on a device other than its own
    key: Any = np.asarray(jax.random.key_data(jax.random.key(0, impl=work.key_impl)))

    def both(params: PyTree, model_state: PyTree, batch: PyTree, numbers: Any) -> list[Terms]:
        zero, none = jnp.int32(0), None
        state = TrainState(params, none, model_state, key, zero, zero, zero, none, none)
        trained, _ = work.selection.split(params)
        payload = Pieces((jax.tree.map(lambda x: x[None], batch),))
        return [
            replace(work, split=split).gradient(state, payload, CallArgs(numbers))(
                0, trained, model_state
            )
            for split in (1, 2)
        ]

    args = (params, model_state, batch, numbers)
    for device in devices:
        try:
            with jax.default_matmul_precision("highest"):
                whole, halves = jax.device_get(jax.jit(both)(*jax.device_put(args, device)))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            continue
        return _differences(whole, halves)
    return None


def _differences(whole: Terms, halves: Terms) -> dict[str, float] | None:
    """Return relative differences by name; None if `whole` is not finite."""
    ours, theirs = _values(whole), _values(halves)
    if not all(np.isfinite(value).all() for value in ours.values()):
        return None
    least = FLOOR * _norm(np.array([_norm(leaf) for leaf in jax.tree.leaves(whole.grads)]))
    found: dict[str, float] = {}
    for name, value in ours.items():
        apart = _norm(value - theirs[name])
        size = max(_norm(value), least if name.startswith(GRADIENT) else FLOOR)
        found[name] = apart / size if apart else 0.0
    return {name: x if np.isfinite(x) else np.inf for name, x in found.items()}


def _values(terms: Terms) -> dict[str, np.ndarray]:
    """Return what a microbatch contributes, by name."""
    values = {f"{GRADIENT}{name}": grad for name, grad in named(terms.grads, "")}
    values |= {"a loss": terms.loss, "a weight": terms.weight}
    values |= {f"a metric {name!r}": value for name, value in terms.metrics.items()}
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def _near(params: PyTree) -> PyTree:
    """Return parameters close to the initial ones, but not 0 where those are."""
    noise = np.random.default_rng(0).normal(size=2**16)

    def moved(leaf: Any) -> Any:
        if not is_float(leaf) or leaf.size == 0:
            return leaf
        scale = _norm(leaf) / leaf.size**0.5 or max(leaf.shape[:-1], default=1) ** -0.5
        # far fewer draws than parameters: drawing one each takes longer than training with them
        return (leaf + NOISE * scale * np.resize(noise, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(moved, params)


def _examples(plan: DataPlan, count: int) -> PyTree:
    """Return examples in their dtypes on the devices, spread over the data if it has a size."""
    source = plan.source
    if isinstance(source, IterableSource):
        rows = jax.tree.map(lambda x: np.asarray(x)[:count], source.peek())
    else:
        rows = source.rows(np.linspace(0, source.size - 1, count).astype(np.int64))
    return jax.tree.map(lambda row, like: np.asarray(row, like.dtype), rows, plan.microbatch)


def _norm(value: Any) -> float:
    return float(np.linalg.norm(np.asarray(value, np.float64)))
