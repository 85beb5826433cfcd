"""Runs windows over several lanes, whose contributions meet on one device, the lead."""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

import jax
import numpy as np

from elche_jax._waiting import interruptible
from elche_jax.engine.accumulators import Accumulators
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import Payload
from elche_jax.engine.lane import Lanes
from elche_jax.engine.laned import LateArray, LeadArray, entries_of
from elche_jax.engine.lanes.compiled import Programs
from elche_jax.engine.lanes.drivers import Drivers, LanesClock
from elche_jax.engine.lanes.program import LanesProgram
from elche_jax.engine.lanes.window import LanesWindow, Result, Work
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.runner import Call, Launch, Program, WindowRunner
from elche_jax.engine.shapes import one_of, shapes_of
from elche_jax.engine.state import TrainState
from elche_jax.engine.timing import Done, Failed

PyTree = Any


class LanesRunner(WindowRunner):
    """Compiles and dispatches the programs of every lane.

    If the rule lets devices rest, a lane that has no work for a second window in a row takes no
    part in it. Its contribution to the first such window is used again, and its replicas are
    copies of the lead's, made when they are read or when the lane has work again. Such a window
    costs as much as it would without the lane.

    Attributes:
        sums: The devices' sums.

    Args:
        program: The functions of a window.
        lanes: The devices.
        cache: Compiled programs.
        state: Shapes of the stacked state.
    """

    def __init__(self, program: LanesProgram, lanes: Lanes, cache: CompileCache, state: TrainState):
        super().__init__(lanes, cache, state, program.rule)
        self._lanes = lanes
        one = one_of(state)
        own, held = program.rule.split_lead(one)
        selection = program.rule.work.selection
        self._split, self._join = selection.split, selection.join
        self.sums = Accumulators(program, lanes, own)
        self._compiled = Programs(program, lanes, cache, own, self._thin(own), held, self._number)
        self._step: tuple[Callable[[], Any], int] = (lambda: None), 0
        self._nothing = jax.device_put(np.zeros(1, np.bool_), lanes.devices[0])
        """Ready at any time: a lane at rest has nothing to wait for."""
        self._idle: dict[int, list[Contribution]] = {}
        """By lane, its contributions to a window in which it had no work, on the lead."""
        self._was_led_by = lanes.lead_order[0]
        """Index of the lane that led the last window."""

    def replicated(self, state: TrainState) -> TrainState:
        """Return the part of a state of which all devices hold equal copies."""
        return self._rule.split_lead(super().replicated(state))[0]

    def watch(self, done: Done, learned: Callable[..., None], failed: Failed) -> LanesClock:
        """See `FleetRunner.watch`; no window finishes without a device."""
        return LanesClock(self.fleet.world_size, len(self._lanes.lanes), done, failed)

    def begin(self, calls: Sequence[Call]) -> None:
        """See `FleetRunner.begin`."""
        leads = self._lanes.lead_order
        lead, *others = leads if self._rule.rests and self._lanes.job.one_process else leads[:1]
        programs = [one for call in calls for one in self._programs(call.payload)]
        self._compiled.compile(programs, lead)
        for other in others:
            self._compiled.prepare(other)
        # allocated before the dispatch, as the first window is timed
        self.sums.put(self.sums.take())
        self.begun = True

    def release(self) -> None:
        """See `WindowRunner.release`."""
        self.sums.release()
        self._idle.clear()

    def run(
        self, state: TrainState, calls: Sequence[Call], launch: Launch, fused: bool = False
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """Run a window; return once what the lanes agree on has crossed to all of them."""
        if isinstance(launch.watch, LanesClock):
            return self._run(launch.watch.drivers, state, calls, launch)
        # a window of a run that was closed before
        with closing(Drivers(len(self._lanes.lanes))) as drivers:
            return self._run(drivers, state, calls, launch)

    def _run(
        self, drivers: Drivers, state: TrainState, calls: Sequence[Call], launch: Launch
    ) -> tuple[TrainState, dict[str, Any], Any]:
        lanes, step, carries = self._lanes, self._step_of(state), self.sums.take()
        without_work = self._without_work(calls)
        led_by = self._led_by(without_work)
        resting = without_work & self._idle.keys() - {led_by}
        whole, held = self._rule.split_lead(state)
        thin = self._thin(whole)
        lead = self._lead_of(thin, held, led_by)
        ending = self._compiled.ending(step % len(self._compiled.parts), led_by)
        pending, summed = self._rule.pending > 0, self._compiled.summed
        found = self._begin_resting(resting, launch, led_by)
        working = [at for at in range(len(lanes.lanes)) if at not in resting]
        window = LanesWindow(
            lanes, led_by, ending, pending, summed, lead, launch, drivers, found,
            self._compiled.absent(step % len(self._compiled.parts)),
        )  # fmt: skip
        once = launch.hold()  # in the middle of the window, part of the old state is gone
        try:
            works = [(at, self._work(at, whole, carries, calls)) for at in working]
            parts = [
                drivers.put("lane", at, partial(window.run, at, work), window.fail)
                for at, work in works
            ]
            done, interrupt = _finished(parts, once)
        except BaseException as error:
            window.fail(error)  # the lanes must not wait for each other any more
            # carries that were not donated are as they were before the window
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(carries)):
                self.sums.put(carries)
            raise
        (_, new), _ = window.agreed.result()
        # none for lanes with work: each would take memory for a gradient on the lead
        self._idle = {
            at: [window.found[rank] for rank in lanes.ranks[at]] for at in without_work - {led_by}
        }
        results = self._with_resting(dict(zip(working, done, strict=True)), carries, led_by)
        # free what was not donated
        for leaf in jax.tree.leaves((thin, held)):
            leaf.delete()
        self.sums.put(lanes.join([result.sums for result in results]))
        new = jax.tree.map(lambda row: LeadArray(row, lanes.world_size), new)
        state = self._whole(whole, results)
        state = self._rule.join_lead(state, new)
        self._step = weakref.ref(state.step), step + 1
        if interrupt is not None:
            if not isinstance(launch.watch, LanesClock):
                raise interrupt  # the run was closed: no next window would raise it
            launch.watch.failed(interrupt)  # raised once the loop has the new state
        return state, window.metrics, lanes.join([result.token for result in results])

    def _without_work(self, calls: Sequence[Call]) -> set[int]:
        """Return the lanes that could rest: those without a microbatch."""
        if not self._rule.rests:
            return set()
        busy = {rank for call in calls for rank, own in enumerate(call.ranges) if own.count}
        return {at for at, ranks in enumerate(self._lanes.ranks) if busy.isdisjoint(ranks)}

    def _led_by(self, without_work: set[int]) -> int:
        """Return the index of the lane that leads: the first one that has work.

        It depends only on the counts of the window, so that the bits of the results do, too:
        kinds round differently.
        """
        order = self._lanes.lead_order
        if not self._lanes.job.one_process:  # the other processes would have to know
            return order[0]
        return next((at for at in order if at not in without_work), order[0])

    def _lead_of(self, thin: TrainState, held: PyTree, led_by: int) -> tuple[TrainState, PyTree]:
        """Return the lead's state and what only the lead holds, moving the latter if needed."""
        rank, device = self._lanes.ranks[led_by][0], self._lanes.lanes[led_by].devices[0]
        own, held = entries_of((thin, held), rank)
        # each leaf: the user may have replaced some of them
        if any(leaf.devices() != {device} for leaf in jax.tree.leaves(held)):
            held = jax.device_put(held, device)
        return own, held

    def _begin_resting(
        self, resting: set[int], launch: Launch, led_by: int
    ) -> dict[int, Contribution]:
        """Report lanes at rest to the clock; return their contributions on the lead, by rank."""
        idle = {at: self._idle[at] for at in resting}
        if led_by != self._was_led_by:
            idle = jax.device_put(idle, self._lanes.lanes[led_by].devices[0])
        self._was_led_by = led_by
        found: dict[int, Contribution] = {}
        for at, contributions in idle.items():
            ranks = self._lanes.ranks[at]
            launch(LeadArray(self._nothing, len(ranks)), ranks)
            found.update(zip(ranks, contributions, strict=True))
        return found

    def _work(self, at: int, whole: TrainState, carries: PyTree, calls: Sequence[Call]) -> Work:
        lanes, steps = self._lanes, []
        state = lanes.part(whole, at)
        for call in calls:
            payload, call_args = lanes.part((call.payload, call.call_args), at)
            program = self._compiled.get(self._compiled.accumulating(at, payload))
            steps.append((program, payload, call_args))
        read = self._rule.reads(state)
        return Work(lanes.lanes[at], self._thin(state), read, lanes.part(carries, at), steps)

    def _with_resting(self, done: dict[int, Result], carries: PyTree, led_by: int) -> list[Result]:
        """Return the results of all lanes in order, with copies of the lead's for those at rest."""
        lanes, lead = self._lanes, done[led_by]
        row = lead.token.addressable_data(0)

        def late(at: int) -> Result:
            lane = lanes.lanes[at]
            state, trained = jax.tree.map(
                lambda leaf: LateArray(leaf, lane.devices, lane.copies),
                (lead.state, lead.trained),
            )
            # ready when the lead is: nothing waits for the copies
            token = LeadArray(row, lane.world_size)
            return Result(state, trained, lanes.part(carries, at), token)

        return [done[at] if at in done else late(at) for at in range(len(lanes.lanes))]

    def _thin(self, state: TrainState) -> TrainState:
        """Leave out frozen parameters and the key, which no window changes."""
        return state.replace(params=self._split(state.params)[0], key=None)

    def _whole(self, before: TrainState, results: Sequence[Result]) -> TrainState:
        """Return the new state, with the frozen parameters and the key of the old one."""
        trained, frozen = self._split(before.params)
        state: TrainState = self._lanes.join([result.state for result in results])
        if self._rule.takes_agreed:
            leaves = self._lanes.join([result.trained for result in results])
            state = state.replace(params=jax.tree.structure(trained).unflatten(leaves))
        return state.replace(params=self._join(state.params, frozen), key=before.key)

    def _step_of(self, state: TrainState) -> int:
        """Return the number of windows a state has seen; 0 if it does not decide what to run."""
        if len(self._compiled.parts) == 1:
            return 0
        known, step = self._step
        if known() is state.step:
            return step
        return int(np.asarray(state.step.addressable_data(0))[0])

    def _programs(self, payload: Payload) -> list[Program]:
        parts = self._lanes.split(shapes_of(payload))
        return [self._compiled.accumulating(at, own) for at, own in enumerate(parts)]


def _finished(
    parts: Sequence["Future[Result]"], held: bool
) -> tuple[list[Result], KeyboardInterrupt | None]:
    """Wait for the lanes; return their results, and a Ctrl-C that came meanwhile.

    The first Ctrl-C waits for the window, a second one does not.

    Args:
        parts: The lanes' results.
        held: Whether the first one is already held back, see `Launch.hold`. It may not be if the
            user's own handler raises it.
    """
    interrupt = None
    while True:
        try:
            with interruptible():
                return [part.result() for part in parts], interrupt
        except KeyboardInterrupt as error:
            if held or interrupt is not None:
                raise
            interrupt = error
