"""The programs of a window whose mean is computed by collectives, in a mapped function.

`accumulate` runs microbatches without a collective, so devices run at their own pace; `combine`
ends the window. With pending windows, the oldest of them is exchanged. It does not depend on the
current microbatches, so the exchange overlaps with them.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elche_jax.engine.axis import DeviceAxis
from elche_jax.engine.choice import chosen
from elche_jax.engine.fetch import CallArgs, Payload
from elche_jax.engine.loop import LoopHook, emulated_loop
from elche_jax.engine.microbatch import Carry
from elche_jax.engine.reduce import Mean
from elche_jax.engine.rule import Ended, Leaves, Rule
from elche_jax.engine.state import TrainState, averaging_of, with_averaging

Sums = dict[str, Any]
Exchanged = tuple[Mean, dict[str, Any], Leaves]
Result = tuple[tuple[TrainState, Any], dict[str, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carried:
    """A device's carry from call to call.

    Attributes:
        own: The carry of the rule.
        work: Microbatches and valid examples of the window over all devices, int32, `(2,)`.
        before: Sums of the pending windows, oldest first, see `Rule.sums_of`.
    """

    own: Carry
    work: Any
    before: tuple[Sums, ...]


@dataclass(frozen=True)
class CollectiveProgram:
    """The functions of a window, per device; pure and traced.

    Attributes:
        rule: The rule of the window.
        hook: Emulation, or None.
    """

    rule: Rule
    hook: LoopHook | None = None

    @property
    def pending(self) -> int:
        """Number of pending windows between two windows."""
        return self.rule.pending

    def zeros(self, state: TrainState) -> Carried:
        """Return the carry before the first window."""
        own = self.rule.zeros(state)
        return Carried(own, jnp.zeros(2, jnp.int32), (self.rule.sums_of(own),) * self.pending)

    def accumulate(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[Carried, Any], None]:
        """Run `call_args.count` microbatches.

        Returns:
            `((carried, token), None)`; the token is small and never donated, so that a
            thread can wait for it.
        """
        return self._loop(state, self._begun(state, carried, call_args), payload, call_args), None

    def combine(
        self, state: TrainState, carried: Carried, exchanged: Exchanged | None = None
    ) -> Result:
        """End the window.

        Args:
            state: The state at the start of the window.
            carried: The carry after its microbatches.
            exchanged: The result of the exchange, if it overlapped with the microbatches.

        Returns:
            `((state, finite), metrics)`; `finite` says whether the device's own part is finite.
        """
        after, new = self.rule.finish(state, carried.own)
        sums = (*carried.before, self.rule.sums_of(carried.own))[0]
        queue = [*(averaging_of(state).pending if self.pending else ()), new]

        def end(part: int) -> Result:
            oldest, *later = queue
            ended = Ended(state, after, oldest, part, later)
            made = exchanged or self._exchange(ended, sums)
            if self.pending:  # the same bits whether or not the exchange overlapped with the steps
                made = jax.lax.optimization_barrier(made)
            mean, metrics, error = made
            ended = replace(ended, after=with_averaging(after, error=error))
            now, fine = self.rule.apply(ended, mean)
            if self.pending:
                now = with_averaging(now, pending=tuple(later))
            return (now, fine & mean.sound), metrics | {"finite": metrics["finite"] & fine}

        branches = [partial(end, part) for part in range(self.rule.parts)]
        (now, fine), metrics = jax.lax.switch(state.step % len(branches), branches)
        now = self.advanced(now, carried)
        metrics |= self.rule.reports(state)
        own = new.own & fine if self.pending else new.own
        return (now, own), metrics

    def last_call(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[tuple[TrainState, Carried, Any], Any]:
        """Run the last call of a window and end the window, as one program.

        Returns:
            `((state, carried, finite), metrics)`; `finite` says whether the device's own part
            is finite.
        """
        carried = self._begun(state, carried, call_args)
        exchanged = None
        if self.pending:
            oldest = state.averaging.pending[0]
            exchanged = self._exchange(Ended(state, state, oldest, 0), carried.before[0])
        carried, _ = self._loop(state, carried, payload, call_args)
        if self.pending:  # as in two programs: if fused, loop and end would round differently
            carried, exchanged = jax.lax.optimization_barrier((carried, exchanged))
        (state, own), metrics = self.combine(state, carried, exchanged)
        return (state, carried, own), metrics

    def window(self, state: TrainState, payload: Payload, call_args: CallArgs) -> Result:
        """Run a whole window as one program, without a loop if it has a single microbatch."""
        carried = self.zeros(state)
        if payload.capacity(stacked=False) == 1 and self.hook is None:
            own = self.rule.body(state, payload, call_args)(jnp.int32(0), carried.own)
            carried = replace(carried, own=own, work=jnp.stack(call_args.totals))
        else:
            carried, _ = self._loop(state, carried, payload, call_args)
        return self.combine(state, carried)

    def unreported(self, carried: Carried) -> tuple[Sums, ...]:
        """Return the sums of the pending windows."""
        return (*carried.before, self.rule.sums_of(carried.own))[1:]

    def reporting(self, carried: Carried, unreported: tuple[Sums, ...]) -> Carried:
        """Insert the sums that the pending windows of an earlier run left."""
        *before, last = unreported
        own = carried.own.replace(**last)
        return replace(carried, own=own, before=(*carried.before[:1], *before))

    def _begun(self, state: TrainState, carried: Carried, call_args: CallArgs) -> Carried:
        """Return the carry of a call.

        In the first call of a window it is new, except for the pending sums.
        """
        start = replace(self.zeros(state), before=self.unreported(carried) if self.pending else ())
        return chosen(call_args.fresh, start, carried)

    def _loop(
        self, state: TrainState, carried: Carried, payload: Payload, call_args: CallArgs
    ) -> tuple[Carried, Any]:
        body = self.rule.body(state, payload, call_args)
        own, zero = emulated_loop(self.hook, state.step, call_args, body, carried.own)
        token = own.weight
        if zero is not None:
            # neither the sums nor the token may be ready before the emulated time is over
            own, token = own.replace(loss=own.loss + zero), token + zero
        return replace(carried, own=own, work=jnp.stack(call_args.totals)), token

    def advanced(self, state: TrainState, carried: Carried) -> TrainState:
        """Count the window in a state whose counters do not include it yet."""
        examples = carried.work[1]
        # it stays at its largest value, like optax's counters: a schedule has ended by then
        most = jnp.iinfo(state.examples.dtype).max
        return state.replace(
            microbatches=state.microbatches + carried.work[0],
            examples=jnp.minimum(state.examples, most - examples) + examples,
            step=state.step + 1,
        )

    def _exchange(self, ended: Ended, sums: Sums) -> Exchanged:
        before = ended.before
        contribution, error = self.rule.contribute(ended, sums)
        reduction = self.rule.reduction(before)
        axis = DeviceAxis(self.rule.size)
        mean, metrics = reduction(axis, contribution, before.step - self.pending)
        return mean, metrics, error
