"""One window over several lanes, from the dispatch of its microbatches to the new states.

In every lane:

    accumulate -> contribute -> (to the lead) -> agree -> (to the lane) -> adopt

With pending windows, `contribute` and the transfer to the lead come first, for the oldest pending
window. The lead then runs its microbatches in pieces, and `agree` is dispatched between two of
them. If they were one piece, the agreed result would come too late to cross while the rest of the
window runs. A separate thread dispatches `agree`: a CPU runs in sequence what one thread
dispatches, so the microbatches would otherwise wait for an exchange between processes.

A lane at rest runs nothing; see `LanesRunner`.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import jax
import numpy as np

from elche_jax._processes import PROCESSES
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.lane import Lane, Lanes
from elche_jax.engine.laned import entries_of
from elche_jax.engine.lanes.compiled import Ending, without_payload
from elche_jax.engine.lanes.drivers import Drivers
from elche_jax.engine.mapped import PerDevice
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.rule import Agreed
from elche_jax.engine.runner import Launch
from elche_jax.engine.state import TrainState
from elche_jax.engine.survey import Survey

PyTree = Any

PIECES = 4
"""Number of pieces in which the lead runs its microbatches with pending windows."""

AHEAD = 2
"""Largest number of pieces that the lead has in flight until `agree` is dispatched."""


@dataclass(frozen=True)
class Work:
    """A lane's part of a window.

    Attributes:
        lane: The lane.
        state: Its states at the start of the window, without frozen parameters, the key and what
            only the lead holds.
        read: The part of its states that microbatches read.
        sums: Its carries.
        steps: For each call, the compiled program and its arguments.
    """

    lane: Lane
    state: TrainState
    read: TrainState
    sums: PyTree
    steps: Sequence[tuple[PerDevice, Payload, CallArgs]]


@dataclass(frozen=True)
class Result:
    """The results of a lane's part of a window.

    Attributes:
        state: The new states, as `LanesProgram.adopt` returns them.
        trained: The trained parameters that were agreed on, in the order of their leaves.
        sums: The carries.
        token: For each device, whether its own part is finite; ready when the device is done.
    """

    state: TrainState
    trained: list[Any]
    sums: PyTree
    token: Any


@dataclass
class LanesWindow:
    """What the lanes of a window share.

    Attributes:
        lanes: The devices.
        led_by: Index of the lane that leads.
        ending: The programs that end the window.
        pending: Whether windows are pending.
        summed: Whether the devices of a lane sum their payloads before these cross to the lead.
        lead: State of the lead, and what only it holds.
        launch: The dispatch, called with the token of each lane's accumulation.
        drivers: The lanes' threads.
        found: The contributions that have arrived on the lead, by rank; at first, those of lanes
            at rest.
        absent: Contributions on the lead that pad those of this process, see `Programs.absent`.
        gathered: All contributions in the order of ranks.
        agreed: What the devices agree on, what the lead holds, and the metrics.
        metrics: The metrics, on the same device in every window.
    """

    lanes: Lanes
    led_by: int
    ending: Ending
    pending: bool
    summed: bool
    lead: tuple[TrainState, PyTree]
    launch: Launch
    drivers: Drivers
    found: dict[int, Contribution]
    absent: Sequence[Contribution] = ()
    gathered: "Future[list[Contribution]]" = field(default_factory=Future)
    agreed: "Future[tuple[tuple[Agreed, PyTree], dict[str, Any]]]" = field(default_factory=Future)
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    _lock: Lock = field(default_factory=Lock)

    def fail(self, error: BaseException) -> None:
        """End the window: threads that wait for the failed lane raise its error."""
        with self._lock:
            for waited in (self.gathered, self.agreed):
                if not waited.done():
                    waited.set_exception(error)

    def run(self, at: int, work: Work) -> Result:
        """Run a lane's part, in the thread that dispatches its programs.

        Args:
            at: Index of the lane.
            work: Its part.
        """
        leads, sums, made = at == self.led_by, work.sums, None
        if self.pending:
            made = self._contribute(at, work, sums)
        if leads and self.pending:
            sums, token = self._accumulate_and_agree(at, work, sums)
        else:
            sums, token = _accumulate(work, sums, work.steps)
        self.launch(token, work.lane.ranks)
        if made is None:
            made = self._contribute(at, work, sums)
        if leads and not self.pending:
            self._agree()
        _, sent = made
        (agreed, _), metrics = self.agreed.result()
        mine = work.lane.copies(agreed)
        (state, token), _ = self.ending.adopt[at](work.state, sums, sent, mine)
        if leads:
            self.metrics = self._home(metrics)
        return Result(state, mine.trained, sums, token)

    def _home(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return metrics on the same device in every window, as a loop may add them up.

        Called in a lane's thread, as a transfer between two clients waits for them.
        """
        if self.led_by == self.lanes.lead_order[0]:
            return metrics
        return jax.device_put(metrics, self.lanes.lead.devices[0])

    def _contribute(self, at: int, work: Work, sums: PyTree) -> Any:
        """Dispatch the lane's contributions, and send them to the lead as soon as they are made."""
        made, sent = self.ending.contribute[at](work.state, sums)[0]
        if work.lane.alone and at == self.led_by:
            self._arrived(work.lane, [entries_of(made, 0)])  # already there
        else:
            self.drivers.put("move", at, partial(self._send, work.lane, made), self.fail)
        return made, sent

    def _send(self, lane: Lane, made: Contribution) -> None:
        """Send contributions to the lead, in the thread that moves the lane's arrays."""
        rows = [entries_of(made, at) for at in range(lane.world_size)]
        if self.summed:  # every device has the sum over the lane: send it once
            rows = [rows[0], *map(without_payload, rows[1:])]
        rows = jax.device_put(rows, self.lanes.lanes[self.led_by].devices[0])
        self._arrived(lane, rows)

    def _arrived(self, lane: Lane, rows: Sequence[Contribution]) -> None:
        with self._lock:
            self.found.update(zip(lane.ranks, rows, strict=True))
            if len(self.found) == self.lanes.world_size and not self.gathered.done():
                self.gathered.set_result([self.found[rank] for rank in sorted(self.found)])

    def _agree(self) -> None:
        """Dispatch `agree` once all contributions have arrived."""
        contributions = self.gathered.result()
        if self.launch.survey is None:
            agreed = self.ending.agree(*self.lead, contributions)
        else:
            agreed = self._agree_across(self.launch.survey, contributions)
        with self._lock:
            if not self.agreed.done():
                self.agreed.set_result(agreed)

    def _agree_across(self, survey: Survey, contributions: Sequence[Contribution]) -> Any:
        """Dispatch `agree` over the leads of all processes."""
        rows = np.pad(survey.take(), ((0, len(self.absent)), (0, 0)))
        measured = jax.device_put(rows[None], self.lanes.lead.devices[0])

        def exchange() -> Any:
            found = self.ending.agree(*self.lead, [*contributions, *self.absent], measured)
            # a failed exchange must be known before anything uses the states
            return jax.block_until_ready(found) if PROCESSES.recoverable else found

        agreed, (metrics, survey.found) = PROCESSES.together(self.lanes.job.leads, exchange)
        return agreed, metrics

    def _accumulate_and_agree(self, at: int, work: Work, sums: PyTree) -> tuple[PyTree, Any]:
        """Run the lead's microbatches, and agree between two pieces of them if possible.

        The lead never waits for contributions alone, as that would count as its own work.
        """
        self.drivers.put("agree", 0, self._agree, self.fail)
        tokens: list[Any] = []
        for piece in _pieces(work):
            if not self.agreed.done() and len(tokens) >= AHEAD:
                ready = self.drivers.put("move", at, tokens[-AHEAD].block_until_ready)
                wait((self.agreed, ready), return_when=FIRST_COMPLETED)
            sums, token = _accumulate(work, sums, [piece])
            tokens.append(token)
        return sums, tokens[-1]


def _accumulate(work: Work, sums: PyTree, steps: Any) -> tuple[PyTree, Any]:
    """Dispatch calls; return the carries, and the token of the last call."""
    token = None
    for accumulate, payload, call_args in steps:
        (sums, token), _ = accumulate(work.read, sums, payload, call_args)
    return sums, token


def _pieces(work: Work) -> Sequence[tuple[PerDevice, Payload, CallArgs]]:
    """Return the calls of a lane; a single call is split into pieces."""
    if len(work.steps) > 1:
        return work.steps
    ((accumulate, payload, call_args),) = work.steps
    numbers = CallArgs.pieces(np.asarray(call_args.numbers), PIECES)
    return [(accumulate, payload, CallArgs(work.lane.put(rows))) for rows in numbers]
