"""Compiles and dispatches the programs of a window on the devices of a job."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax.data.split import Range
from elche_jax.engine.accumulators import Accumulators
from elche_jax.engine.collective import CollectiveProgram
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.lane import Fleet, MappedFunction
from elche_jax.engine.mapped import PerDevice
from elche_jax.engine.rule import Rule
from elche_jax.engine.shapes import one_of, shapes_of
from elche_jax.engine.state import TrainState, averaging_of, no_update, with_averaging
from elche_jax.engine.survey import Survey
from elche_jax.engine.timing import Clock, LoopClock, Stopwatch

PyTree = Any
_NUMBERS = count()

TOGETHER = 8
"""Largest number of programs that are compiled at the same time."""


class Program(NamedTuple):
    """A program that may not be compiled yet.

    Attributes:
        key: Its key in the compile cache.
        mapped: The function.
        shapes: Returns the shapes of its stacked arguments.
    """

    key: Hashable
    mapped: MappedFunction
    shapes: Callable[[], tuple[PyTree, ...]]

    def build(self) -> PerDevice:
        """Compile it."""
        return self.traced()()

    def traced(self) -> Callable[[], PerDevice]:
        """Trace it and return a function that compiles it: only compiling runs in parallel."""
        return partial(self.mapped.finish, self.mapped.lower(*self.shapes()))


def compiled(programs: Sequence[Program], cache: CompileCache) -> list[PerDevice]:
    """Return compiled programs; missing ones are traced in turn and compiled in parallel."""
    made: list[PerDevice] = []
    for at in range(0, len(programs), TOGETHER):
        some = programs[at : at + TOGETHER]
        for one in {one.key: one for one in some}.values():  # several calls may share one
            if not cache.ready(one.key):
                cache.begin(one.key, one.traced())
        made += [cache.get(one.key, one.build) for one in some]
    return made


@dataclass(frozen=True)
class Call:
    """One call of a program.

    Attributes:
        payload: The data, stacked.
        call_args: Scalar arguments, stacked.
        ranges: Microbatches of each device, as positions in the window.
    """

    payload: Payload
    call_args: CallArgs
    ranges: tuple[Range, ...]


class Counted(Protocol):
    """A window whose work is known.

    Attributes:
        counts: Microbatches of every device of the job.
        examples: Valid examples of all of them.
    """

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def examples(self) -> int: ...


@dataclass(frozen=True)
class Launch:
    """The dispatch of a window.

    Attributes:
        watch: Clock of the run; None if the run was closed.
        number: Index of the dispatch in the run.
        at: Start of the dispatch, `time.perf_counter` seconds.
        counts: Microbatches of every device of the job.
        examples: Valid examples of all of them.
        survey: What processes tell each other about it; None in a job of one process.
        timed: Whether the clock times it.
        hold: Called before the dispatch of a program that the state is donated to. From then on, a
            Ctrl-C waits until the loop has the new state; a second one does not. Returns whether
            the first one waits.
    """

    watch: Clock | None
    number: int
    at: float
    counts: tuple[int, ...]
    examples: int = 0
    survey: Survey | None = None
    timed: bool = True
    hold: Callable[[], bool] = lambda: False

    def __call__(self, token: Any, ranks: Sequence[int] | None = None) -> None:
        """Pass the clock a token that becomes ready when a device has accumulated.

        Args:
            token: The token, stacked.
            ranks: Ranks of its entries; None for all devices.
        """
        if self.watch is not None and self.timed:
            self.watch.accumulating(self.number, self.at, token, ranks)


class FleetRunner(ABC):
    """Compiles and dispatches programs for the devices of a fleet.

    Attributes:
        fleet: The devices.
        begun: Whether the programs of the first window are compiled.
        capacities: For each layout of the data, the capacities compiled or requested.

    Args:
        fleet: The devices.
        cache: Cache of compiled programs.
    """

    def __init__(self, fleet: Fleet, cache: CompileCache):
        self.fleet, self._cache = fleet, cache
        # Programs of two runners differ even if all shapes agree. A number identifies the
        # runner, as it is cheap to hash in every window.
        self._number = next(_NUMBERS)
        self.begun = False
        self.capacities: dict[Hashable, set[int]] = {}

    @property
    def runs_ahead(self) -> bool:
        """Whether the loop goes on while the processes of a job exchange a window.

        If one of them ends, the others must then take back what they have dispatched since.
        """
        return False

    @abstractmethod
    def begin(self, calls: Sequence[Call]) -> None:
        """Compile the programs of a window before its dispatch, so that it can be timed.

        Args:
            calls: The calls of the window.
        """

    @abstractmethod
    def _programs(self, payload: Payload) -> list[Program]:
        """Return the programs that run microbatches of data of these shapes."""

    def watch(
        self,
        done: Callable[..., None],
        learned: Callable[..., None],
        failed: Callable[..., None],
    ) -> Clock:
        """Return a clock for the windows of a run; closing it ends its threads.

        Args:
            done: Called with the times of every finished window, in order.
            learned: Called with the times of a window that finished without some device,
                once that device is done, too.
            failed: Called with an exception raised in a thread.
        """
        # `learned` is never called: no window finishes without a device
        if self.fleet.alone:  # the loop itself waits, without a thread
            return LoopClock(done)
        return Stopwatch(self.fleet.world_size, done, failed)

    def ready(self, payload: Payload) -> bool:
        """Return whether the programs for data of these shapes are compiled."""
        return all(self._cache.ready(program.key) for program in self._programs(payload))

    def prepare(self, payload: Payload) -> None:
        """Compile the programs for data of these shapes in the background."""
        for program in self._programs(shapes_of(payload)):
            self._cache.prepare(program.key, program.build)

    def _get(self, program: Program) -> PerDevice:
        """Return the compiled program."""
        return self._cache.get(program.key, program.build)

    def _mapped(
        self, name: str, mapped: MappedFunction, payload: Payload, *carried: PyTree
    ) -> Program:
        """Return a program that takes data; `carried` are the shapes of its first arguments."""

        def shapes() -> tuple[PyTree, ...]:  # not for the key, which every window asks for
            shape = jax.ShapeDtypeStruct((self.fleet.world_size, CallArgs.WIDTH), jnp.int32)
            return *carried, payload, CallArgs(shape)

        return Program((name, self._number, payload.signature), mapped, shapes)


class WindowRunner(FleetRunner):
    """Runs training windows over some transport.

    Only the training thread may call `run`. `prepare` may be called from any thread.

    Attributes:
        state: Shapes of the stacked state.

    Args:
        fleet: The devices.
        cache: Cache of compiled programs.
        state: Shapes of the stacked state.
        rule: The rule that combines windows.
    """

    def __init__(self, fleet: Fleet, cache: CompileCache, state: TrainState, rule: Rule):
        super().__init__(fleet, cache)
        self.state, self._rule = state, rule

    def replicated(self, state: TrainState) -> TrainState:
        """Return the part of a state that is equal on all devices."""
        return self._rule.common(state)

    @abstractmethod
    def run(
        self, state: TrainState, calls: Sequence[Call], launch: Launch, fused: bool = False
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """Dispatch a window.

        Args:
            state: Stacked state; its buffers are donated.
            calls: The calls of the accumulating program, in order.
            launch: The dispatch. Called with the token of the accumulation before the combine
                is dispatched, if these are two programs.
            fused: Run the last call and the combine as one program, see `fuses`; the end of
                the accumulation is then unknown.

        Returns:
            The new state; the metrics; and the token, a stacked array that is never donated. Its
            entry `d` is ready when device `d` is done, and says whether the device's own sums are
            finite.
        """

    def fuses(self, payload: Payload) -> bool:
        """Return whether the last call and the combine can run as one compiled program.

        If the program is not compiled yet, it starts compiling in the background.

        Args:
            payload: The data of the last call.
        """
        return False  # what the devices agree on is computed between two programs

    @property
    def may_fuse(self) -> bool:
        """Whether `fuses` returns true once its program is compiled."""
        return False

    @abstractmethod
    def release(self) -> None:
        """Free what is kept on the devices between windows; the next window allocates it again."""

    def put_back(self, state: TrainState, lost: Sequence[Counted]) -> TrainState:
        """Return a state in which nothing is pending, to run the pending windows again.

        Parameters and merged model state are those of the last mean. A device keeps what is its
        own: the state of its optimizer under `optimizer_state="keep"`, rounding errors, and model
        state that is not merged.

        Args:
            state: A state between two windows; it is not modified, and shares arrays with the
                result.
            lost: The windows whose updates are pending in it.
        """

        def zero(leaf: Any) -> Any:
            return self.fleet.put(np.zeros(leaf.shape, leaf.dtype))

        def less(leaf: Any, number: int) -> Any:
            return self.fleet.put(np.asarray(leaf) - leaf.dtype.type(number))

        def apart(leaf: Any) -> Any:  # no array may be in a state twice
            return self.fleet.put(leaf) if isinstance(leaf, np.ndarray) else leaf.copy()

        self.release()  # frees what belongs to the lost windows
        state = self._rule.agreed(state)
        kept = averaging_of(state)
        unchanged = self._rule.merge_rules.unchanged(kept.merged)
        nothing = tuple(no_update(one, unchanged) for one in kept.pending)
        base, merged, pending = jax.tree.map(apart, (kept.base, kept.merged, nothing))
        steps = jax.tree.map(zero, kept.steps)
        state = with_averaging(state, base=base, merged=merged, steps=steps, pending=pending)
        return state.replace(
            microbatches=less(state.microbatches, sum(sum(one.counts) for one in lost)),
            examples=less(state.examples, sum(one.examples for one in lost)),
            step=less(state.step, len(lost)),
        )

    def take_back(self, state: TrainState, clock: Clock, windows: int) -> TrainState | None:
        """Return the state before the lost windows, as if they had not run.

        All known means are applied, and nothing is pending, see `put_back`. Called only if
        `runs_ahead`, after a `run` that raised `ExchangeLost` or between two calls of `run`.

        Args:
            state: The state before that `run`.
            clock: The clock of the run.
            windows: Number of dispatched windows that are lost, without the one of that `run`.

        Returns:
            The state; None if these windows are not pending in `state`.
        """
        raise NotImplementedError  # not called if the loop waits for exchanges


class Runner(WindowRunner):
    """Runs windows whose devices exchange among themselves.

    Attributes:
        sums: The devices' sums.

    Args:
        program: The computation of one device.
        fleet: The devices.
        cache: Cache of compiled programs.
        state: Shapes of the stacked state.
    """

    def __init__(
        self, program: CollectiveProgram, fleet: Fleet, cache: CompileCache, state: TrainState
    ):
        super().__init__(fleet, cache, state, program.rule)
        # donates only the sums: later calls and the combine still read the state
        self._accumulate = fleet.mapped(program.accumulate, donate=(1,))
        # does not donate the sums: the next window reuses their buffers
        self._combine = fleet.mapped(program.combine, donate=(0,))
        self._window = fleet.mapped(program.window, donate=(0,))
        self._last = fleet.mapped(program.last_call, donate=(0, 1))
        one = one_of(state)
        self._read_shapes = program.rule.reads(state)
        self.sums = Accumulators(program, fleet, one)
        self._multiple_calls = False

    def begin(self, calls: Sequence[Call]) -> None:
        """See `FleetRunner.begin`; the combine, which takes longest, compiles in parallel."""
        self._multiple_calls |= len(calls) > 1  # from now on two programs serve all windows
        if self._one_program:
            self._get(self._program(calls[0].payload))
        else:
            data = [self._program(call.payload) for call in calls]
            compiled([self._combine_program(), *data], self._cache)
            # allocated before the dispatch, as the first window is timed
            self.sums.put(self.sums.take())
        self.begun = True

    def fuses(self, payload: Payload) -> bool:
        """See `WindowRunner.fuses`."""
        if not self.may_fuse:
            return False
        last = self._last_program(payload)
        if self._cache.ready(last.key):
            return True
        self._cache.prepare(last.key, self._last_program(shapes_of(payload)).build)
        return False

    @property
    def may_fuse(self) -> bool:
        """See `WindowRunner.may_fuse`."""
        return not self._one_program

    @property
    def _one_program(self) -> bool:
        """Whether a window is one program: a single device has nothing to time separately."""
        return self.fleet.alone and not self._multiple_calls

    def run(
        self, state: TrainState, calls: Sequence[Call], launch: Launch, fused: bool = False
    ) -> tuple[TrainState, dict[str, Any], Any]:
        """See `WindowRunner.run`."""
        self._multiple_calls |= len(calls) > 1
        if self._one_program:
            whole = self._get(self._program(calls[0].payload))
            launch.hold()
            (state, end), metrics = whole(state, calls[0].payload, calls[0].call_args)
            return state, metrics, end
        read, token, sums = self._rule.reads(state), None, None
        for call in calls[:-1] if fused else calls:
            accumulate = self._get(self._program(call.payload))
            (sums, token), _ = accumulate(read, self.sums.take(), call.payload, call.call_args)
            self.sums.put(sums)
        if fused:
            last = self._get(self._last_program(calls[-1].payload))
            launch.hold()
            (state, sums, end), metrics = last(
                state, self.sums.take(), calls[-1].payload, calls[-1].call_args
            )
            self.sums.put(sums)
            return state, metrics, end
        combine = self._get(self._combine_program())
        assert token is not None  # a window has at least one call
        launch(token)
        launch.hold()
        (state, end), metrics = combine(state, sums)
        return state, metrics, end

    def release(self) -> None:
        """See `WindowRunner.release`."""
        self.sums.release()

    def _programs(self, payload: Payload) -> list[Program]:
        return [self._program(payload)]

    def _program(self, payload: Payload) -> Program:
        if self._one_program:
            return self._mapped("window", self._window, payload, self.state)
        shapes = (self._read_shapes, self.sums.shapes)
        return self._mapped("accumulate", self._accumulate, payload, *shapes)

    def _last_program(self, payload: Payload) -> Program:
        return self._mapped("last", self._last, payload, self.state, self.sums.shapes)

    def _combine_program(self) -> Program:
        shapes = (self.state, self.sums.shapes)
        return Program(("combine", self._number), self._combine, lambda: shapes)
