"""The programs of a window over several lanes.

A window is four programs. On every device, `accumulate` runs microbatches and `contribute` makes
the device's contribution. On the lead, `agree` computes what all devices agree on. `adopt` puts
it into the state of every device. With pending windows, `contribute` is the first program of a
window, and `agree` runs while other devices accumulate.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from elche_jax.engine.axis import LeadAxis, ProcessAxis
from elche_jax.engine.collective import Carried, CollectiveProgram
from elche_jax.engine.collectives import broadcast_from
from elche_jax.engine.exchange import packed_psum
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.reduce import Contribution
from elche_jax.engine.rule import Agreed, Ended, Leaves
from elche_jax.engine.state import TrainState, averaging_of, with_averaging

PyTree = Any
Sent = tuple[Any, Leaves]


@dataclass(frozen=True)
class LanesProgram(CollectiveProgram):
    """The functions of a window; their states do not contain what only the lead holds.

    `accumulate` is inherited. The others take states without frozen parameters and the key, which
    they would only copy.

    Attributes:
        splits: For each lane, the number of parts in which its devices run a microbatch.
        across: The devices of all processes, for `agree_across`; otherwise None.
        alike: Whether the leads of all processes compute the same bits.
    """

    splits: tuple[int, ...] = ()
    across: ProcessAxis | None = None
    alike: bool = True

    def in_lane(self, lane: int) -> CollectiveProgram:
        """Return the functions as the devices of a lane run them."""
        return replace(self, rule=self.rule.in_parts(self.splits[lane]))

    def sums_in_lane(self, state: TrainState) -> bool:
        """Return whether the devices of a lane sum payloads before these cross to the lead."""
        return self.rule.reduction(state).plain

    def contribute(
        self, part: int, size: int, state: TrainState, carried: Carried
    ) -> tuple[tuple[Contribution, Sent], None]:
        """Make a device's contribution to the mean that this window applies.

        Args:
            part: Index of the part of the parameters that is exchanged.
            size: Number of devices of the lane.
            state: The state at the start of the window.
            carried: The carry after the window's microbatches; with pending windows, before
                them.

        Returns:
            The contribution; and, for `adopt`, whether it is finite and the new rounding errors.
        """
        if self.pending:
            ended = Ended(state, state, state.averaging.pending[0], part)
            sums = self.unreported(carried)[0]
        else:
            ended = Ended(state, *self.rule.thin.finish(state, carried.own), part)
            sums = self.rule.sums_of(carried.own)
        made, error = self.rule.thin.contribute(ended, sums)
        if size > 1 and self.sums_in_lane(state):
            made = replace(made, payload=packed_psum(made.payload, AXIS))
        return (made, (ended.done.own, error)), None

    def agree(
        self, part: int, state: TrainState, held: PyTree, contributions: list[Contribution]
    ) -> tuple[tuple[Agreed, PyTree], dict[str, Any]]:
        """Compute on the lead what all devices agree on.

        Args:
            part: Index of the part of the parameters that is exchanged.
            state: The lead's state at the start of the window.
            held: What only the lead holds.
            contributions: The contributions by rank.

        Returns:
            What the devices agree on, with the new value of what the lead holds; and the metrics.
        """
        rule, whole = self.rule.thin, self.rule.join_lead(state, held)
        window = state.step - self.pending
        axis = self.across or LeadAxis(self.rule.size)
        mean, metrics = self.rule.reduction(state)(axis, contributions, window)
        # the device's own part of a window changes nothing that `agree` reads
        none: Any = None
        agreed = rule.agree(Ended(whole, whole, none, part), mean)
        metrics |= {"finite": metrics["finite"] & agreed.fine} | rule.reports(state)
        agreed = replace(agreed, fine=agreed.fine & mean.sound)
        return (replace(agreed, held=()), agreed.held), metrics

    def agree_across(
        self, part: int, state: TrainState, held: PyTree, contributions: list[Contribution],
        measured: Any,
    ) -> tuple[tuple[Agreed, PyTree], tuple[dict[str, Any], Any]]:  # fmt: skip
        """Compute on the leads of all processes what all devices agree on.

        Args:
            part: Index of the part of the parameters that is exchanged.
            state: This lead's state at the start of the window.
            held: What only the leads hold.
            contributions: Those of this process's devices.
            measured: A row of `Measured` for each of them. With pending windows, rows are those
                of the previous window; otherwise `own` is added here.

        Returns:
            What `agree` returns, with the rows of all devices, by rank, beside the metrics.
        """
        (agreed, held), metrics = self.agree(part, state, held, contributions)
        if not self.alike:  # metrics, too: guards and cadences read them
            agreed, metrics = broadcast_from((agreed, metrics), 0, AXIS)
        rows = list(measured)
        if not self.pending:
            pairs = zip(measured, contributions, strict=True)
            rows = [jnp.append(row[:-1], one.row[1]) for row, one in pairs]
        assert self.across is not None
        return (agreed, held), (metrics, self.across.rows(rows))

    def adopt(
        self, part: int, state: TrainState, carried: Carried, sent: Sent, agreed: Agreed
    ) -> tuple[tuple[TrainState, Any], None]:
        """Put what the devices agree on into a device's state.

        Args:
            part: Index of the part of the parameters that was exchanged.
            state: The state at the start of the window.
            carried: The carry after the window's microbatches.
            sent: The second result of `contribute`.
            agreed: What the devices agree on.

        Returns:
            The new state, and whether the device's own part is finite. If the new parameters are
            `agreed.trained`, the state has none, so that the program does not copy them.
        """
        rule, (own, error) = self.rule.thin, sent
        after, new = rule.finish(state, carried.own)
        oldest, *later = (*(averaging_of(state).pending if self.pending else ()), new)
        after = with_averaging(after, error=error)
        now = rule.adopt(Ended(state, after, oldest, part, later), agreed)
        if self.pending:
            now, own = with_averaging(now, pending=tuple(later)), new.own & agreed.fine
        if rule.takes_agreed:
            now = now.replace(params=None)
        return (self.advanced(now, carried), own), None
