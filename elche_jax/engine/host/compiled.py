"""The compiled programs of windows that are averaged on the host, a set for each device."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.engine.axis import DeviceAxis
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.host.limits import Limits
from elche_jax.engine.host.pending import PendingWindow, PendingWindows
from elche_jax.engine.host.program import HostProgram
from elche_jax.engine.lane import Fleet
from elche_jax.engine.mapped import Mapped, PerDevice
from elche_jax.engine.rule import Ended
from elche_jax.engine.runner import Program, compiled
from elche_jax.engine.shapes import one_of, stacked
from elche_jax.engine.state import TrainState, with_averaging

PyTree = Any
_FLAG = jax.ShapeDtypeStruct((1,), jnp.bool_)


class Programs:
    """Compiles the programs of every device, and keeps the shapes of their arguments.

    Attributes:
        local: Shapes of a device's carry, without the leading axis.
        pending: Shapes of a device's update, leaves `(1, ...)`.
        no_metrics: The metrics before the first average.
        parts: Indices of the parts of the parameters, which are exchanged in turn.

    Args:
        program: The functions of a window.
        fleet: The devices.
        cache: Compiled programs.
        state: Shapes of the stacked state.
        limits: How far devices may run ahead.
        number: Distinguishes the programs of this runner from those of others.
    """

    def __init__(
        self, program: HostProgram, fleet: Fleet, cache: CompileCache, state: TrainState,
        limits: Limits, number: int,
    ):  # fmt: skip
        self._cache, self._limits, self._number = cache, limits, number
        self._world_size = fleet.job.world_size
        self._split = program.rule.work.selection.split
        self.parts, devices = range(program.rule.parts), fleet.devices

        def on_each(fn: PerDevice, donate: tuple[int, ...] = ()) -> list[Mapped]:
            first = Mapped(fn, devices[:1], donate)
            return [first.on(device) for device in devices]  # traced once for all of them

        self._accumulate = on_each(program.accumulate, donate=(1,))
        # no donation: devices that run ahead apply means to the state that the user still has
        self._deliver = [on_each(partial(program.deliver, part)) for part in self.parts]
        self._apply = on_each(program.apply)
        one = one_of(state)
        self.local, thin = jax.eval_shape(program.zeros, one), self.thin(one)
        reduction = program.rule.reduction(one)

        def reduced(part: int, state: TrainState, carried: PyTree) -> Any:
            (_, pending, delivery), _ = program.deliver(part, state, carried, False, True)
            # over one device, so nothing is exchanged; shapes do not depend on how many there are
            return pending, *reduction(DeviceAxis(1), delivery.contribution, 0)

        made = [jax.eval_shape(partial(reduced, part), thin, self.local) for part in self.parts]
        pending, _, metrics = made[0]
        means = [mean for _, mean, _ in made]
        trees = (program.rule.reads(one), thin, self.local, means, pending)
        self._reads, self._thin, self._carried, self._means, self.pending = stacked(trees, 1)
        # only the progress of later windows is subtracted from a mean
        self._done = replace(self.pending, progress=[])
        self.no_metrics: dict[str, Any] = {
            name: np.full((self._world_size,) * len(like.shape), np.nan, np.float32)
            for name, like in metrics.items()
        }
        self.no_metrics["finite"] = np.bool_(True)

    def thin(self, state: TrainState) -> TrainState:
        """Drop frozen parameters, the key and pending windows.

        A state has pending windows only from runs without an exchange on the host.
        """
        state = with_averaging(state, pending=())
        return state.replace(params=self._split(state.params)[0], key=None)

    def pending_like(self, windows: int) -> PendingWindows:
        """Return the shapes of this number of pending windows, over all devices of the job."""
        size, mean = self._world_size, one_of(self._means[0])  # late means have one part
        first, later = (stacked(one_of(one), size) for one in (self._done, self.pending))
        counts, finite = jax.ShapeDtypeStruct((size,), jnp.int32), stacked(one_of(_FLAG), size)
        made = [PendingWindow(counts, one, mean, self.no_metrics) for one in (first, later)]
        every = made[:1] + made[1:] * (windows - 1)
        return PendingWindows(finite, self.no_metrics, every)

    def accumulating(self, payload: Payload) -> list[Program]:
        """Return the programs that run microbatches of data of these shapes."""
        data = stacked(one_of(payload), 1)
        call_args = CallArgs(jax.ShapeDtypeStruct((1, CallArgs.WIDTH), jnp.int32))
        args = (self._reads, self._carried, data, call_args)
        return self._each(self._accumulate, ("host accumulate", payload.signature), *args)

    def delivering(self, part: int) -> list[Program]:
        """Return the programs that end a window in which this part is exchanged."""
        args = (self._thin, self._carried, _FLAG, _FLAG)
        return self._each(self._deliver[part], ("host deliver", part), *args)

    def applying(self, part: int, later: int) -> list[Program]:
        """Return the programs that apply a mean with `later` windows after it."""
        ended = Ended(self._thin, self._thin, self._done, part, [self.pending] * later)
        args = (ended, self._means[part], _FLAG)
        return self._each(self._apply, ("host apply", part, later), *args)

    def _each(self, fns: list[Mapped], key: tuple[Any, ...], *args: PyTree) -> list[Program]:
        """Return the programs of all devices."""
        kind, *rest = key
        return [
            Program((kind, self._number, rank, *rest), fn, lambda: args)
            for rank, fn in enumerate(fns)
        ]

    def get(self, programs: Sequence[Program]) -> list[PerDevice]:
        """Return a program for each device; missing ones are compiled, see `compile`."""
        return compiled(programs[:1], self._cache) + compiled(programs[1:], self._cache)

    def compile(self, programs: Sequence[Sequence[Program]]) -> None:
        """Compile programs at the same time, each given for all devices.

        Those of the first device come first: JAX's persistent cache, if enabled, then has them for
        the other GPUs of its kind.
        """
        first, *others = zip(*programs, strict=True)
        compiled(first, self._cache)
        compiled([one for own in others for one in own], self._cache)

    def laters(self) -> Sequence[int]:
        """Return the possible numbers of later windows when a mean is applied."""
        if not self._limits.ahead:
            return (0,)
        delay = self._limits.delay
        return range(self._limits.in_flight) if delay is None else (delay,)
