"""Runs windows with an exchange on the host, with separate programs for each device.

A device's programs start as soon as that device is free, independently of the others, so a fast
device never waits unless the limits require it.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from elche_jax._processes import ExchangeLost
from elche_jax.engine.accumulators import zeros
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import Payload
from elche_jax.engine.host.average import HostAverage
from elche_jax.engine.host.compiled import Programs
from elche_jax.engine.host.coordinator import (
    Coordinator,
    Done,
    Failed,
    Learned,
    OpenWindow,
    Outcome,
)
from elche_jax.engine.host.exchange import LiveExchange
from elche_jax.engine.host.limits import Counts, Limits
from elche_jax.engine.host.pending import arrays_of, pending_windows, resume, windows_of
from elche_jax.engine.host.program import Delivery, HostProgram
from elche_jax.engine.host.session import Begun, Session
from elche_jax.engine.lane import Fleet
from elche_jax.engine.laned import StackedArray, entries_of
from elche_jax.engine.loop import Seconds
from elche_jax.engine.reduce import Mean
from elche_jax.engine.replicas import is_stacked, replicate
from elche_jax.engine.rule import Ended
from elche_jax.engine.runner import Call, Launch, Program, WindowRunner
from elche_jax.engine.shapes import one_of
from elche_jax.engine.state import (
    AveragingState,
    PendingUpdate,
    TrainState,
    no_update,
    with_averaging,
)
from elche_jax.engine.timing import Clock

PyTree = Any


class HostRunner(WindowRunner):
    """Compiles and launches the programs of every device.

    Args:
        program: The functions of a window.
        fleet: The devices.
        cache: Compiled programs.
        state: Shapes of the stacked state.
        limits: How long to wait for devices, and how far they may run ahead.
        seconds: Emulated durations; or None.
    """

    def __init__(
        self,
        program: HostProgram,
        fleet: Fleet,
        cache: CompileCache,
        state: TrainState,
        limits: Limits,
        seconds: Seconds | None,
    ):
        super().__init__(fleet, cache, state, program.rule)
        self.limits, self._seconds = limits, seconds
        if seconds is not None and not fleet.job.one_process:  # it takes ranks of the job
            ranks = fleet.job.ranks
            self._seconds = lambda step, at, count: seconds(step, ranks[at], count)
        selection = program.rule.work.selection
        self._split, self._join = selection.split, selection.join
        self._compiled = Programs(program, fleet, cache, state, limits, self._number)
        self._averaging = HostAverage(
            program.rule.reduction(one_of(state)),
            None if fleet.job.one_process else fleet.job,
        )
        self._locals: list[PyTree] = []
        self._left: Session | None = None
        self._live: Callable[[], LiveExchange | None] = lambda: None
        # False and True on every device, never donated
        bools = [np.zeros(1, bool), np.ones(1, bool)]
        self._flags = [jax.device_put(bools, device) for device in fleet.devices]

    def watch(
        self, done: Done, learned: Learned, failed: Failed, limits: Limits | None = None
    ) -> LiveExchange:
        """Start the exchange of a run; its threads end when it is closed."""
        limits = limits or self.limits
        coordinator = Coordinator(self.fleet.world_size, limits, done, learned, failed)
        return LiveExchange(coordinator, self._averaging, self._seconds, self._keep)

    def pending(self, state: TrainState) -> dict[str, Any] | None:
        """Return the windows pending in a state; empty if there are none, None if unknown.

        They are unknown if one of them has no mean, as a process of the job has ended. In a job of
        several processes all must call it, and only the first gets the arrays.
        """
        exchange, session, more = self._live(), self._left, []
        if exchange is not None and exchange.session is not None:
            session, more = exchange.session, exchange.coordinator.settled()
        if session is None or session.state() is not state or not session.begun:
            return {}
        nothing, known = partial(self._nothing, session), dict([*session.due, *more])
        found = pending_windows(session, known, self.fleet, nothing)
        if found is None:
            return None
        arrays = arrays_of(found, nothing(0), self.fleet.job)
        return self._described(session) | {"windows": len(found.windows), "arrays": arrays}

    def restore_pending(self, state: TrainState, saved: Mapping[str, Any]) -> bool:
        """Continue with pending windows from a state; return whether they fit this run."""
        if not self.limits.ahead:
            return False
        session, windows, arrays = self._begin(state), saved["windows"], saved["arrays"]
        alike = saved.items() >= self._described(session).items()
        found = None
        if alike and 0 < windows <= len(arrays):
            found = windows_of(arrays, self._compiled.pending_like(windows))
        if found is None:
            return False
        resume(session, found, self.fleet)
        session.state = weakref.ref(state)
        self._keep(session, list(session.due))
        return True

    def _described(self, session: Session) -> dict[str, Any]:
        """Return what must be the same when pending windows are saved and restored."""
        return {
            "step": session.step,
            "metrics": sorted(self._compiled.no_metrics),
            "merge": list(self._rule.merge_rules.rules),
        }

    @property
    def runs_ahead(self) -> bool:
        """See `FleetRunner.runs_ahead`."""
        return self.limits.ahead and not self.fleet.job.one_process

    def begin(self, calls: Sequence[Call]) -> None:
        """See `FleetRunner.begin`."""
        programs = [self._programs(call.payload) for call in calls]
        for part in self._compiled.parts:
            programs.append(self._compiled.delivering(part))
            # devices that run ahead may need any of these numbers in the middle of a run
            for later in self._compiled.laters():
                programs.append(self._compiled.applying(part, later))
        self._compiled.compile(programs)
        self._locals = self._local_steps()
        self.begun = True

    def run(
        self, state: TrainState, calls: Sequence[Call], launch: Launch, fused: bool = False
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """Run a window.

        This waits for the average of the window. If devices run ahead, it waits only as long as
        the limits require, and applies the averages that have arrived by then (see
        `_apply_before`). The metrics are then those of the window averaged last, and the token
        says whether that window was finite.
        """
        if isinstance(launch.watch, LiveExchange):
            self._live = weakref.ref(launch.watch)
            return self._run(launch.watch, state, calls, launch)
        alone = self.watch(_ignore, _ignore, _ignore, replace(self.limits, ahead=False))
        try:  # the run of this window is closed
            return self._run(alone, state, calls, launch)
        finally:
            alone.close()

    def release(self) -> None:
        """Free the memory of the devices' carries."""
        self._locals, self._left = [], None

    def __len__(self) -> int:
        return self.fleet.world_size

    # -- one window ------------------------------------------------------------------

    def _run(
        self, exchange: LiveExchange, state: TrainState, calls: Sequence[Call], launch: Launch
    ) -> tuple[TrainState, dict[str, Any], Any]:
        coordinator, session = exchange.coordinator, self._session_of(exchange, state)
        known = session is not None
        # a state that this run did not return cannot get this window's average later
        ahead = coordinator.limits.ahead and (known or not exchange.used)
        session = session or self._begin(state)
        counts = tuple(sum(call.ranges[r].count for call in calls) for r in range(len(self)))
        exchange.session = session  # kept, in case the wait for room is interrupted
        # a device that is back has the state of the others at the last window, see `_restore`
        absent = coordinator.admit(counts)
        if session.begun:  # a Ctrl-C would lose these windows: from here it waits for this one
            launch.hold()
        exchange.session = None  # after an exception below, the next call starts a new session
        try:
            session.absent = set(absent)
            # with a delay, averages are applied exactly that late (below), so every run is the same
            if self.limits.delay is None:
                self._apply_before(session, coordinator, launch.counts)
            # after that, which may wait for another process: no device works for the window then
            at, absent = time.perf_counter(), frozenset(session.absent)
            step, survey = session.step, launch.survey
            window = OpenWindow(launch.number, at, counts, step, absent, ahead, survey)
            reports = self._rule.reports(session.parts[session.present[0]])
            reports = {name: value[0] for name, value in reports.items()}
            # the order matters: known averages go into the state before its next window
            deliveries = self._dispatch(session, window, calls, launch, catch_up=not known)
            exchange.launch(window, deliveries)
            self._apply_after(session, coordinator, window, known)
            new = self._whole(session, state)
        except BaseException as error:
            self._locals = []
            coordinator.abandon(launch.number)
            if isinstance(error, ExchangeLost) and ahead:  # to take the windows back from here
                session.state, exchange.session = weakref.ref(state), session
            raise
        launch.hold()
        session.state = weakref.ref(new)
        exchange.session = session
        # no program donates the state, so it is freed here
        if not session.absent:  # with absent devices, the new state shares arrays with the old
            for leaf in jax.tree.leaves(self._compiled.thin(state)):
                leaf.delete()
        metrics = jax.device_put(session.metrics, self.fleet.devices[session.present[0]])
        metrics |= reports
        return new, metrics, metrics["finite"]

    def _session_of(self, exchange: LiveExchange, state: TrainState) -> Session | None:
        """Return the session, of this run or an earlier one, that returned a state, if any."""
        session = exchange.session
        if session is None:
            session, self._left = self._left, None
        return session if session is not None and session.state() is state else None

    def take_back(self, state: TrainState, clock: Clock, windows: int) -> TrainState | None:
        """See `WindowRunner.take_back`."""
        assert isinstance(clock, LiveExchange)
        session, clock.session = clock.session, None
        first = clock.coordinator.take_back()
        if session is None or first is None or session.state() is not state:
            return None if windows else state  # the next window begins a new session
        while session.begun and session.begun[0].number < first:
            self._apply_next(session, clock.coordinator)
        lost = session.begun
        # steps of an earlier run went with a lost delivery; the state before has none
        if len(lost) < windows or any(one.carries for one in lost):
            return None
        for rank in session.absent:  # it lacks the earlier means
            self._restore(session, rank)
        state = self.put_back(self._whole(session, state), lost)
        new = self._begin(state)
        new.metrics, new.state = session.metrics, weakref.ref(state)
        for rank, flags in enumerate(zip(session.finite, *(o.finite for o in lost), strict=True)):
            new.finite[rank] = self._flags[rank][all(np.asarray(flag)[0] for flag in flags)]
        clock.session = new
        return state

    def _keep(self, session: Session, closed: list[tuple[int, Outcome]]) -> None:
        """Keep a session of an earlier run for the next run, as long as its state is alive."""
        state = session.state()
        if state is None:
            return
        runner = weakref.ref(self)  # the session must not keep the runner alive

        def forget(_: Any) -> None:
            owner = runner()
            if owner is not None:
                owner._left = None

        # numbers that do not collide: the next run counts from 1
        session.begun = [replace(one, number=-i) for i, one in enumerate(session.begun)]
        session.due = deque((-i, outcome) for i, (_, outcome) in enumerate(closed))
        session.state, self._left = weakref.ref(state, forget), session

    def _begin(self, state: TrainState) -> Session:
        """Begin a new session; work that was never averaged goes with the next delivery."""
        # with lanes, one device may hold a value for all
        state = self.fleet.restack(jax.tree.map(self._on_devices, state))
        ranks = range(len(self))
        thin, frozen = self._compiled.thin(state), (self._split(state.params)[1], state.key)
        parts = [entries_of(thin, rank) for rank in ranks]
        step = None
        while step is None:  # from the first device that is ready, as one of them may hang
            step = next((part.step for part in parts if part.step.is_ready()), None)
            time.sleep(0 if step is not None else 1e-3)
        finite = [self._flags[rank][True] for rank in ranks]
        rest = [entries_of(frozen, rank) for rank in ranks]
        return Session(parts, rest, int(np.asarray(step)[0]), finite, self._compiled.no_metrics)

    def _dispatch(
        self, session: Session, window: OpenWindow, calls: Sequence[Call], launch: Launch,
        catch_up: bool,
    ) -> list[Delivery | None]:  # fmt: skip
        """Dispatch a window on the devices and return its deliveries."""
        locals_, self._locals = self._local_steps(), []
        ranks = session.present
        reads = {rank: self._rule.reads(self._full(session, rank)) for rank in ranks}
        for call in calls:
            programs = self._compiled.get(self._programs(call.payload))
            for rank in ranks:
                call_args = entries_of(call.call_args, rank)
                payload = entries_of(call.payload, rank)
                (locals_[rank], _), _ = programs[rank](
                    reads[rank], locals_[rank], payload, call_args
                )
        deliveries: list[Delivery | None] = [None] * len(self)
        pending: list[PendingUpdate | None] = [None] * len(self)
        part, before = session.step % len(self._compiled.parts), list(session.parts)
        told, carries = list(session.finite), catch_up and self._carry_steps(before)
        programs = self._compiled.get(self._compiled.delivering(part))
        for rank in ranks:
            flag, finite = self._flags[rank][catch_up], session.finite[rank]
            (state, done, delivery), _ = programs[rank](before[rank], locals_[rank], flag, finite)
            session.parts[rank], pending[rank], deliveries[rank] = state, done, delivery
            session.finite[rank] = self._flags[rank][True]
        self._locals = locals_
        before = [] if self.limits.ahead else before
        begun = Begun(
            window.number, launch.counts, launch.examples, part, pending, before, told, carries
        )
        session.begun.append(begun)
        session.step += 1
        return deliveries

    def _carry_steps(self, parts: Sequence[TrainState]) -> bool:
        """Return whether a device may have local steps that are in no mean."""
        if not self.runs_ahead:  # it matters only if lost windows run again
            return False
        kept = [part.averaging for part in parts if part.averaging is not None]
        steps = jax.tree.leaves([one.steps for one in kept])
        deadline = time.monotonic() + self.limits.timeout_s
        while not all(leaf.is_ready() for leaf in steps):
            if time.monotonic() > deadline:  # a device hangs
                return True
            time.sleep(1e-3)
        return any(bool(np.asarray(leaf).any()) for leaf in steps)

    def _apply_before(self, session: Session, coordinator: Coordinator, counts: Counts) -> None:
        """Apply averages before a window with these counts begins.

        In one process, these are all known averages. The processes of a job learn averages at
        different times, so each applies only those without which the window would begin too far
        ahead.
        """
        if self.fleet.job.one_process:
            due, session.due = session.due, deque()
            self._apply_closed(session, [*due, *coordinator.closed()])
            return
        while self.limits.too_far([window.counts for window in session.begun], counts):
            self._apply_next(session, coordinator)

    def _apply_after(
        self, session: Session, coordinator: Coordinator, window: OpenWindow, known: bool
    ) -> None:
        """Apply the averages that are due once a window is dispatched.

        With a delay, that is the average of the window that many windows before. Without one, it is
        the window's own average, or none if devices run ahead. A session that has just begun (not
        `known`) has no windows before: its first average is due at once unless devices run ahead.
        """
        if not window.ahead:
            outcome = coordinator.outcome(window.number)
            session.absent.update(outcome.missing)
            session.due.append((window.number, outcome))
            # if the run is closed, windows before this one may still be pending
            later = self.limits.delay or 0 if known else 0
            while len(session.begun) > later:
                self._apply_next(session, coordinator)
            coordinator.applied(window.number, self._await_applied(session, outcome))
        while self.limits.delay is not None and len(session.begun) > self.limits.delay:
            self._apply_next(session, coordinator)
        for rank in session.absent:
            self._restore(session, rank)

    def _apply_next(self, session: Session, coordinator: Coordinator) -> None:
        """Wait for the oldest average that is not applied yet, and apply it."""
        due = session.due.popleft() if session.due else coordinator.next_closed()
        self._apply_closed(session, [due])

    def _apply_closed(self, session: Session, closed: list[tuple[int, Outcome]]) -> None:
        """Apply averages on the devices, in the order of the windows."""
        for number, outcome in closed:
            if not session.begun or session.begun[0].number != number:
                continue  # a window before this session, included in a later delivery
            done, *session.begun = session.begun
            ranks = session.present
            devices = [self.fleet.devices[rank] for rank in ranks]
            mean = jax.tree.map(lambda leaf: np.asarray(leaf)[None], outcome.average.mean)
            copies = jax.device_put([mean] * len(ranks), devices)
            for rank, copy in zip(ranks, copies, strict=True):
                self._apply_one(session, rank, copy, done)
            session.metrics = outcome.average.metrics

    def _apply_one(self, session: Session, rank: int, mean: Mean, done: Begun) -> None:
        state, finite = session.parts[rank], session.finite[rank]
        before = state if self.limits.ahead else done.before[rank]
        own = done.pending[rank] or self._nothing(session, rank)
        own = replace(own, progress=[])
        pending = [window.pending[rank] for window in session.begun]
        later = [update for update in pending if update is not None]
        apply = self._compiled.get(self._compiled.applying(done.part, len(later)))[rank]
        ended = Ended(before, state, own, done.part, later)
        (state, finite), _ = apply(ended, mean, finite)
        session.parts[rank], session.finite[rank] = state, finite

    def _nothing(self, session: Session, rank: int) -> PendingUpdate:
        """Return the update of a device for a window in which it got no programs."""
        rule, changes = self._rule, []
        if rule.late:
            now = rule.merge.of_sent(session.parts[rank].model_state)
            changes = rule.merge_rules.unchanged(now)
        update = no_update(self._compiled.pending, changes)
        return jax.device_put(update, self.fleet.devices[rank])

    def _restore(self, session: Session, rank: int) -> None:
        """Give a late device the last common state of the others, without waiting for it.

        The state is then complete for any reader, and the device can continue when it is back.
        """
        rule, own = self._rule.thin, session.parts[rank]
        healthy = rule.agreed(session.parts[session.present[0]])
        sent = rule.merge.of_sent(healthy.model_state)
        kept: AveragingState | None = healthy.averaging
        if kept is not None:  # no steps since the last mean, and no rounding errors
            steps, error = jax.tree.map(zeros, (kept.steps, kept.error))
            kept = kept.replace(steps=steps, error=error)
        state = healthy.replace(opt_state=None, model_state=None, averaging=kept)
        device = self.fleet.devices[rank]
        state, sent = jax.device_put((state, sent), device)
        kept_apart = (own.opt_state, own.model_state)  # on a hung device these are never ready
        there = all(leaf.is_ready() for leaf in jax.tree.leaves(kept_apart))
        if not there or not rule.apart:
            kept_apart = jax.device_put((healthy.opt_state, healthy.model_state), device)
        opt_state, model_state = kept_apart
        model_state = rule.merge.with_sent(model_state, sent)
        session.parts[rank] = state.replace(opt_state=opt_state, model_state=model_state)
        session.finite[rank] = self._flags[rank][True]
        for window in session.begun:
            window.pending[rank] = self._nothing(session, rank)

    def _await_applied(self, session: Session, outcome: Outcome) -> list[float]:
        """Wait until all devices, except late ones, have applied the average; return when."""
        ends = {}
        for rank in session.present:
            outcome.average.metrics["finite"] &= np.asarray(session.finite[rank])[0]
            ends[rank] = time.perf_counter()
            session.finite[rank] = self._flags[rank][True]  # it was read above
        last = max(ends.values())
        return [ends.get(rank, last) for rank in range(len(self))]

    # -- states: whole, and what the programs of a device take of them ----------------

    def _full(self, session: Session, rank: int) -> TrainState:
        part, (frozen, key) = session.parts[rank], session.frozen[rank]
        return part.replace(params=self._join(part.params, frozen), key=key)

    def _whole(self, session: Session, state: TrainState) -> TrainState:
        """Stack the new state, with the frozen parameters and the key of the old one."""
        new: TrainState = jax.tree.map(lambda *rows: self.fleet.stack(rows), *session.parts)
        frozen = jax.tree.map(self._on_devices, (self._split(state.params)[1], state.key))
        if state.averaging is not None:
            new = with_averaging(new, pending=state.averaging.pending)
        return new.replace(params=self._join(new.params, frozen[0]), key=frozen[1])

    def _on_devices(self, leaf: StackedArray) -> StackedArray:
        """Shard a leaf over the devices if it was assembled on one."""
        return leaf if is_stacked(leaf) else self.fleet.put(np.asarray(leaf))

    def _local_steps(self) -> list[PyTree]:
        """Return the devices' carries: those of the last window, or zeros."""
        none = jax.tree.map(zeros, self._compiled.local)
        return self._locals or [replicate(none, [device]) for device in self.fleet.devices]

    def _programs(self, payload: Payload) -> list[Program]:
        return self._compiled.accumulating(payload)


def _ignore(*_: Any) -> None:
    """Ignore the report of a window whose run was closed."""
