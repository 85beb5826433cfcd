"""`build_eval_step` and `predict`: exact metrics, and outputs in data order."""

import math
import operator
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import chain
from types import MethodType
from typing import Any

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax.cadence import Cadence
from elche_jax.data.split import piece_lengths
from elche_jax.engine.devices import select_job
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.loss import SMALLEST_WEIGHT
from elche_jax.engine.sweep import (
    Apply,
    BatchFn,
    Score,
    Variables,
    inspect_metrics,
    inspect_outputs,
)
from elche_jax.observe.report import RunReport
from elche_jax.train.in_flight import Window
from elche_jax.train.live_scheduler import Scheduled
from elche_jax.train.loading import WINDOW_BYTES
from elche_jax.train.outside import check_outside
from elche_jax.train.sweep import Sweep

PyTree = Any
Sums = dict[str, tuple[Any, Any]]
"""By metric name, the sums of weighted values and of weights, in float64."""


class EvalStep(Scheduled):
    """Computes metrics over a data set on all devices; made by `build_eval_step`.

    Attributes:
        devices: The devices, in rank order.
    """

    def __init__(self, sweep: Sweep):
        self._sweep, self._scheduler = sweep, sweep.scheduler
        self.devices = sweep.devices

    def report(self) -> RunReport:
        """Return the speeds, counts, busy shares and compiles of the last evaluation."""
        return self._sweep.report()

    def __call__(
        self,
        params: PyTree,
        data: Any,
        batch_size: int | None = None,
        *,
        model_state: PyTree = None,
        mask_key: str | None = None,
        placement: str = "stream",
        window_bytes: int = WINDOW_BYTES,
    ) -> dict[str, Any]:
        """Evaluate every example exactly once.

        Let `w` be the weight of a value: 1 per example, and for a scalar the number of valid
        examples in its microbatch. With sums in float32 within one program call and in float64
        over calls and devices,

            metric = sum of w * value / sum of w

        Speeds decide which examples are in a call, so metrics may differ in their last digits
        from one evaluation to the next. In a job of several processes, all must make this call
        with the same arguments, and all get bitwise the same result. Each process reads the
        examples of its own devices.

        Args:
            params: Parameters, a pytree of arrays; or a `TrainState` on these devices,
                whose replicas and model state are used as they are.
            data: As in `TrainStep.windows`.
            batch_size: Examples per microbatch; None for an iterable.
            model_state: Model state, if `params` are parameters.
            mask_key: Adds the mask of valid examples to every microbatch under this name.
            placement: As in `TrainStep.windows`.
            window_bytes: As in `TrainStep.windows`.

        Returns:
            The metrics: floats, or float64 arrays for metrics with further axes. NaN if
            the weights sum to 0, or to less than 2**-100.

        Raises:
            TypeError: `metric_fn` returns something that is not a metric; `data` has an
                unsupported form.
            ValueError: Empty data; a scalar metric for data whose last microbatch is
                smaller; a `TrainState` on other devices; processes that pass different
                parameters or data.
            RuntimeError: Another process of the job has raised an error.
            ProcessLostError: Another process has ended, and the data cannot be read again.
        """
        sums: Sums | None = None
        sweep = self._sweep.results(
            _sums, params, model_state, data, batch_size=batch_size, mask_key=mask_key,
            placement=placement, window_bytes=window_bytes,
        )  # fmt: skip
        # closed here: a traceback would keep a suspended generator, with its threads and data
        with closing(sweep):
            for processes in sweep:
                for found in chain(*processes):
                    sums = found if sums is None else _added(sums, found)
        assert sums is not None  # empty data have raised by now
        return {name: _mean(total, weight) for name, (total, weight) in sums.items()}


def build_eval_step(
    metric_fn: Callable[..., Any],
    *,
    devices: Sequence[jax.Device] | None = None,
    cadence: Cadence[Any] | None = None,
    emulate: LoopHook | None = None,
) -> EvalStep:
    """Build an evaluation step that uses all devices in proportion to their speeds.

    Every example counts exactly once, even if the last microbatch is smaller or there are
    more devices than microbatches. Speeds are measured during a call and reused by the next.
    Every call traces `metric_fn`, and recompiles it if it has changed since the last call,
    for example because a value that it closes over has changed.

    Args:
        metric_fn: `metric_fn(params, batch)`, with model state
            `metric_fn(params, model_state, batch)`. Returns a dict: an array with one
            entry per example, a scalar (the mean over the microbatch), or
            `Weighted(value, weight)` with scalars or vectors, for example per token.
        devices: The devices; None for all devices of the job.
        cadence: Decides how many microbatches each device gets; None for windows of a
            tenth of a second (`elche_jax.cadence.WindowTime`).
        emulate: Slows devices down on purpose, see `elche_jax.lab`; its schedule sees the
            whole evaluation as window 0.

    Returns:
        The evaluation step: `evaluate(params or state, data, batch_size) -> dict`.

    Raises:
        TypeError: `metric_fn` is not callable, or `devices` are not devices.
        ValueError: `devices` is empty, has duplicates, or has none of some process; `cadence`
            follows the loss.

    Examples:
        >>> import jax, numpy as np
        >>> import elche_jax as elche
        >>> def metric_fn(params, batch):
        ...     return {"error": (batch["x"] * params["w"] - batch["y"]) ** 2}
        >>> evaluate = elche.build_eval_step(metric_fn, devices=jax.devices()[:2])
        >>> data = {"x": np.arange(5.0, dtype="float32"), "y": np.zeros(5, "float32")}
        >>> evaluate({"w": np.float32(1)}, data, batch_size=2)
        {'error': 6.0}
    """
    check_outside("build_eval_step")
    check.instance("build_eval_step", "metric_fn", metric_fn, Callable, "be callable", brief=True)
    chosen = select_job(devices, "build_eval_step")

    def make(fn: BatchFn, variables: Variables, batch: PyTree, ragged: bool) -> tuple[Score, int]:
        return Score(*inspect_metrics(fn, variables, batch, ragged), emulate), 0

    return EvalStep(Sweep("build_eval_step", metric_fn, make, chosen, cadence, emulate))


def predict(
    apply_fn: Callable[..., Any],
    params: PyTree,
    data: Any,
    batch_size: int | None = None,
    *,
    model_state: PyTree = None,
    mask_key: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    cadence: Cadence[Any] | None = None,
    placement: str = "stream",
    window_bytes: int = WINDOW_BYTES,
    emulate: LoopHook | None = None,
) -> PyTree:
    """Apply a model to data on all devices; the outputs are in the order of the data.

    Programs and measured speeds are cached for the last 8 combinations of function object and
    devices; `clear_predict_cache` drops them. Every call traces the function, and recompiles
    it if it has changed since the last call, for example because a global that it reads or, for
    a method, its object has changed. A function already wrapped in `jax.jit` is not traced
    again, so changes to it go unnoticed.

    In a job of several processes, all must make this call with the same arguments. Each process
    reads the examples of its own devices and gets all outputs.

    Data are not kept, with one exception: if a call fails after it has read the first
    microbatch of an iterator, the next call with the same function and devices starts with that
    microbatch. To use a different function, make a new iterator.

    Args:
        apply_fn: `apply_fn(params, batch)`, with model state
            `apply_fn(params, model_state, batch)`; returns a pytree of arrays with one
            entry per example on the first axis.
        params: Parameters, a pytree of arrays; or a `TrainState` on these devices.
        data: As in `TrainStep.windows`.
        batch_size: Examples per microbatch; None for an iterable.
        model_state: Model state, if `params` are parameters.
        mask_key: Adds the mask of valid examples to every microbatch under this name.
        devices: The devices; None for all devices of the job.
        cadence: As in `build_eval_step`.
        placement: As in `TrainStep.windows`.
        window_bytes: As in `TrainStep.windows`; also limits the outputs of one program call.
        emulate: Slows devices down on purpose, see `elche_jax.lab`.

    Returns:
        The outputs of all examples, in every process: NumPy arrays, leaves `(examples, ...)`.

    Raises:
        TypeError: `apply_fn` is not callable, or an output does not have one entry per
            example; `data` has an unsupported form.
        ValueError: Empty data; a `TrainState` on other devices; `cadence` follows the loss;
            processes that pass different parameters or data.
        RuntimeError: Another process of the job has raised an error.
        ProcessLostError: Another process has ended, and the data cannot be read again.

    Examples:
        >>> import jax, numpy as np
        >>> import elche_jax as elche
        >>> def apply_fn(params, x):
        ...     return x * params["w"]
        >>> x = np.arange(5.0, dtype="float32")
        >>> elche.predict(apply_fn, {"w": np.float32(2)}, x, batch_size=2).tolist()
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    check_outside("predict")
    check.instance("predict", "apply_fn", apply_fn, Callable, "be callable", brief=True)
    chosen = select_job(devices, "predict")
    sweep = _kept_sweep(_same_function(apply_fn), chosen, _same(cadence), _same(emulate))
    blocks: list[list[np.ndarray]] = []
    structure = None

    def read(window: Window, calls: list[PyTree]) -> tuple[int, list[Part]]:
        nonlocal structure
        structure = jax.tree.structure(calls[0][0])
        return window.examples, _parts(window, calls)

    results = sweep.results(
        read, params, model_state, data, batch_size=batch_size, mask_key=mask_key,
        placement=placement, window_bytes=window_bytes,
    )  # fmt: skip
    try:
        with closing(results):  # see EvalStep
            for processes in results:
                for told in zip(*processes, strict=True):  # one window, from every process
                    examples, _ = told[0]
                    blocks.append(_joined(examples, [part for _, own in told for part in own]))
    finally:
        # the sweep is cached beyond this call; the caller's data must not be
        sweep.release()
    assert structure is not None  # empty data have raised by now
    return structure.unflatten([np.concatenate(parts) for parts in zip(*blocks, strict=True)])


def clear_predict_cache() -> None:
    """Drop the programs and speeds cached by `predict`.

    JAX's own caches may hold on to a function for longer, see `jax.clear_caches`.
    """
    _kept_sweep.cache_clear()


@dataclass(frozen=True)
class _Same:
    """A cache key that keeps its value alive, as the id of a dropped object may be reused."""

    key: Any
    value: Any = field(compare=False)


def _same(value: Any) -> _Same:
    """Return a key that compares by value if the value is hashable, else by identity."""
    try:
        hash(value)
    except TypeError:
        return _Same(id(value), value)
    return _Same(value, value)


def _same_function(value: Any) -> _Same:
    """Return a key that compares by identity, as equal functions may compute different things."""
    is_method = isinstance(value, MethodType)  # bound anew at every access
    return _Same((id(value.__self__), id(value.__func__)) if is_method else id(value), value)


@lru_cache(maxsize=8)
def _kept_sweep(
    apply_fn: _Same, devices: tuple[jax.Device, ...], cadence: _Same, emulate: _Same
) -> Sweep:
    def make(fn: BatchFn, variables: Variables, batch: PyTree, ragged: bool) -> tuple[Apply, int]:
        traced = inspect_outputs(fn, variables, batch)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(traced.outputs))
        return Apply(traced, emulate.value), size

    return Sweep("predict", apply_fn.value, make, devices, cadence.value, emulate.value)


Part = tuple[int, list[np.ndarray]]
"""Where a piece begins in its window, and its leaves, `(microbatches, batch, ...)`."""


def _parts(window: Window, calls: list[PyTree]) -> list[Part]:
    """Fetch the pieces of a window's outputs that this process's devices hold.

    Each call returned one stacked array per piece length; `pieces()` says where in the window
    the pieces of a device begin.
    """
    parts: list[Part] = []
    for call, pieces in zip(window.calls, calls, strict=True):
        capacity = call.payload.capacity(stacked=True)
        for place, own in enumerate(call.ranges):
            starts = own.pieces()
            for length, piece in zip(piece_lengths(capacity), pieces, strict=True):
                if length in starts:
                    # fetch only this device's entry of each stacked array
                    rows = [leaf.addressable_data(place) for leaf in jax.tree.leaves(piece)]
                    parts.append((starts[length], [np.asarray(row)[0] for row in rows]))
    return parts


def _joined(examples: int, parts: list[Part]) -> list[np.ndarray]:
    """Return the leaves of a window's outputs, `(examples, ...)`, in the order of the data."""
    parts = sorted(parts, key=lambda part: part[0])

    def join(*leaves: np.ndarray) -> np.ndarray:
        # not reshape(-1, ...), which fails if another axis has length zero
        flat = [leaf.reshape(len(leaf) * leaf.shape[1], *leaf.shape[2:]) for leaf in leaves]
        return np.concatenate(flat)[:examples]

    return [join(*leaves) for leaves in zip(*(leaves for _, leaves in parts), strict=True)]


def _sums(window: Window, calls: list[PyTree]) -> Sums:
    """Return the sums over the calls of a window and this process's devices."""
    del window
    parts = [
        jax.tree.map(lambda part: np.asarray(part, np.float64).sum(axis=0), call) for call in calls
    ]
    return reduce(_added, parts)


def _added(sums: Sums, found: Sums) -> Sums:
    """Add weighted sums, by the name of the metric."""
    return jax.tree.map(operator.add, sums, found)


def _mean(total: Any, weight: Any) -> Any:
    # devices flush float32 below 2**-126 to zero, also products of such weights and values
    if 0 < weight < SMALLEST_WEIGHT:
        weight = math.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / weight
    return float(mean) if np.ndim(mean) == 0 else mean
