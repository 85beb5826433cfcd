"""Compiles the programs of windows over several lanes."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from elche_jax.engine.axis import ProcessAxis
from elche_jax.engine.collective import Carried
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.job import Measured
from elche_jax.engine.lane import Lane, Lanes, MappedFunction
from elche_jax.engine.lanes.program import LanesProgram, Sent
from elche_jax.engine.mapped import Mapped, MappedAcross, PerDevice
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.rule import Agreed
from elche_jax.engine.runner import Program, compiled
from elche_jax.engine.shapes import shapes_of, stacked
from elche_jax.engine.state import TrainState
from elche_jax.engine.wire import Encoded

PyTree = Any


@dataclass(frozen=True)
class Ending:
    """The compiled programs that end a window.

    Attributes:
        contribute: One for each lane, see `LanesProgram.contribute`.
        agree: The lead's, see `LanesProgram.agree`, or `agree_across` in a job of several
            processes.
        adopt: One for each lane, see `LanesProgram.adopt`.
    """

    contribute: Sequence[PerDevice]
    agree: PerDevice
    adopt: Sequence[PerDevice]


class Programs:
    """The programs of every lane and of the lead.

    Attributes:
        summed: Whether the devices of a lane sum their payloads before these cross to the lead.

    Args:
        program: The functions of a window.
        lanes: The devices.
        cache: Compiled programs.
        state: Shapes of one device's state, without what only the lead holds.
        thin: The same, without frozen parameters and the key.
        held: Shapes of what only the lead holds.
        number: Number of the runner, which is part of the cache keys.
    """

    def __init__(
        self, program: LanesProgram, lanes: Lanes, cache: CompileCache, state: TrainState,
        thin: TrainState, held: PyTree, number: int,
    ):  # fmt: skip
        self._program, self._lanes, self._cache = program, lanes, cache
        self._state, self._thin, self._held, self._number = state, thin, held, number
        self._carried: Carried = jax.eval_shape(program.zeros, state)
        self.summed = program.sums_in_lane(state)
        self._sizes = [lane.world_size for lane in lanes.lanes]
        self._absent: dict[tuple[int, int], Sequence[Contribution]] = {}
        self.parts = range(program.rule.parts)
        # `mapped` makes a function object per lane, as the key of JAX's caches lacks the kind of
        # the devices
        self._accumulate = [
            lane.mapped(program.in_lane(at).accumulate, _donated(lane, 1))
            for at, lane in enumerate(lanes.lanes)
        ]
        self._contribute = [
            [
                lane.mapped(partial(program.contribute, part, lane.world_size))
                for lane in lanes.lanes
            ]
            for part in self.parts
        ]
        self._agree: dict[Hashable, MappedFunction] = {}
        # the agreed values have the shapes of the state: no result could reuse the buffers of both
        self._adopt = [
            [lane.mapped(partial(program.adopt, part), _donated(lane, 0)) for lane in lanes.lanes]
            for part in self.parts
        ]

    def _on_lead(self, part: int, lead: int) -> MappedFunction:
        """Map `agree` over the first device of a lane, or over the leads of all processes."""
        program, members = self._program, self._lanes.job.members
        key = part, lead, members.gone
        if key not in self._agree and self._lanes.job.one_process:
            devices = self._lanes.lanes[lead].devices[:1]
            self._agree[key] = Mapped(partial(program.agree, part), devices, donate=(1,))
        elif key not in self._agree:
            axis = ProcessAxis(program.rule.size, tuple(members.ranks_of.values()))
            program = replace(program, across=axis)
            # nothing is donated: if another process ends, this one continues from its old state
            self._agree[key] = MappedAcross(partial(program.agree_across, part), members.leads)
        return self._agree[key]

    def accumulating(self, lane: int, payload: Payload) -> Program:
        """Return the program that runs microbatches with data of these shapes in a lane."""

        def shapes() -> tuple[PyTree, ...]:
            call_args = CallArgs(jax.ShapeDtypeStruct((CallArgs.WIDTH,), np.int32))
            one = (self._program.rule.reads(self._state), self._carried, call_args)
            read, carried, numbers = stacked(one, self._sizes[lane])
            return read, carried, shapes_of(payload), numbers

        key = ("lane accumulate", self._number, lane, payload.signature)
        return Program(key, self._accumulate[lane], shapes)

    def ending(self, part: int, lead: int) -> Ending:
        """Return the compiled programs that end a window led by the lane with index `lead`."""
        contribute, agree, adopt = self._ending(part, lead)
        return Ending(
            [self.get(one) for one in contribute], self.get(agree), [self.get(one) for one in adopt]
        )

    def get(self, one: Program) -> PerDevice:
        """Return the compiled program."""
        return self._cache.get(one.key, one.build)

    def compile(self, programs: Sequence[Program], lead: int) -> None:
        """Compile programs, and those that end a window, in parallel."""
        for part in self.parts:
            contribute, agree, adopt = self._ending(part, lead)
            programs = [*programs, *contribute, agree, *adopt]
        compiled(programs, self._cache)

    def prepare(self, lead: int) -> None:
        """Compile in the background what a lane needs in order to lead."""
        for part in self.parts:
            one = self._ending(part, lead)[1]
            if not self._cache.ready(one.key):
                self._cache.prepare(one.key, one.build)

    def _ending(self, part: int, lead: int) -> tuple[list[Program], Program, list[Program]]:
        def each(name: str, fns: Sequence[Mapped], shapes: Callable[[], PyTree]) -> list[Program]:
            return [
                Program((name, self._number, at, part), fn, lambda n=size: stacked(shapes(), n))
                for at, (fn, size) in enumerate(zip(fns, self._sizes, strict=True))
            ]

        state, carried = self._thin, self._carried
        contribute = each("lane contribute", self._contribute[part], lambda: (state, carried))
        adopt = each(
            "lane adopt",
            self._adopt[part],
            lambda: (state, carried, self._contributed(part)[1], self._agreed(part)),
        )
        first = [ranks[0] for ranks in self._lanes.ranks]
        members = self._lanes.job.members
        brings = [not self.summed or rank in first for rank in range(members.width)]
        rows = jax.ShapeDtypeStruct((members.width, len(Measured._fields)), np.float32)
        measured = () if self._lanes.job.one_process else (rows,)
        agree = Program(
            ("lead agree", self._number, lead, part, members.gone),
            self._on_lead(part, lead),
            lambda: stacked((state, self._held, self._gathered(part, brings), *measured), 1),
        )
        return contribute, agree, adopt

    def absent(self, part: int) -> Sequence[Contribution]:
        """Return zero contributions on the lead, as padding if another process has more devices."""
        missing = self._lanes.job.members.width - self._lanes.world_size
        if (part, missing) not in self._absent:
            made = self._contributed(part)[0]
            if self.summed:
                made = without_payload(made)
            none = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), made)
            absent = jax.device_put([none] * missing, self._lanes.lead.devices[0])
            self._absent[part, missing] = absent
        return self._absent[part, missing]

    def _contributed(self, part: int) -> tuple[Contribution, Sent]:
        """Return the shapes of the results of `LanesProgram.contribute`."""
        contribute = partial(self._program.contribute, part, 1)
        return jax.eval_shape(contribute, self._thin, self._carried)[0]

    def _gathered(self, part: int, brings: Sequence[bool]) -> list[Contribution]:
        """Return the shapes of all contributions; `brings` says which have a payload."""
        made, _ = self._contributed(part)
        return [made if payload else without_payload(made) for payload in brings]

    def _agreed(self, part: int) -> Agreed:
        """Return the shapes of what crosses from the lead to the devices."""
        # the shapes are the same for every axis
        gathered = self._gathered(part, [True] * self._program.rule.size)
        agree = partial(self._program.agree, part)
        return jax.eval_shape(agree, self._thin, self._held, gathered)[0][0]


def _donated(lane: Lane, *arguments: int) -> tuple[int, ...]:
    """Return which arguments are donated to a program of a lane: none on the host.

    A CPU plugin dispatches a program with donated arguments only once these are computed, so its
    device would idle between two programs.
    """
    return () if lane.devices[0].platform == "cpu" else arguments


def without_payload(made: Contribution) -> Contribution:
    """Return a contribution without its payload, which is part of that of another in its lane."""
    return replace(made, payload=Encoded([]))
