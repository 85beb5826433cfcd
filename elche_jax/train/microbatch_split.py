"""`microbatch_split`: microbatches that run in parts on devices of some kinds."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from elche_jax import _check as check
from elche_jax._log import logger
from elche_jax.data.source import ArraySource
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.devices import GIB, free_bytes
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.lane import Fleet, kinds_of
from elche_jax.engine.mapped import Mapped
from elche_jax.engine.rule import Rule
from elche_jax.engine.shapes import signature, stacked
from elche_jax.engine.state import TrainState
from elche_jax.train.spec import DataPlan
from elche_jax.train.split_check import LossCall, check_shapes, check_values

PyTree = Any

Parts = int | Literal["auto"]
"""A number of parts, or `"auto"` for as many as the devices' memory requires."""

MicrobatchSplit = Parts | Mapping[str, Parts]
"""Parts of a microbatch, on all devices or by kind of device."""


def checked_split(
    where: str, split: MicrobatchSplit | None, kinds: Sequence[str]
) -> dict[str, Parts]:
    """Return the parts of a microbatch by kind of device, without kinds that run it whole.

    Args:
        where: The function the user called, for messages.
        split: The user's choice; None for whole microbatches.
        kinds: The kind of every device.

    Raises:
        TypeError: If `split` has the wrong type.
        ValueError: If a number is below 1, or no device is of a kind that `split` names.

    Examples:
        >>> checked_split("build_train_step", {"cpu": 4}, ["NVIDIA L4", "cpu", "cpu"])
        {'cpu': 4}
        >>> checked_split("build_train_step", "auto", ["NVIDIA L4", "cpu"])
        {'NVIDIA L4': 'auto', 'cpu': 'auto'}
    """
    if not isinstance(split, Mapping):
        parts = _checked_parts(where, "microbatch_split", 1 if split is None else split)
        return dict.fromkeys(kinds, parts) if parts != 1 else {}
    there = ", ".join(map(repr, dict.fromkeys(kinds)))
    for kind in split:
        if kind not in kinds:
            rule, todo = f"name kinds of the devices ({there})", "Leave it out."
            raise ValueError(check.message(where, "microbatch_split", rule, repr(kind), todo))
    checked: dict[str, Parts] = {
        kind: _checked_parts(where, f"microbatch_split[{kind!r}]", parts)
        for kind, parts in split.items()
    }
    return {kind: parts for kind, parts in checked.items() if parts != 1}


def _checked_parts(where: str, argument: str, parts: Any) -> Parts:
    if isinstance(parts, str) and parts == "auto":
        return "auto"
    todo = "Pass a number of parts, 'auto', or one of these by kind."
    return check.integer(where, argument, parts, low=1, todo=todo)


class Splitter:
    """Finds the number of parts in which the devices of each lane run a microbatch.

    Args:
        fleet: The devices.
        split: Numbers of parts by kind, see `checked_split`.
    """

    def __init__(self, fleet: Fleet, split: Mapping[str, Parts]):
        self._fleet, self._split = fleet, split
        self._kinds = kinds_of(fleet.devices)
        self._start: tuple[PyTree, PyTree] = None, None
        self._known: dict[Hashable, tuple[int, ...]] = {}

    def begin(self, params: PyTree, model_state: PyTree) -> None:
        """Keep the initial parameters and model state on the host, to check losses with them."""
        if self._split:
            self._start = jax.device_get((params, model_state))

    def of_lanes(
        self, call: LossCall, kind: Hashable, rule: Callable[[], Rule], one: TrainState,
        plan: DataPlan,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the number of parts for each lane.

        Args:
            call: The loss.
            kind: Key that tells this loss from those of other runs.
            rule: Returns the rule of the run's windows.
            one: Shapes of one device's state.
            plan: The data.

        Raises:
            ValueError: If a microbatch cannot be divided into that many parts, or the parts would
                not add up to the whole.
        """
        lanes = self._fleet.in_lanes()
        if not self._split:
            return (1,) * len(lanes)
        key = (kind, signature(plan.microbatch), plan.ragged, plan.placement)
        if key not in self._known:
            parts: dict[str, int] = {}
            for name in dict.fromkeys(self._kinds):
                asked = self._split.get(name, 1)
                if asked == "auto":
                    asked = self._fitting(name, rule(), one, plan)
                parts[name] = _checked_size(name, asked, plan.batch_size)
            splits = tuple(parts[self._kinds[lane.ranks[0]]] for lane in lanes)
            for split in sorted({*splits} - {1}):
                check_shapes(call, split)
                size, devices = plan.batch_size // split, self._devices(splits)
                check_values(call.work, size, self._start, plan, devices)
            self._known[key] = splits
        return self._known[key]

    def _fitting(self, kind: str, rule: Rule, one: TrainState, plan: DataPlan) -> int:
        """Return the number of parts, the smallest power of two that fits the memory of a kind."""
        devices = [d for d, name in zip(self._fleet.devices, self._kinds, strict=True)
                   if name == kind]  # fmt: skip
        free, whole, split = free_bytes(devices), None, 1
        while True:
            needed = None if free is None else _needed(rule.in_parts(split), devices[0], one, plan)
            if free is None or needed is None:
                logger.warning(
                    "elche: microbatch_split='auto' leaves microbatches whole on %s, as its "
                    "memory is not known.", kind,
                )  # fmt: skip
                return 1
            whole = whole or needed
            fits = needed <= free
            if fits or plan.batch_size % (2 * split):
                break
            split *= 2
        if split > 1 or not fits:
            logger.log(
                logging.INFO if fits else logging.WARNING,
                "elche: %s runs a microbatch in %d parts, which need %.3g GiB (whole %.3g GiB) of "
                "%.3g GiB free.", kind, split, needed / GIB, whole / GIB, free / GIB,
            )  # fmt: skip
        return split

    def _devices(self, splits: Sequence[int]) -> list[jax.Device]:
        """Return the devices on which to check a loss, accelerators that run it whole first."""
        lanes = zip(self._fleet.in_lanes(), splits, strict=True)
        firsts = [(lane.devices[0], split > 1) for lane, split in lanes]
        firsts.sort(key=lambda item: (item[0].platform == "cpu", item[1]))
        try:
            host = jax.local_devices(backend="cpu")[:1]
        except RuntimeError:  # the user left this backend out
            host = []
        return [*dict.fromkeys([*(device for device, _ in firsts), *host])]


def _checked_size(kind: str, split: int, size: int) -> int:
    """Return the number of parts; raise if a microbatch cannot be divided into that many."""
    if size % split:
        rule = f"be a multiple of {split}, the number of parts on {kind} (microbatch_split)"
        raise ValueError(check.message("windows", "batch_size", rule, size))
    return split


def _needed(rule: Rule, device: jax.Device, one: TrainState, plan: DataPlan) -> int | None:
    """Return the bytes that a device needs to run microbatches; None if unknown.

    The state is counted although it is already on the device, as the programs that end a window
    need about as much.
    """
    program = CollectiveProgram(rule)
    row = stacked(plan.microbatch, 1)
    call_args = CallArgs(jax.ShapeDtypeStruct((CallArgs.WIDTH,), jnp.int32))
    carried = jax.eval_shape(program.zeros, one)
    args = stacked((rule.reads(one), carried, Pieces((row,)), call_args), 1)
    compiled: Any = Mapped(program.accumulate, [device], donate=(1,)).compile(*args)
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    needed = stats.temp_size_in_bytes + stats.argument_size_in_bytes
    needed += stats.output_size_in_bytes - stats.alias_size_in_bytes
    if plan.placement == "resident" and isinstance(plan.source, ArraySource):
        needed += plan.source.nbytes  # placed after this
    return int(needed)
