"""`TrainStep`: the training step that the user's loop calls."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import jax
import optax

from elche_jax import _check as check
from elche_jax.cadence import Cadence, Controller, Divergence, NoGuard
from elche_jax.config import Recorder
from elche_jax.data.order import Cursor
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.devices import names_of
from elche_jax.engine.lane import Fleet
from elche_jax.engine.loss import LossFn
from elche_jax.engine.reductions import parameter_averager
from elche_jax.engine.replicas import unreplicate
from elche_jax.engine.state import TrainState
from elche_jax.observe.report import RunReport, make_report
from elche_jax.train.across import check_same_data
from elche_jax.train.divergence import divergence_reader
from elche_jax.train.in_flight import Run, Window
from elche_jax.train.initial import StateSpec, check_buffers, initial_state, other_shapes
from elche_jax.train.live_scheduler import LiveScheduler, Scheduled
from elche_jax.train.loading import WINDOW_BYTES, Loading
from elche_jax.train.options import Options
from elche_jax.train.outside import Calls
from elche_jax.train.resume import (
    adopt,
    join_devices,
    restore_run,
    rows_to_dict,
    run_to_dict,
)
from elche_jax.train.runners import Runners
from elche_jax.train.timing import timing_for
from elche_jax.train.training import Training
from elche_jax.train.windows import Windows
from elche_jax.train.worth import LaneWorth, rest_of

PyTree = Any


class TrainStep(Scheduled):
    """A training step over several devices; made by `build_train_step`.

    Attributes:
        devices: The devices of the job, in rank order.
        fleet: The devices of this process, in lanes.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        fleet: Fleet,
        cadence: Cadence[Any],
        options: Options,
    ):
        self.fleet, self.devices = fleet, fleet.job.devices
        devices = self.devices
        self._optimizer, self._options, self._calls = optimizer, options, Calls(fleet.job)
        rest = rest_of(fleet, cadence)
        self._scheduler = LiveScheduler(
            Controller(cadence, options.guard or NoGuard(), rest=rest), len(devices),
            options.hint, options.timeline, worth=LaneWorth(fleet, rest),
        )  # fmt: skip
        self._watch = options.finite_watch(devices)
        self._divergence = divergence_reader(self._options, self.devices)
        self._cache = CompileCache(None if options.timeline is None else self._scheduler.on_compile)
        self._runners = Runners(loss_fn, optimizer, fleet, options, self._cache)
        self._last_pipeline: Training | None = None
        # A window that the user keeps must keep its pipeline, as it can still be trained. One entry
        # per run, not per window: when an entry goes, Python code runs, in which a Ctrl-C is lost.
        self._pipelines: WeakKeyDictionary[Run, Training] = WeakKeyDictionary()
        self._initial: StateSpec | None = None
        self._bytes = 0, 0  # exchanged per device and window, saved by frozen parameters
        self._loading = Loading(fleet)
        self._timing = timing_for(options.timeline)
        self._average: Callable[[TrainState], PyTree] | None = None

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def run(self) -> int:
        """Number of the run; `init` and `restore_run` begin a new one."""
        return self._scheduler.run

    @property
    def counts_history(self) -> list[tuple[int, ...]]:
        """Counts of every window trained so far, in order, as `Replay` takes them.

        Windows that the loop leaves out are missing. `Replay` counts them, so it would give later
        windows the wrong counts.
        """
        return self._scheduler.history

    @property
    def throughput(self) -> tuple[float | None, ...]:
        """Microbatches per second of each device; None if not measured yet.

        The cadence's smoothed estimate if it has one, else the median over the last 32
        steady windows of `counts / busy_ms` (with one device, of `counts / wall_ms`).
        """
        return self._scheduler.throughput

    @property
    def ratios(self) -> tuple[float, ...]:
        """Share of the work that each device should get; they sum to 1 up to rounding.

        The cadence's own `ratios` if it has them (`Balanced`), else the throughput over its sum,
        where an unmeasured device counts with the mean of the others. Before any measurement, the
        planned counts over their sum, so that a speed hint takes effect.
        """
        return self._scheduler.ratios

    @property
    def skipped(self) -> int:
        """Number of completed windows that were not finite.

        Their update was dropped or, under `averaging`, a device was left out.
        """
        return self._watch.skipped

    @property
    def left_out(self) -> tuple[int, ...]:
        """Number of windows whose average left a device out as not finite or late, per device."""
        return tuple(self._watch.left_out)

    @property
    def divergence(self) -> list[Divergence]:
        """Divergence of the devices at the end of the last 64 windows, oldest first.

        Empty without `averaging`.
        """
        return self._scheduler.divergence

    def init(self, params: PyTree, *, model_state: PyTree = None, rng: Any = 0) -> TrainState:
        """Return the replicated training state, and begin a new run.

        Records and `counts_history` start over; the speeds known to the cadence stay.
        Memory that the previous run kept on the devices for its sums is freed.

        Args:
            params: Parameters, a pytree of float arrays. Copied.
            model_state: Further state of the model, such as BatchNorm statistics, a pytree
                of arrays. It is merged after every window according to `merge`.
            rng: A key or an integer seed. Microbatch `i` of the run gets
                `fold_in(key, i)`, whichever device runs it.

        Returns:
            The state; its leaves are stacked, `(world_size,) + shape`. In a job of several
            processes they have one entry for each device of this process.

        Raises:
            TypeError: A trained leaf of `params` is not a float array; `rng` is neither a
                key nor a seed; a rule of `merge` does not fit its leaf; a function for
                `trainable` or `merge` does not take `(path, leaf)`.
            ValueError: `trainable` or `merge` do not fit; processes pass different values, or
                their `trainable`, `merge` or optimizer differ.
            NonFiniteError, ReplicaMismatch: For a window of the previous run, if the loop
                left that run early and it is closed; otherwise the next `windows` raises it.
        """
        with self._calls("TrainStep.init"):
            if self._last_pipeline is not None and self._last_pipeline.closed:
                self.settle()
            self._runners.release()
            state, self._initial = initial_state(
                self._optimizer, self._options, self.fleet, params, model_state, rng
            )
            self._runners.begin(params, model_state)
            self._bytes = self._runners.exchanged_bytes(self._initial)
            self._watch = self._options.finite_watch(self.devices)
            if self._divergence is not None:
                self._divergence.end()
            self._divergence = divergence_reader(self._options, self.devices)
            self._average = None
            self._scheduler.restart()
            return state

    def windows(
        self,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = 1,
        seed: int = 0,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        mask_key: str | None = None,
        placement: str = "auto",
        window_bytes: int = WINDOW_BYTES,
        cursor: Cursor | None = None,
    ) -> Windows:
        """Iterate over the windows of some epochs of data.

        An epoch uses every example exactly once (but see `drop_last`), in an order that depends on
        `(seed, epoch)` alone. Each call begins with epoch 0: if you call it once per epoch, pass a
        different `seed` each time. With several devices, a thread loads and places windows ahead.

        Args:
            data: A pytree of arrays with a common leading axis; a map-style dataset
                (`__len__`, `__getitem__`); or an iterable of microbatches, such as a torch
                `DataLoader`. A list of arrays is a pytree; to use one as microbatches, pass
                `iter(list)`. Inside an example or a microbatch that is a dict or a tuple, a
                list of numbers counts as an array.
            batch_size: Examples per microbatch, at least 1. None for an iterable, whose
                microbatches are used as they are.
            epochs: Number of epochs, at least 1; None for no end.
            seed: Seed of the order, 0 to 2**64 - 1.
            shuffle: False keeps the order of the data. An iterable is never shuffled; unless
                `epochs` is 1, its method `set_epoch(epoch)`, if any, is called before each epoch.
            drop_last: Leave out the examples that do not fill a microbatch. False uses
                them, with their exact weight; the loss must then be a vector, or `mask_key`
                must be given.
            mask_key: Adds the mask of valid examples, `(batch_size,)` bool, to every
                microbatch (a dict) under this name. A scalar loss is then taken as the
                mean over the valid examples.
            placement: `"stream"` sends each window's examples; `"resident"` keeps the
                data (a pytree of arrays) on every device; `"auto"` decides by the free
                memory.
            window_bytes: Limit in bytes of the streamed data of one program call on a
                device; larger windows are split into several calls.
            cursor: Where to resume, `window.cursor` of an earlier run. None for the start
                of the data; the numbering of windows then continues from the previous ones.

        Returns:
            An iterator of `Window`, also a context manager. Windows may still be trained
            after it has ended, but are no longer timed: neither the cadence nor `records`
            see them.

        Raises:
            RuntimeError: `init` was not called before.
            ValueError: Empty data, leaves of different length, a batch size larger than
                the data, a placement that the data cannot have, a cursor beyond the epochs;
                processes that pass different data, or whose `loss_fn` reports different
                metrics; a float64 state, if `jax_enable_x64` has been switched off since `init`.
            TypeError: `data` has an unsupported form or is not numeric; `loss_fn` does not
                return a supported form.
        """
        with self._calls("windows"):
            if self._initial is None:
                raise RuntimeError(
                    "TrainStep.windows: init must be called first, so that shapes are known."
                )
            # before the data are opened: two resident copies need not fit a device's memory
            self.settle()
            plan = self._loading.open(
                "windows", data, batch_size, mask_key=mask_key, placement=placement,
                window_bytes=window_bytes, epochs=epochs, seed=seed, shuffle=shuffle,
                drop_last=drop_last,
            )  # fmt: skip
            start = plan.start(cursor, self._scheduler.next_window)
            check_same_data(self.fleet.job, plan, start)
            runner = self._runners.get(self._initial, plan)
            feed = self._loading.feed(plan, runner, self._scheduler.cadence)
            pipeline = Training(
                feed, self._scheduler, start, self._watch, runner, self._cache, self._options,
                self._timing, self._divergence,
            )  # fmt: skip
            self._last_pipeline = pipeline
            self._scheduler.on_start(names_of(self.devices), start.window, *self._bytes)
            run = Run()
            self._pipelines[run] = pipeline
            return Windows(pipeline, run)

    def __call__(
        self, state: TrainState, window: Window
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Train one window.

        Returns as soon as the programs are dispatched. With an exchange on the host it returns
        when the window's average is known, unless devices run ahead.

        Args:
            state: The state. Its buffers are donated: use the returned state. To keep a
                leaf, or to use it in another state too, copy it: `leaf.copy()`.
            window: A window of this training step.

        Returns:
            The new state and the window's metrics, scalars: `loss` and the `aux` of `loss_fn` as
            weighted means, `weight` (its sum), `finite`, and `loss_scale` if it is dynamic. Local
            steps (`averaging`) add `workers` (1 / the sum of squared shares), `exchange_bytes` (per
            device), and per device `distance`, `update_norm`, `cosine`, `share`. Reading a metric
            waits for the window; reading it one window later does not. With `delay=k` the metrics
            are those of `k` windows before; if devices run ahead, those of the last window
            averaged; NaN before the first. If all weights are 0, the means are NaN.

        Raises:
            TypeError: `state` or `window` has the wrong type.
            ValueError: A leaf of `state` was donated to an earlier call or occurs twice, or
                the state is of a different model; `window` belongs to a different training step.
            NonFiniteError: An earlier window's gradient was not finite; this one is not trained.
            ProcessLostError: Another process of the job has ended, and the job cannot go on.
        """
        with self._calls("train"):
            pipeline = self.pipeline_of(window, "train")
            self.check_state(state, "train")
            trained = pipeline.train(state, window)
            pipeline.check_emulation()
            return trained

    def pipeline_of(self, window: Window, where: str) -> Training:
        """Return the pipeline that runs a window.

        Args:
            window: A window of this training step.
            where: The function the user called, for messages.

        Raises:
            TypeError: `window` is not a `Window`.
            ValueError: It belongs to a different training step.
        """
        check.instance(where, "window", window, Window, "come from TrainStep.windows", brief=True)
        pipeline = self._pipelines.get(window.run)
        if pipeline is None:
            rule, got = "come from this training step's windows", "a window of another step"
            raise ValueError(check.message(where, "window", rule, got))
        return pipeline

    def whole(self, state: TrainState, window: Window) -> TrainState:
        """Wait until all windows dispatched so far have a mean; return the state after them.

        The state differs from `state` only if devices run ahead of an exchange on the host and a
        process of the job has ended: windows that lacked their mean have then run again. In a job
        of several processes, all must call it.

        Args:
            state: The state that the last window returned; its buffers may be donated.
            window: That window.

        Returns:
            The state to go on with; `state` itself unless windows have run again.

        Raises:
            TypeError, ValueError: As when the training step is called.
            ProcessLostError: If these windows cannot run again.
        """
        with self._calls("TrainStep.whole"):
            pipeline = self.pipeline_of(window, "TrainStep.whole")
            self.check_state(state, "TrainStep.whole")
            return pipeline.train(state, None)[0]

    def average(self, state: TrainState) -> PyTree:
        """Return one set of parameters, even if the devices' copies differ.

        If all copies are equal, as in gradient mode, it is `unreplicate(state.params)`. They
        differ with `DiLoCo(fragments=...)`, `delay=k` or devices that run ahead: arrays are
        then averaged, weighted by the steps since their last exchange; an exponent that follows a
        schedule is that of the last window that can have been exchanged, or 1 if that is not
        finite. All devices take part, including late ones. In a job of several processes, all must
        call it.

        Args:
            state: A state of this training step; it is not donated.

        Returns:
            Parameters, leaves of one device's shape.

        Raises:
            TypeError: `state` is not a training state on the devices.
            ValueError: A leaf was donated to an earlier call.
        """
        with self._calls("TrainStep.average"):
            self.check_state(state, "TrainStep.average")
            averaging = self._options.averaging
            if averaging is None or self._initial is None:
                return unreplicate(state.params)
            if self._average is None:
                self._average = parameter_averager(self.fleet, averaging, self._initial.selection)
            return unreplicate(self._average(state))

    def common(self, state: TrainState) -> TrainState:
        """Return the part of a state that is equal on all devices; the rest is None or left out.

        In gradient mode it is the whole state; with `averaging` devices may have their own
        optimizer states, parameters or model states.

        Args:
            state: A state of the model that `init` was called with last, or its shapes.
        """
        return state if self._initial is None else self._runners.rule(self._initial).common(state)

    def adopt(self, state: TrainState, join: bool) -> TrainState:
        """Adapt a restored state to this run, see `elche_jax.train.resume`.

        Args:
            state: Host arrays, leaves `(old world size, ...)`.
            join: Whether to join it into one device's state.
        """
        assert self._initial is not None  # restoring needs a state of `init` to compare with
        spec = self._initial.selection, self._initial.merge
        if join:
            state = join_devices(state, self._options.averaging, *spec)
        return adopt(state, self._options, *spec)

    @property
    def timeline(self) -> Recorder | None:
        """The recorder of the run, or None."""
        return self._options.timeline

    def check_state(self, state: TrainState, where: str, like: TrainState | None = None) -> None:
        """Check that a state is on the devices, and that its buffers were not donated.

        Args:
            state: The state.
            where: The function the user called, for messages.
            like: Shapes that it must have; None if a program will check them.

        Raises:
            TypeError, ValueError: As when the training step is called.
        """
        check_buffers(state, where)
        size = self.fleet.world_size
        if state.step.shape != (size,):
            raise ValueError(
                f"{where}: state must be replicated over the {size} devices of this "
                f"training step, got leaves stacked as {state.step.shape}. Use init, or "
                "replicate(state, train.devices)."
            )
        if like is not None and (text := other_shapes(where, state, like)):
            raise ValueError(text)

    def run_to_dict(self, state: TrainState | None = None) -> dict[str, Any]:
        """Return all of the run but the state, as plain numbers; all processes must call it.

        It waits for the windows in flight, as their measurements are part of it. It holds, among
        others, the cadence's state, `counts_history` (under `"counts"`, as an array
        `(windows, world_size)`), the number of the next window, `divergence`, `skipped`,
        `left_out`, and the last window's metrics that the next one reports.

        Args:
            state: The state that is saved with it. With an exchange on the host and means that are
                applied late, the windows pending in it are added under `"pending"`, with a list of
                arrays. In a job of several processes only the first one gets the arrays: restore
                its dict in all.

        Raises:
            TypeError, ValueError: As when the training step is called.
            NonFiniteError, ReplicaMismatch: Raised by a window in flight.
        """
        if state is not None:
            self.check_state(state, "TrainStep.run_to_dict")
        if self._last_pipeline is not None:
            self._last_pipeline.settle()
        pending = None if state is None else self._runners.pending(state)
        job = self.fleet.job
        known = run_to_dict(job, self._scheduler, self._watch, self._divergence)
        known |= {"unreported": rows_to_dict(job, self._runners.unreported)}
        return known if pending is None else known | {"pending": pending}

    def restore_run(self, saved: Mapping[str, Any], state: TrainState | None = None) -> None:
        """Restore a run from the dict of `run_to_dict`; all processes must call it after `init`.

        On different devices the cadence begins with the speeds known for them; with a different
        cadence, measurements start over. A log line says so.

        Args:
            saved: The dict; anything else raises a `TypeError` or a `ValueError`.
            state: The restored state, with which training continues. Needed only if windows were
                pending on the host in it.

        Raises:
            TypeError, ValueError: `state` is not a training state on the devices, or the processes
                of a job pass different pending windows.
        """
        if state is not None:
            self.check_state(state, "TrainStep.restore_run")
        self._runners.unreported, pending = restore_run(
            saved, self.fleet.job, self._scheduler, self._watch, self._divergence
        )
        self._runners.restore_pending(state, pending)

    def report(self) -> RunReport:
        """Return the speeds, counts, busy shares and compiles so far."""
        return make_report(
            self.records, names_of(self.devices), self.counts, vars(self._cache.stats),
            self.skipped, *self._bytes,
        )  # fmt: skip

    def settle(self) -> None:
        """Drop the last run and its data, as `windows` does, and `init` if that run is closed.

        Raises:
            NonFiniteError, ReplicaMismatch: For a window of that run, if the loop left early
                and has not seen the error.
        """
        last, self._last_pipeline = self._last_pipeline, None
        if last is not None:
            last.settle()
