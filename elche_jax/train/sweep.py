"""Evaluation and inference on all devices, in proportion to their speeds.

A sweep reads the data once, in order, in windows whose counts follow the measured speeds.
The devices do not synchronise; the host puts their results together. In a job of several
processes, each process runs its own devices, and they exchange times and results after some of the
windows.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from elche_jax import _check as check
from elche_jax.cadence import Cadence, Controller, FixedTotal, WindowRecord, WindowTime
from elche_jax.data.order import Cursor
from elche_jax.engine.bits import check_bits
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.devices import fleet_of, names_of
from elche_jax.engine.digests import digest_of, settings_of
from elche_jax.engine.job import Job
from elche_jax.engine.lane import kinds_of
from elche_jax.engine.laned import devices_of
from elche_jax.engine.loop import LoopHook
from elche_jax.engine.place import placing
from elche_jax.engine.replicas import replicate_over
from elche_jax.engine.shapes import one_of, shapes_of, signature
from elche_jax.engine.state import TrainState
from elche_jax.engine.sweep import BatchFn, SweepProgram, SweepRunner, Variables
from elche_jax.engine.talk import Talk
from elche_jax.observe.report import RunReport, make_report
from elche_jax.train.across import fingerprint
from elche_jax.train.finite import FinitePolicy
from elche_jax.train.in_flight import InFlight, Run, Window
from elche_jax.train.initial import check_buffers, check_one_copy
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.loading import Loading
from elche_jax.train.options import Options
from elche_jax.train.outside import check_mesh, check_outside
from elche_jax.train.parts import cadence_for, check_emulation
from elche_jax.train.pipeline import IN_FLIGHT, Pipeline
from elche_jax.train.spec import DataPlan
from elche_jax.train.windows import Windows

PyTree = Any
T = TypeVar("T")

ONE_DEVICE = 16
"""Microbatches per window with a single device, which has no speeds to balance."""


MakeProgram = Callable[[BatchFn, Variables, PyTree, bool], tuple[SweepProgram, int]]
"""`make(fn, shapes of the variables, shapes of a microbatch, ragged)`: traces the function.

`ragged` says whether the last microbatch may have fewer examples. Returns what a device
computes, and the bytes of the results of one microbatch if they are kept, else 0."""


class SweepPipeline(Pipeline[SweepRunner]):
    """The windows of a sweep, see `Pipeline`; a single process plans and records as there.

    A window of a sweep has no exchange that could carry times. So each process keeps the records of
    its own devices until all processes exchange them, in rounds that double in length. It plans the
    windows of a round from the records of earlier rounds, so that all processes plan alike.
    """

    combines = False
    _own: tuple[WindowRecord, ...] = ()  # the other processes do not know these yet
    _told = -1  # the last window whose record all processes know

    def ends_round(self, window: int) -> bool:
        """Return whether the processes exchange what they know after this window."""
        return not self._job.one_process and told_before(window + 1) == window

    def begin(self, where: str) -> None:
        """Plan without lost devices; `where` is the function the user called."""
        if self.lose(0, where, again=False):
            self._scheduler.restart()

    def told(
        self, talk: Talk, where: str, found: list[T], again: Callable[[], list[T]]
    ) -> list[list[T]]:
        """Exchange what processes have read of the last windows, and the windows' times.

        Args:
            talk: Carries the exchange.
            where: The function the user called, for messages.
            found: What this process has read.
            again: Runs these windows again without work for lost devices, and returns what is read.

        Returns:
            What each process has read.
        """
        if self._job.one_process:
            return [found]
        self.finish()
        records = self._own
        told = talk.tell((found, records))
        # if a process has ended meanwhile, what it had read is lost
        while self.lose(self._told + 1, where):
            told = talk.tell((again(), records))
        for of_window in zip(*(records for _, records in told), strict=True):
            self._scheduler.observe(joined_record(self._job, of_window))
        with self._changed:
            self._own, self._told = (), self._told + len(records)
            self._changed.notify_all()
        return [values for values, _ in told]

    def _record(self, window: InFlight, record: WindowRecord, at: int | None = None) -> None:
        if self._job.one_process:
            super()._record(window, record, at)
        else:
            self._own += (record,)

    def _may_plan(self, window: int, below: int) -> bool:
        if self._job.one_process:
            return super()._may_plan(window, below)
        oldest = min(self._open, default=window)
        return self._told >= told_before(window) and oldest > window - below

    def _known_at(self, window: int, ahead: int) -> int:
        del ahead
        return told_before(window)


class Sweep:
    """Runs a function of microbatches over data.

    Attributes:
        devices: The devices of the job, in rank order.
        fleet: The devices of this process, in lanes.
        scheduler: Plans and records of the last sweep.

    Args:
        where: The function the user called, for messages.
        fn: The user's function.
        make: Makes the program, once shapes are known.
        devices: The devices, in rank order.
        cadence: Decides the counts; None for windows of a tenth of a second.
        emulate: Slows devices down on purpose.
    """

    def __init__(
        self,
        where: str,
        fn: Callable[..., Any],
        make: MakeProgram,
        devices: tuple[jax.Device, ...],
        cadence: Cadence[Any] | None,
        emulate: LoopHook | None,
    ):
        self.devices = devices
        cadence = cadence_for(where, cadence, kinds_of(devices))
        if cadence is not None and cadence.uses_loss:
            rule, todo = "not follow the loss, as there is none", "Leave it out."
            got = type(cadence).__name__
            raise ValueError(check.message(where, "cadence", rule, got, todo))
        check_emulation(where, emulate, len(devices))
        self._where, self._fn, self._make, self._emulate = where, fn, make, emulate
        if cadence is None:
            cadence = WindowTime() if len(self.devices) > 1 else FixedTotal(ONE_DEVICE)
        self.scheduler = LiveScheduler(
            Controller(cadence), len(self.devices), hint=False, owner="EvalStep"
        )
        self.fleet = fleet_of(where, self.devices)
        self._cache = CompileCache()
        self._runners: dict[Any, tuple[SweepProgram, SweepRunner]] = {}
        self._loading = Loading(self.fleet)

    def release(self) -> None:
        """Free the data kept on the devices."""
        self._loading.release()

    def report(self) -> RunReport:
        """Return the measurements of the last sweep."""
        names = names_of(self.devices)
        stats = vars(self._cache.stats)
        return make_report(self.scheduler.records, names, self.scheduler.counts, stats)

    def results(
        self,
        read: Callable[[Window, list[PyTree]], T],
        params: PyTree,
        model_state: PyTree,
        data: Any,
        **reading: Any,
    ) -> Generator[list[list[T]]]:
        """Run over the data once, and yield what is read of the results.

        Args:
            read: Takes a window and the results of its calls, stacked arrays on the devices of
                this process; returns what all processes should know.
            params: Parameters, or a `TrainState` on these devices.
            model_state: The model state, or None.
            data: The user's data.
            **reading: How the data are read, see `Loading.open`.

        Yields:
            For each process, what it read of the next windows, which are the same in all.
        """
        check_outside(self._where)
        check_mesh(self._where, self.fleet.job.world_size)
        with Talk(self.fleet.job, self._where) as talk:
            variables = self._variables(params, model_state)
            plan = self._loading.open(self._where, data, **reading)
            pipeline = self._open(variables, plan)
            try:
                self._check_same(talk, params, model_state, plan)
                pipeline.begin(self._where)
            except BaseException:
                pipeline.close()
                raise
            yield from self._rounds(talk, pipeline, variables, read)

    def _check_same(self, talk: Talk, params: PyTree, model_state: PyTree, plan: DataPlan) -> None:
        """Raise unless all processes pass equal arguments and data."""
        if self.fleet.job.one_process:
            return
        # states are compared while they are trained
        given = None if isinstance(params, TrainState) else digest_of((params, model_state))
        talk.check_same(
            cadence=settings_of(self.scheduler.cadence),
            cadence_state=self.scheduler.state.to_dict(), params=given, data=fingerprint(plan),
            batch_size=plan.batch_size, mask_key=plan.mask_key,
        )  # fmt: skip

    def _rounds(
        self,
        talk: Talk,
        pipeline: SweepPipeline,
        variables: Variables,
        read: Callable[[Window, list[PyTree]], T],
    ) -> Generator[list[list[T]]]:
        pending: deque[tuple[Window, list[PyTree]]] = deque()
        found: list[T] = []
        ran: list[Window] = []  # since the last exchange, without their data

        def again() -> list[T]:
            windows = map(pipeline.shared, ran)
            return [read(window, _results(pipeline, variables, window)) for window in windows]

        with Windows(pipeline, Run()) as windows:
            for window in windows:
                pending.append((window, self._dispatch(pipeline, variables, window)))
                ran.append(replace(window, calls=()))
                last = pipeline.ends_round(window.index)
                # reading results waits for them: keep the devices busy meanwhile
                while len(pending) > (0 if last else IN_FLIGHT):
                    found.append(read(*pending.popleft()))
                if found and (last or self.fleet.job.one_process):
                    yield pipeline.told(talk, self._where, found, again)
                    found, ran = [], []
        found += [read(*one) for one in pending]
        if found:
            yield pipeline.told(talk, self._where, found, again)

    def _dispatch(
        self, pipeline: SweepPipeline, variables: Variables, window: Window
    ) -> list[PyTree]:
        with pipeline.dispatch(window) as flight, placing(self.fleet):
            outs = [pipeline.runner.run(variables, call) for call in window.calls]
            _, flight.token = outs[-1]
            # there is no combine: one token marks the end of the work and of the window
            flight.launch(flight.token)
        pipeline.check_emulation()
        return [results for results, _ in outs]

    def _open(self, variables: Variables, plan: DataPlan) -> SweepPipeline:
        fn = BatchFn(self._fn, variables.model_state is not None, plan.mask_key)
        shapes = shapes_of(variables)
        # the function itself is not in the key: it is always the same, and may be unhashable
        key = (fn.has_model_state, fn.mask_key, plan.ragged, signature((shapes, plan.microbatch)))
        one = one_of(shapes)
        # traced in every call: other values that the function reads may have changed
        with plan.noting_list():
            program, row_bytes = self._make(fn, one, plan.microbatch, plan.ragged)
        if key in self._runners and self._runners[key][0] != program:
            # the function has changed since: programs of all shapes are out of date
            self._runners.clear()
            self._cache.clear()
        if key not in self._runners:
            runner = SweepRunner(program, self.fleet, self._cache, shapes)
            self._runners[key] = program, runner
        _, runner = self._runners[key]
        plan = replace(plan, row_bytes=row_bytes)
        feed = self._loading.feed(plan, runner, self.scheduler.cadence)
        self.scheduler.restart()
        options = Options(finite=FinitePolicy("ignore"), emulate=self._emulate)
        watch = options.finite_watch(self.devices)
        return SweepPipeline(feed, self.scheduler, Cursor(), watch, runner, self._cache, options)

    def _variables(self, params: PyTree, model_state: PyTree) -> Variables:
        """Return stacked parameters and model state: those of a training state, or copies."""
        if not isinstance(params, TrainState):
            check_one_copy(self._where, params=params, model_state=model_state)
            check_bits(self._where, params=params, model_state=model_state)
            variables = Variables(params, model_state)
            return replicate_over(self.fleet, variables)
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
        if holders != list(self.fleet.devices):
            raise ValueError(
                f"{self._where}: a TrainState must be on the devices of the evaluation "
                f"({', '.join(map(str, self.fleet.devices))}), got one on "
                f"{', '.join(map(str, holders))}. Pass devices=train.devices, or "
                "unreplicate(state.params)."
            )
        return self.fleet.restack(Variables(params.params, params.model_state))


def _results(pipeline: SweepPipeline, variables: Variables, window: Window) -> list[PyTree]:
    """Run a window that is not measured; return the results of its calls."""
    with placing(pipeline.runner.fleet):
        return [pipeline.runner.run(variables, call)[0] for call in window.calls]


def told_before(window: int) -> int:
    """Return the last window of a sweep whose record the plan for `window` takes into account.

    Processes exchange times after windows 0, 1, 3, 7 and so on: often while speeds are hardly
    known, and rarely later.

    Examples:
        >>> [told_before(window) for window in range(9)]
        [-1, 0, 1, 1, 3, 3, 3, 3, 7]
    """
    return (1 << window.bit_length() >> 1) - 1


def joined_record(job: Job, told: Sequence[WindowRecord]) -> WindowRecord:
    """Join the records that the processes have of their devices in a sweep's window."""
    return replace(
        told[0],
        busy_ms=job.by_rank([record.busy_ms for record in told], 0.0),
        wall_ms=max(record.wall_ms for record in told),
        sync_ms=min(record.sync_ms for record in told),
        skew_ms=max(record.skew_ms for record in told),
        steady=all(record.steady for record in told),
        cold=any(record.cold for record in told),
    )
