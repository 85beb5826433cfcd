"""Evaluation and inference: all devices in proportion to their speeds, nothing twice.

A sweep reads data once, in order, in windows whose counts follow the measured speeds.
The devices do not synchronise; the host puts their results together.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from elche_jax import _check as check
from elche_jax.cadence import Cadence, Controller, FixedTotal, WindowTime
from elche_jax.data.order import Cursor
from elche_jax.data.source import IterableSource
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.devices import check_one_kind, select_devices
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.loss import check_mask_key
from elche_jax.engine.replicas import devices_of, replicate
from elche_jax.engine.runner import signature
from elche_jax.engine.state import TrainState
from elche_jax.engine.sweep import BatchFn, SweepProgram, SweepRunner, Variables
from elche_jax.engine.traced import Traced
from elche_jax.observe.report import RunReport, make_report
from elche_jax.train.feed import DataPlan
from elche_jax.train.finite import FinitePolicy, FiniteWatch
from elche_jax.train.initial import check_buffers, check_one_copy, shapes_of
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.loading import Loading
from elche_jax.train.outside import check_outside
from elche_jax.train.parts import check_parts
from elche_jax.train.pipeline import IN_FLIGHT, Pipeline, Window
from elche_jax.train.spec import check_data_plan, microbatch_shapes
from elche_jax.train.windows import Windows

PyTree = Any

ONE_DEVICE = 16
"""Microbatches per window where there is one device, and thus nothing to measure."""


@dataclass(frozen=True)
class Reading:
    """How the data of a sweep are read; the arguments of `TrainStep.windows`."""

    batch_size: int | None
    mask_key: str | None
    placement: str
    window_bytes: int


@dataclass(frozen=True)
class Task:
    """What a sweep computes, once the shapes are known.

    Attributes:
        traced: The user's function as it was when the task was made.
        program: What a device computes.
        row_bytes: Bytes that the results of a microbatch take on a device.
    """

    traced: Traced
    program: SweepProgram
    row_bytes: int = 0


MakeTask = Callable[[BatchFn, Variables, PyTree, bool], Task]
"""`make(fn, shapes of the variables, of a microbatch, may the last one have less)`."""


class Sweep:
    """Runs a function of microbatches over data.

    Attributes:
        devices: The devices, in rank order.

    Args:
        where: The function the user called.
        fn: The user's function.
        make: Makes the task, once shapes are known.
        devices: The devices; None for all local ones.
        cadence: How many microbatches each gets; None: windows of a tenth of a second.
        emulate: Makes devices slower on purpose.
    """

    def __init__(
        self,
        where: str,
        fn: Callable[..., Any],
        make: MakeTask,
        devices: Sequence[jax.Device] | None,
        cadence: Cadence[Any] | None,
        emulate: LoopHook | None,
    ):
        self.devices = select_devices(devices, where)
        check_one_kind(where, self.devices)
        check_parts(where, cadence=cadence, emulate=emulate)
        if emulate is not None:
            emulate.check(len(self.devices))
        self._where, self._fn, self._make, self._emulate = where, fn, make, emulate
        if cadence is None:
            cadence = WindowTime() if len(self.devices) > 1 else FixedTotal(ONE_DEVICE)
        self._scheduler = LiveScheduler(
            Controller(cadence), len(self.devices), hint=False, owner="EvalStep"
        )
        self._lane, *_ = lanes_of(self.devices)
        self._cache = CompileCache()
        self._runners: dict[Any, tuple[SweepRunner, Task]] = {}
        self._loading = Loading(self.devices)

    @property
    def scheduler(self) -> LiveScheduler:
        """What is known of the speeds."""
        return self._scheduler

    def release(self) -> None:
        """Gives back the memory of data that were kept on the devices."""
        self._loading.release()

    def report(self) -> RunReport:
        """What was measured in the last sweep."""
        names = [str(device) for device in self.devices]
        return make_report(
            self._scheduler.records, names, self._scheduler.counts, vars(self._cache.stats)
        )

    def results(
        self, params: PyTree, model_state: PyTree, data: Any, reading: Reading
    ) -> Iterator[tuple[Window, list[PyTree]]]:
        """Runs over the data once; gives every window with the results of its calls.

        Results are stacked arrays on the devices, ready or about to be.
        """
        check_outside(self._where)
        variables = self._variables(params, model_state)
        pipeline = self._open(variables, data, reading)
        pending: deque[tuple[Window, list[PyTree]]] = deque()
        with Windows(pipeline) as windows:
            for window in windows:
                pending.append((window, self._dispatch(pipeline, variables, window)))
                if len(pending) > IN_FLIGHT:
                    yield pending.popleft()
        yield from pending

    def _dispatch(
        self, pipeline: Pipeline[SweepRunner], variables: Variables, window: Window
    ) -> list[PyTree]:
        pipeline.dispatching(window)
        if not pipeline.runner.begun:
            pipeline.runner.begin(window.calls)
            pipeline.compiled()
        misses, at = self._cache.stats.misses, time.perf_counter()
        outs = [pipeline.runner.run(variables, call) for call in window.calls]
        _, token = outs[-1]
        pipeline.launch(at)(token)
        pipeline.dispatched(window, at, self._cache.stats.misses == misses, True, token)
        if self._emulate is not None:
            self._emulate.settle()
        return [results for results, _ in outs]

    def _open(self, variables: Variables, data: Any, reading: Reading) -> Pipeline[SweepRunner]:
        limit = check.integer(self._where, "window_bytes", reading.window_bytes, low=1)
        if reading.mask_key is not None and not isinstance(reading.mask_key, str):
            kind = type(reading.mask_key).__name__
            raise TypeError(f"{self._where}: mask_key must be a string, got {kind}.")
        source = self._loading.source(data)
        size = check_data_plan(source, reading.batch_size, 1, drop_last=False)
        microbatch = microbatch_shapes(source, size)
        check_mask_key(reading.mask_key, microbatch)
        fn = BatchFn(self._fn, variables.model_state is not None, reading.mask_key)
        ragged = isinstance(source, IterableSource) or bool(source.size % size)
        shapes = shapes_of(variables)
        # not the function itself, the same in all calls, which may have no hash
        key = (fn.has_model_state, fn.mask_key, ragged, signature((shapes, microbatch)))
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        task = self._make(fn, one, microbatch, ragged)
        if key in self._runners and self._runners[key][1].traced != task.traced:
            self._runners.clear()  # it has changed since
            self._cache.clear()
        if key not in self._runners:
            runner = SweepRunner(task.program, self._lane, self._cache, shapes)
            self._runners[key] = (runner, task)
        runner, task = self._runners[key]
        where = self._loading.placement(reading.placement, source, limit, microbatch)
        plan = DataPlan(
            source, size, 0, False, False, where, limit, microbatch, task.row_bytes
        )  # fmt: skip
        feed = self._loading.feed(plan, runner, self._scheduler.adaptive, self._scheduler.largest)
        self._scheduler.restart()
        watch = FiniteWatch(FinitePolicy("ignore"), self.devices)
        return Pipeline(feed, self._scheduler, Cursor(), 1, watch, runner, combines=False)

    def _variables(self, params: PyTree, model_state: PyTree) -> Variables:
        """Stacked parameters and model state: a training state's own, or copies."""
        if not isinstance(params, TrainState):
            check_one_copy(self._where, "params", params)
            check_one_copy(self._where, "model_state", model_state)
            variables = Variables(params, model_state)
            return replicate(variables, self.devices)
        if model_state is not None:
            raise ValueError(
                f"{self._where}: model_state must be left out with a TrainState, which has its "
                f"own, got a {type(model_state).__name__}."
            )
        check_buffers(params, self._where)
        if params.step.ndim == 0:
            raise ValueError(
                f"{self._where}: a TrainState must be replicated over the devices, got one copy. "
                "Pass its params, and its model_state."
            )
        holders = devices_of(params.step)
        if holders != self.devices:
            raise ValueError(
                f"{self._where}: a TrainState must be on the devices of the evaluation "
                f"({', '.join(map(str, self.devices))}), got one on "
                f"{', '.join(map(str, holders))}. Pass devices=train.devices, or "
                "unreplicate(state.params)."
            )
        return Variables(params.params, params.model_state)
