"""The programs of a window whose devices exchange among themselves, in a mapped function.

`accumulate` runs microbatches, without a collective, so that devices run at their own pace;
`combine` ends the window. With windows pending, what is exchanged is the oldest of them, which
needs nothing of the microbatches and can go on beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.axis import DeviceAxis
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loop import LoopHook, run_loop
from elche_jax.engine.microbatch import chosen
from elche_jax.engine.reduce import Mean
from elche_jax.engine.rule import Ended, Leaves, Rule
from elche_jax.engine.state import TrainState

PyTree = Any
Sums = dict[str, Any]
Exchanged = tuple[Mean, dict[str, Any], Leaves]
Result = tuple[TrainState, Any, dict[str, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carried:
    """What a device carries from call to call.

    Attributes:
        own: What the rule does.
        work: Microbatches and valid examples of the window over all devices, int32, `(2,)`.
        before: Sums of the windows that are pending, oldest first, see `Rule.sums_of`.
    """

    own: Any
    work: Any
    before: tuple[Sums, ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """The functions of a window, per device; traced, no state of their own.

    Attributes:
        rule: What the window does.
        hook: Emulation, or None.
    """

    rule: Rule
    hook: LoopHook | None = None

    @property
    def pending(self) -> int:
        """Windows that are pending at the end of one."""
        return self.rule.pending

    def reads(self, state: TrainState) -> TrainState:
        """What microbatches read: every argument costs the thread that dispatches."""
        return self.rule.reads(state)

    def zeros(self, state: TrainState) -> Carried:
        """What is carried before the first window."""
        own = self.rule.zeros(state)
        return Carried(own, jnp.zeros(2, jnp.int32), (self.rule.sums_of(own),) * self.pending)

    def accumulate(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[Carried, Any], None]:
        """Runs `call_args.count` microbatches.

        Returns:
            `((carried, token), None)`; the token is small and never donated, so that a
            thread can wait for it.
        """
        return self._loop(state, self._begun(state, carried, call_args), payload, call_args), None

    def combine(self, state: TrainState, carried: Carried) -> tuple[tuple[TrainState, Any], Any]:
        """Ends the window.

        Returns:
            `((the new state, whether the device's own part is finite), metrics)`.
        """
        state, own, metrics = self._end(state, carried)
        return (state, own), metrics

    def last_call(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[TrainState, Carried, Any], Any]:
        """The last call of a window and its end as one program.

        Returns:
            `((the new state, what is carried, whether the own part is finite), metrics)`.
        """
        carried = self._begun(state, carried, call_args)
        exchanged = None
        if self.pending:
            oldest = state.averaging.pending[0]
            exchanged = self._exchange(Ended(state, state, oldest, 0), carried.before[0])
        carried, _ = self._loop(state, carried, payload, call_args)
        if self.pending:
            carried, exchanged = jax.lax.optimization_barrier((carried, exchanged))
        state, own, metrics = self._end(state, carried, exchanged)
        return (state, carried, own), metrics

    def window(
        self, single: bool, state: TrainState, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[TrainState, Any], Any]:
        """A whole window as one program; `single` says that it is one microbatch."""
        carried = self.zeros(state)
        if single and self.hook is None:
            own = self.rule.body(state, payload, call_args)(jnp.int32(0), carried.own)
            carried = replace(carried, own=own, work=jnp.stack(call_args.totals))
        else:
            carried, _ = self._loop(state, carried, payload, call_args)
        return self.combine(state, carried)

    def unreported(self, carried: Carried) -> tuple[Sums, ...]:
        """The sums of windows that are pending."""
        return (*carried.before, self.rule.sums_of(carried.own))[1:]

    def reporting(self, carried: Carried, unreported: tuple[Sums, ...]) -> Carried:
        """The same with those that another run's windows have left."""
        *before, last = unreported
        own = carried.own.replace(**last)
        return replace(carried, own=own, before=(*carried.before[:1], *before))

    def _begun(self, state: TrainState, carried: Carried, call_args: CallArgs) -> Carried:
        """What to go on with; in the first call of a window only what is pending is kept."""
        start = replace(self.zeros(state), before=self.unreported(carried) if self.pending else ())
        return chosen(call_args.fresh, start, carried)

    def _loop(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[Carried, Any]:
        body = self.rule.body(state, payload, call_args)
        own, token = run_loop(self.hook, state.step, call_args, body, carried.own)
        return replace(carried, own=own, work=jnp.stack(call_args.totals)), token

    def _end(
        self, state: TrainState, carried: Carried, exchanged: Exchanged | None = None
    ) -> Result:
        after, new = self.rule.finish(state, carried.own)
        sums = (*carried.before, self.rule.sums_of(carried.own))[0]
        queue = [*(state.averaging.pending if self.pending else ()), new]

        def end(part: int) -> Result:
            oldest, *later = queue
            ended = Ended(state, after, oldest, part, later)
            made = exchanged or self._exchange(ended, sums)
            if self.pending:  # the same bits, whether or not it went on beside the steps
                made = jax.lax.optimization_barrier(made)
            mean, metrics, error = made
            ended = replace(ended, after=with_averaging(after, error=error))
            now, fine = self.rule.apply(ended, mean)
            if self.pending:
                now = with_averaging(now, pending=tuple(later))
            return now, fine & mean.sound, metrics | {"finite": metrics["finite"] & fine}

        branches: list[Callable[[], Result]] = [partial(end, p) for p in range(self.rule.parts)]
        if len(branches) == 1:
            now, fine, metrics = end(0)
        else:
            now, fine, metrics = jax.lax.switch(state.step % len(branches), branches)
        now = now.replace(
            microbatches=state.microbatches + carried.work[0],
            examples=state.examples + carried.work[1],
            step=state.step + 1,
        )
        metrics |= self.rule.reports(state)
        if not self.pending:
            return now, new.own, metrics
        # the metrics are those of an earlier window, or of none
        metrics["loss"] = jnp.where(metrics["weight"] > 0, metrics["loss"], jnp.nan)
        return now, new.own & fine, metrics

    def _exchange(self, ended: Ended, sums: Sums) -> Exchanged:
        before = ended.before
        contribution, error = self.rule.contribute(ended, sums)
        reduction = self.rule.reduction(before)
        axis = DeviceAxis(self.rule.size)
        mean, metrics = reduction(axis, contribution, before.step - self.pending)
        return mean, metrics, error


def with_averaging(state: TrainState, **changes: Any) -> TrainState:
    """A state with some of what averaging adds changed, where it adds something."""
    if state.averaging is None:
        return state
    return state.replace(averaging=state.averaging.replace(**changes))
