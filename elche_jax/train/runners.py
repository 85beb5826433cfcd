"""The runners of a training step: one for each kind of state, loss and data."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax

from elche_jax._log import logger
from elche_jax.engine.bits import wide_dtype
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.gradient import GradientRule
from elche_jax.engine.host.program import HostProgram
from elche_jax.engine.host.runner import HostRunner
from elche_jax.engine.lane import Fleet, Lanes
from elche_jax.engine.lanes.program import LanesProgram
from elche_jax.engine.lanes.runner import LanesRunner
from elche_jax.engine.local import LocalRule
from elche_jax.engine.loss import LossFn, inspect_loss
from elche_jax.engine.microbatch import Microbatches
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.rule import Ended, Rule
from elche_jax.engine.runner import Runner, WindowRunner
from elche_jax.engine.shapes import signature
from elche_jax.engine.state import TrainState
from elche_jax.train.initial import StateSpec, check_buffers, check_digits
from elche_jax.train.microbatch_split import Splitter
from elche_jax.train.options import Options
from elche_jax.train.spec import DataPlan
from elche_jax.train.split_check import LossCall

PyTree = Any

KEEPERS = (Runner, LanesRunner)
"""Runners that keep sums on the devices between windows."""


class Runners:
    """Makes runners, and keeps them for later calls of `windows`.

    Args:
        loss_fn: The user's loss.
        optimizer: The optax optimizer.
        fleet: The devices.
        options: The options of the training step.
        cache: Compiled programs.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        fleet: Fleet,
        options: Options,
        cache: CompileCache,
    ):
        self._loss_fn, self._optimizer, self._fleet = loss_fn, optimizer, fleet
        self._options, self._cache = options, cache
        self._splitter = Splitter(fleet, options.split)
        self._runners: dict[Any, WindowRunner] = {}
        self._used: WindowRunner | None = None
        self._unreported: PyTree = None
        self._restored: tuple[TrainState, Mapping[str, Any]] | None = None

    def begin(self, params: PyTree, model_state: PyTree) -> None:
        """Begin a run from these values, see `Splitter.begin`."""
        self._splitter.begin(params, model_state)

    def release(self) -> None:
        """Free what the runners keep on the devices."""
        self._unreported = self._restored = None
        for runner in self._runners.values():
            runner.release()

    @property
    def unreported(self) -> PyTree:
        """Metrics of the last window that the next one reports, see `Accumulators.unreported`."""
        used = self._used
        return used.sums.unreported if isinstance(used, KEEPERS) else self._unreported

    @unreported.setter
    def unreported(self, rows: PyTree) -> None:
        self._used, self._unreported = None, rows

    def pending(self, state: TrainState) -> Mapping[str, Any] | None:
        """Return the windows pending on the host in a state, see `HostRunner.pending`."""
        if self._restored is not None and self._restored[0] is state:
            return self._restored[1]
        hosts = [one for one in self._runners.values() if isinstance(one, HostRunner)]
        found = next((one for host in hosts if (one := host.pending(state)) != {}), {})
        if found is None:
            self._say(
                "elche: windows that are pending on the host have no mean, as a process of the job "
                "has ended, and are not saved. Call TrainStep.whole before."
            )
        return found

    def restore_pending(self, state: TrainState | None, saved: Mapping[str, Any] | None) -> None:
        """Continue with windows that were pending on the host from a state.

        Args:
            state: The state; None if it is not known.
            saved: What `pending` returned; None if it is not known.

        Raises:
            ValueError: The processes of a job pass different windows.
        """
        shapes = saved and [array.shape for array in saved["arrays"]]
        self._fleet.job.check_same("TrainStep.restore_run", pending=shapes)
        # held until `windows` makes the runner, which then lets go of it
        self._restored = (state, saved) if state is not None and saved else None
        late = self._options.late and self._options.exchange is not None
        if self._restored is None and (saved or (saved is None and late)):
            self._say(
                "elche: windows that were pending on the host when this run was saved are not "
                "known, so the parameters will not be those of an uninterrupted run.%s",
                " Pass the state to run_to_dict and restore_run." if state is None else "",
            )

    def _say(self, text: str, *args: Any) -> None:
        (logger.warning if self._fleet.job.at == 0 else logger.debug)(text, *args)

    def get(self, initial: StateSpec, plan: DataPlan) -> WindowRunner:
        """Return the runner for a state and data of these shapes.

        Raises:
            TypeError: `loss_fn` does not return one of the supported forms.
            ValueError: A dtype of the state is not enabled in JAX; the loss cannot exclude the
                missing examples of a smaller microbatch; microbatches cannot run in parts as
                `microbatch_split` says; or the metrics differ between processes.
        """
        options, shapes, impl = self._options, initial.shapes, initial.key_impl
        check_digits(shapes)
        has_model_state = shapes.model_state is not None
        loss_fn = replace(self._loss_fn, has_model_state=has_model_state, mask_key=plan.mask_key)
        one = initial.one
        key = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), one.key)
        cast = options.precision.cast
        params, batch = jax.eval_shape(cast, (one.params, plan.microbatch))
        with plan.noting_list():
            form = inspect_loss(loss_fn, params, one.model_state, batch, key)
        if form.form != "vector" and plan.mask_key is None and plan.ragged:
            raise ValueError(
                "windows: with drop_last=False the loss must be a vector of per-example "
                f"losses or take a mask (mask_key), got a {form.form} loss. Return one "
                "loss per example, pass mask_key='mask', or drop_last=True."
            )
        for reserved in options.reserved:
            reserved.check(form.aux)
        names = tuple(sorted(form.aux))
        # their sums are exchanged
        self._fleet.job.check_same("windows", **{"metrics of loss_fn": list(names)})
        # the function itself is not in the key: it is always the same, and may be unhashable
        kind = (
            plan.mask_key, has_model_state, impl, form.form, names, signature(shapes),
            initial.selection, initial.merge,
        )  # fmt: skip
        work = Microbatches(loss_fn, form.form, names, impl, initial.selection, options.precision)
        call = LossCall(work, form, params, one.model_state, batch, key)
        rule = partial(self.rule, initial, work)
        kind += (splits := self._splitter.of_lanes(call, kind, rule, one, plan),)
        if kind not in self._runners:
            self._runners[kind] = self._make(rule(), splits, initial)
        runner = self._runners[kind]
        if runner is not self._used:
            self._pass_unreported(runner)
        self._used = runner
        self._pass_pending(runner)
        return runner

    def _pass_unreported(self, runner: WindowRunner) -> None:
        """Pass the previous runner's unreported metrics to the next, if it has the same metrics."""
        rows, taken = self.unreported, None
        self._unreported = None
        if isinstance(runner, KEEPERS):
            runner.sums.unreported = rows
            taken = runner.sums.unreported
        if rows is not None and jax.tree.structure(taken) != jax.tree.structure(rows):
            logger.warning(
                "train: loss and metrics of the windows that were pending at the stop are not "
                "reported, as this run has one device, other metrics or an exchange on the host."
            )

    def _pass_pending(self, runner: WindowRunner) -> None:
        """Pass restored windows to the runner, if it can continue with them."""
        restored, self._restored = self._restored, None
        if restored is None:
            return
        check_buffers(restored[0], "windows")
        if isinstance(runner, HostRunner) and runner.restore_pending(*restored):
            return
        self._say(
            "elche: windows that were pending on the host when this run was saved do not fit this "
            "run, which has other devices, metrics or options: %s.",
            "their gradients, loss and metrics are dropped"
            if self._options.averaging is None
            else "their steps are kept, but not their loss and metrics",
        )

    def exchanged_bytes(self, initial: StateSpec) -> tuple[int, int]:
        """Return the bytes that each device exchanges per window, and those that freezing saves.

        With fragments, the former is the mean over them.
        """
        if self._fleet.job.world_size == 1:
            return 0, 0
        rule, one = self.rule(initial), initial.one

        def contributions(state: TrainState) -> list[Contribution]:
            carry = rule.zeros(state)
            after, done = rule.finish(state, carry)
            sums = rule.sums_of(carry)
            parts = [Ended(state, after, done, part) for part in range(rule.parts)]
            return [rule.contribute(ended, sums)[0] for ended in parts]

        sent = sum(map(rule.reduction(one).bytes_of, jax.eval_shape(contributions, one)))
        frozen = jax.tree.leaves(initial.selection.split(one.params)[1])
        saved = sum(leaf.size * wide_dtype(leaf).itemsize for leaf in frozen)
        return sent // rule.parts, saved

    def rule(self, initial: StateSpec, work: Microbatches | None = None) -> Rule:
        """Return the rule that combines windows for states of these shapes.

        Args:
            initial: The shapes.
            work: Computes the gradient of a microbatch; None if no gradient is needed.
        """
        options, size = self._options, self._fleet.job.world_size
        trains = work is not None
        if work is None:
            work = Microbatches(self._loss_fn, "scalar", (), "", initial.selection)
        common: Any = {
            "work": work, "tx": self._optimizer, "size": size, "merge": initial.merge,
            "compression": options.rule.compression if size > 1 else None, "late": options.late,
            "pending": options.pending, "max_grad_norm": options.max_grad_norm,
            "device_loss": options.device_loss,
        }  # fmt: skip
        averaging = options.averaging
        if averaging is not None:
            return LocalRule(**common, parts=averaging.fragments, averaging=averaging)
        alone = options.late or options.host is not None or options.rule.compression == "int8"
        alone = alone or isinstance(self._fleet, Lanes)
        drops = options.finite.drops
        rule = GradientRule(**common, drop_nonfinite=drops, packs=size > 1 and not alone)
        # devices of one lane are of one kind
        joins = not alone and trains and self._fleet.devices[0].platform == "cpu"
        return rule.planned(initial.one) if joins else rule

    def _make(self, rule: Rule, splits: tuple[int, ...], initial: StateSpec) -> WindowRunner:
        options, emulate = self._options, self._options.emulate
        where = self._fleet, self._cache, initial.shapes
        if options.host is None and isinstance(self._fleet, Lanes):
            program = LanesProgram(rule, emulate, splits, alike=self._fleet.job.alike)
            return LanesRunner(program, self._fleet, self._cache, initial.shapes)
        rule = rule.in_parts(splits[0])  # all devices are of one kind
        if options.host is None:
            return Runner(CollectiveProgram(rule, emulate), *where)
        # on the CPU, programs with a host callback run one device after the other, so this
        # emulation waits on the host instead, in the device's thread
        seconds = None if emulate is None else emulate.on_host()
        program = HostProgram(rule, emulate if seconds is None else None)
        return HostRunner(program, *where, options.host, seconds)
