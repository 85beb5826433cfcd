"""Runs the windows of devices that exchange on the host: each device's programs by itself.

Programs of one device start when that device is free, whatever the others do, so that a
fast one goes on where nobody makes it wait.
"""

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.averaging.host.average import Delivery, HostAverage, News
from elche_jax.averaging.host.exchange import (
    Done,
    Failed,
    HostExchange,
    Limits,
    Outcome,
)
from elche_jax.averaging.host.program import HostProgram, Since, averaged_rules, sent_rules
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.devices import Group
from elche_jax.engine.fetch import Orders, Payload
from elche_jax.engine.loop import Seconds
from elche_jax.engine.mapped import Each, stack_shards, stacked_sharding
from elche_jax.engine.replicas import is_key, replicate
from elche_jax.engine.runner import Call, Launch, new_number, signature, zeros
from elche_jax.engine.state import TrainState

PyTree = Any
Program = tuple[Hashable, Callable[[], Any]]


@dataclass(frozen=True)
class Shapes:
    """Of what one device's programs take, leaves `(1, ...)`."""

    state: TrainState
    walk: PyTree
    news: News
    since: Since


@dataclass
class Begun:
    """A window that was launched and whose average the devices have not taken up."""

    number: int
    deliveries: list[Delivery]

    def since(self, rank: int) -> Since:
        mine = self.deliveries[rank]
        return Since(mine.progress, mine.steps, mine.model_state)


@dataclass
class Session:
    """What a run knows of the state it has returned last.

    Attributes:
        parts: That state by rank.
        step: Windows it has had.
        fine: By rank whether the parameters taken up last were finite.
        metrics: Metrics of the window averaged last.
        begun: Windows that are not averaged yet, oldest first.
        fresh: Whether none was launched yet.
        state: That state, weakly; with another one a new session begins.
    """

    parts: list[TrainState]
    step: int
    fine: list[Any]
    metrics: dict[str, Any]
    begun: list[Begun] = field(default_factory=list)
    fresh: bool = True
    state: Callable[[], TrainState | None] = lambda: None


class HostRunner:
    """Compiles and launches the programs of every device.

    It is to the training step what `elche_jax.engine.runner.Runner` is. Only the thread
    that trains may call `run`. `prepare` may be called by any.

    Args:
        program: What a device computes.
        group: The devices.
        cache: Compiled programs.
        state: Shapes of the stacked state.
        limits: How long to wait for devices, and how far they may run ahead.
        seconds: Makes devices slower on purpose; or None.
        sent: Bytes that a device delivers.
    """

    def __init__(
        self,
        program: HostProgram,
        group: Group,
        cache: CompileCache,
        state: TrainState,
        limits: Limits,
        seconds: Seconds | None,
        sent: int,
    ):
        self.group, self.limits = group, limits
        self.replicated = program.replicated
        self.capacities: dict[Hashable, set[int]] = {}
        self._program, self._cache, self._seconds = program, cache, seconds
        self._number = new_number()
        devices = group.devices
        self._accumulate = Each(program.accumulate, devices, donate=(1,))
        self._deliver = Each(program.deliver, devices, donate=())
        self._apply = Each(program.apply, devices, donate=())
        self._sharding = stacked_sharding(devices)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
        self._walk_shape = jax.eval_shape(program.zeros, one)
        self.state = state
        self._averaging = HostAverage(
            program.averaging.exponent,
            sent_rules(program.merge),
            averaged_rules(program, one.opt_state),
            program.work.metrics,
            sent,
        )
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        (_, delivery), _ = jax.eval_shape(program.deliver, one, self._walk_shape, flag, flag)
        since = Since(delivery.progress, delivery.steps, delivery.model_state)
        news = News(delivery.progress, delivery.model_state, delivery.opt_state, flag)
        self._shapes = Shapes(*map(_one_each, (one, self._walk_shape, news, since)))
        self._walks: list[PyTree] = []
        self._bools: dict[int, tuple[Any, Any]] = {}

    def watch(self, done: Done, failed: Failed) -> HostExchange:
        """Makes the exchange of a run; its threads end when it is closed."""
        return HostExchange(
            self.group.world_size, self._averaging, self.limits, self._seconds, done, failed
        )

    def run(
        self, state: TrainState, calls: Sequence[Call], launch: Launch, overlap: bool = False
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """Trains a window.

        Waits for its average; where devices run ahead only as long as the limits say,
        and then takes up the averages that have come by now.

        Args:
            state: Stacked state; its buffers are given up.
            calls: The calls of the accumulating program, in order.
            launch: Of which run it is.
            overlap: Not used.

        Returns:
            The new state; the metrics of the window, or, where devices run ahead, of the
            last one that was averaged; and for every device whether it was finite.
        """
        del overlap
        exchange: HostExchange = launch.watch
        session = self._session(exchange, state)
        exchange.session = None  # whatever interrupts what follows: the state stays usable
        counts = tuple(sum(call.ranges[r].count for call in calls) for r in range(len(self)))
        try:
            exchange.admit(counts)
            if self.limits.ahead:
                self._take_up(session, exchange.closed())
            self._launch(session, calls, exchange, launch, counts)
            if not self.limits.ahead:
                outcome = exchange.wait(launch.number)
                self._take_up(session, [(launch.number, outcome)])
                self._await_applied(session, exchange, launch.number, outcome)
        except BaseException:
            self._walks = []
            exchange.abandon(launch.number)
            raise
        new = self._stack(session.parts)
        session.state = weakref.ref(new)
        exchange.session = session
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        metrics = jax.device_put(session.metrics, self.group.devices[0])
        return new, metrics, metrics["finite"]

    def release(self) -> None:
        """Gives back the memory of what devices carry through their steps."""
        self._walks = []

    def ready(self, payload: Payload) -> bool:
        """Whether the programs for data of these shapes are compiled."""
        programs = [self._accumulate_program(rank, payload) for rank in range(len(self))]
        return all(self._cache.ready(key) for key, _ in programs)

    def prepare(self, payload: Payload) -> None:
        """Compiles the programs for data of these shapes, in background."""
        for rank in range(len(self)):
            self._cache.prepare(*self._accumulate_program(rank, payload))

    def __len__(self) -> int:
        return self.group.world_size

    # -- one window ------------------------------------------------------------------

    def _session(self, exchange: HostExchange, state: TrainState) -> Session:
        """That of the state, or a new one: then what was begun is not taken up, but goes
        with the next delivery."""
        session: Session | None = exchange.session
        if session is not None and session.state() is state:
            return session
        exchange.closed()
        parts = [part_of(state, rank) for rank in range(len(self))]
        true = [jax.device_put(np.ones(1, bool), device) for device in self.group.devices]
        step = int(np.asarray(parts[0].step)[0])
        return Session(parts, step, true, self._no_metrics())

    def _launch(
        self,
        session: Session,
        calls: Sequence[Call],
        exchange: HostExchange,
        launch: Launch,
        counts: tuple[int, ...],
    ) -> None:
        walks = self._walks or [self._zero_walk(device) for device in self.group.devices]
        self._walks = []
        reads = [self._program.reads(part) for part in session.parts]
        for call in calls:
            for rank, accumulate in enumerate(self._accumulators(call.payload)):
                orders = part_of(call.orders, rank)
                payload = part_of(call.payload, rank)
                (walks[rank], _), _ = accumulate(reads[rank], walks[rank], payload, orders)
        deliveries: list[Delivery] = []
        for rank, deliver in enumerate(self._delivering()):
            anew = self._flags(rank)[session.fresh]
            state = session.parts[rank]
            (state, delivery), _ = deliver(state, walks[rank], anew, session.fine[rank])
            session.parts[rank] = state
            deliveries.append(delivery)
        self._walks = walks
        session.begun.append(Begun(launch.number, deliveries))
        exchange.launch(launch.number, launch.at, counts, session.step, deliveries)
        session.step, session.fresh = session.step + 1, False

    def _take_up(self, session: Session, closed: list[tuple[int, Outcome]]) -> None:
        """Tells the devices of averages, in the order of the windows."""
        for number, outcome in closed:
            if not session.begun or session.begun[0].number != number:
                continue  # of a window that goes with a later delivery
            done, *later = session.begun
            devices = list(self.group.devices)
            told = jax.device_put([_stacked(outcome.average.news)] * len(devices), devices)
            for rank, apply in enumerate(self._applying(len(later))):
                ended = done.deliveries[rank].model_state
                since = [window.since(rank) for window in later]
                (part, fine), _ = apply(session.parts[rank], told[rank], ended, since)
                session.parts[rank], session.fine[rank] = part, fine
            session.begun = later
            session.metrics = outcome.average.metrics

    def _await_applied(
        self, session: Session, exchange: HostExchange, number: int, outcome: Outcome
    ) -> None:
        """Waits until the devices, late ones apart, have taken up the average."""
        ends = {}
        for rank, fine in enumerate(session.fine):
            if rank not in exchange.late:
                outcome.average.metrics["finite"] &= np.asarray(fine)[0]
                ends[rank] = time.perf_counter()
        last = max(ends.values())
        exchange.applied(number, [ends.get(rank, last) for rank in range(len(self))])

    def _no_metrics(self) -> dict[str, Any]:
        """Before any average: numbers that are none."""
        none, row = np.float32("nan"), np.full(len(self), np.nan, np.float32)
        names = (*self._program.work.metrics, "loss", "weight", "workers", "exchange_bytes")
        rows = ("distance", "update_norm", "cosine", "share")
        return dict.fromkeys(names, none) | dict.fromkeys(rows, row) | {"finite": np.bool_(True)}

    def _stack(self, parts: list[TrainState]) -> TrainState:
        def stack(*leaves: jax.Array) -> jax.Array:
            if is_key(leaves[0]):
                data = stack(*map(jax.random.key_data, leaves))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaves[0]))
            return stack_shards(leaves, self._sharding, (len(leaves), *leaves[0].shape[1:]))

        return jax.tree.map(stack, *parts)

    def _zero_walk(self, device: jax.Device) -> PyTree:
        return replicate(jax.tree.map(zeros, self._walk_shape), [device])

    def _flags(self, rank: int) -> tuple[Any, Any]:
        """False and True on a device."""
        if rank not in self._bools:
            device = self.group.devices[rank]
            values = [np.zeros(1, bool), np.ones(1, bool)]
            self._bools[rank] = tuple(jax.device_put(values, device))
        return self._bools[rank]

    # -- programs --------------------------------------------------------------------

    def _accumulators(self, payload: Payload) -> list[Any]:
        return self._all(lambda rank: self._accumulate_program(rank, payload))

    def _accumulate_program(self, rank: int, payload: Payload) -> Program:
        key = ("host accumulate", self._number, rank, signature(payload))
        payload = _one_each(payload, stacked=True)
        orders = Orders(jax.ShapeDtypeStruct((1, Orders.WIDTH), jnp.int32))
        reads = self._program.reads(self._shapes.state)
        walk = self._shapes.walk
        return key, lambda: self._accumulate.compile(rank, reads, walk, payload, orders)

    def _delivering(self) -> list[Any]:
        flag = jax.ShapeDtypeStruct((1,), jnp.bool_)
        args = (self._shapes.state, self._shapes.walk, flag, flag)
        key = ("host deliver", self._number)
        return self._all(lambda rank: ((*key, rank), lambda: self._deliver.compile(rank, *args)))

    def _applying(self, later: int) -> list[Any]:
        since = self._shapes.since
        args = (self._shapes.state, self._shapes.news, since.model_state, [since] * later)
        key = ("host apply", self._number, later)
        return self._all(lambda rank: ((*key, rank), lambda: self._apply.compile(rank, *args)))

    def _all(self, program: Callable[[int], Program]) -> list[Any]:
        """The programs of all devices; compiled two at a time where they are not there."""
        programs = [program(rank) for rank in range(len(self))]
        first = self._cache.get(*programs[0])
        for one in programs[1:]:
            self._cache.prepare(*one)
        return [first, *(self._cache.get(*one) for one in programs[1:])]


def part_of(tree: PyTree, rank: int) -> PyTree:
    """One device's entries of stacked arrays, leaves `(1, ...)`, on that device."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(rank), tree)


def _one_each(tree: PyTree, stacked: bool = False) -> PyTree:
    """Shapes of the arrays that one device gets."""
    at = 1 if stacked else 0
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[at:]), x.dtype), tree)


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)
