"""Reductions of stacked pytrees over the devices of a fleet, outside of training windows.

In one lane these are collectives. Several lanes meet on the lead: each brings its sum there, and
the result is copied to all devices. With several processes, the leads exchange in between.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.averaging.rules import AveragingRule
from elche_jax.engine.axis import DeviceAxis, LeadAxis, ProcessAxis
from elche_jax.engine.collectives import broadcast_from, weighted_mean, weighted_terms
from elche_jax.engine.exchange import packed_psum
from elche_jax.engine.lane import Fleet, Lane, Lanes
from elche_jax.engine.laned import entries_of
from elche_jax.engine.local import average
from elche_jax.engine.mapped import AXIS, Mapped, MappedAcross, PerDevice
from elche_jax.engine.state import TrainState, with_averaging
from elche_jax.engine.trainable import Selection

PyTree = Any


def broadcaster(fleet: Fleet) -> Callable[[PyTree], PyTree]:
    """Return a function that copies the first device's values to all devices, bit for bit."""
    if not isinstance(fleet, Lanes):
        mapped = fleet.mapped(lambda tree: (broadcast_from(tree, 0, AXIS), None))
        return lambda tree: mapped(tree)[0]
    if fleet.job.one_process:
        return lambda tree: _scatter(fleet, entries_of(fleet.place(tree), 0))
    # the first process has the first device
    across = MappedAcross(lambda tree: (broadcast_from(tree, 0, AXIS), None), fleet.job.leads)
    lead = fleet.lead.devices[0]

    def broadcast(tree: PyTree) -> PyTree:
        return _scatter(fleet, across(jax.device_put(entries_of(fleet.place(tree), 0), lead))[0])

    return broadcast


def weighted_averager(fleet: Fleet) -> Callable[[PyTree, np.ndarray], PyTree]:
    """Return a function of a pytree and one weight per device, see `weighted_mean`."""
    if not isinstance(fleet, Lanes):
        mapped = fleet.mapped(lambda tree, weight: (weighted_mean(tree, weight, AXIS), None))
        return lambda tree, weights: mapped(tree, weights)[0]

    def lane_sum(lane: Lane, tree: PyTree, weight: Any) -> tuple[PyTree, None]:
        terms = weighted_terms("weighted_mean", tree, weight)
        return (terms if lane.world_size == 1 else packed_psum(terms, AXIS)), None

    def mean(like: PyTree, parts: list[tuple[PyTree, Any]]) -> tuple[PyTree, None]:
        trees, weights = zip(*parts, strict=True)
        own = jax.tree.map(lambda *lanes: sum(lanes), *trees), sum(weights)
        summed, total = own if fleet.job.one_process else packed_psum(own, AXIS)
        return jax.tree.map(
            lambda s, leaf: (s / jnp.asarray(total, s.dtype)).astype(leaf.dtype), summed, like
        ), None

    sums = [lane.mapped(partial(lane_sum, lane)) for lane in fleet.lanes]
    lead = fleet.lead.devices[0]
    means = _on_leads(fleet, mean)

    def averager(tree: PyTree, weights: np.ndarray) -> PyTree:
        tree = fleet.place(tree)
        parts = fleet.split((tree, weights))
        made = [fn(*own)[0] for fn, own in zip(sums, parts, strict=True)]
        found = jax.device_put([entries_of(one, 0) for one in made], lead)
        like = entries_of(tree, fleet.lead.ranks[0])
        return _scatter(fleet, means(like, found)[0])

    return averager


def parameter_averager(
    fleet: Fleet, averaging: AveragingRule, selection: Selection
) -> Callable[[TrainState], PyTree]:
    """Return a function that averages the devices' parameters, see `average`."""
    size = fleet.world_size

    def of(state: TrainState) -> TrainState:
        # without what a late device may not have computed yet
        state = with_averaging(state, outer=(), error=[], merged=[], pending=())
        return state.replace(opt_state=None, model_state=None)

    if not isinstance(fleet, Lanes):
        axis = DeviceAxis(size)
        mapped = fleet.mapped(lambda state: (average(averaging, selection, axis, state), None))
        return lambda state: mapped(of(state))[0]
    lead, job = fleet.lead.devices[0], fleet.job

    @cache
    def means(gone: frozenset[int]) -> Mapped | MappedAcross:
        # processes that have ended do not take part
        everyone = LeadAxis(size)
        if not job.one_process:
            everyone = ProcessAxis(job.world_size, tuple(job.ranks_of.values()))
        return _on_leads(fleet, lambda rows: (average(averaging, selection, everyone, rows), None))

    def averager(state: TrainState) -> PyTree:
        rows = [entries_of(of(state), rank) for rank in range(size)]
        rows += rows[:1] * (job.members.width - size)  # padding if other processes have more
        return means(job.members.gone)(jax.device_put(rows, lead))[0]

    return averager


def _on_leads(fleet: Lanes, fn: PerDevice) -> Mapped | MappedAcross:
    """Map a function over the lead of each process.

    If the leads do not compute the same bits, all get the first one's result. In a job of several
    processes, all must call this, and the mapped function.
    """
    job = fleet.job
    if job.one_process:
        return Mapped(fn, fleet.lead.devices[:1])
    if job.alike:
        return MappedAcross(fn, job.leads)
    return MappedAcross(lambda *args: (broadcast_from(fn(*args)[0], 0, AXIS), None), job.leads)


def _scatter(lanes: Lanes, tree: PyTree) -> PyTree:
    """Copy one device's entries to all devices."""
    # copies, as no leaf may share memory with the argument
    return lanes.copies(jax.tree.map(jnp.copy, tree))
