"""The state of a run with an exchange on the host, between two windows."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elche_jax.engine.host.coordinator import Outcome
from elche_jax.engine.state import PendingUpdate, TrainState

PyTree = Any


@dataclass
class Begun:
    """A window that was launched and whose average is not applied yet.

    Attributes:
        number: Number of its dispatch.
        counts: Microbatches of every device of the job.
        examples: Valid examples of all of them.
        part: Index of the part of the parameters that is exchanged.
        pending: By rank, the device's update; None if it got no programs.
        before: By rank, the state at the start of the window; empty if devices run ahead.
        finite: By rank, the flag in its delivery, see `Session.finite`.
        carries: Whether its deliveries include local steps of earlier runs that are in no mean yet.
    """

    number: int
    counts: tuple[int, ...]
    examples: int
    part: int
    pending: list[PendingUpdate | None]
    before: list[TrainState]
    finite: list[Any]
    carries: bool


@dataclass
class Session:
    """The state that a run returned last, device by device, and its windows in flight.

    Attributes:
        parts: By rank, the state with trained parameters only and without the key.
        frozen: By rank, the frozen parameters and the key.
        step: Number of windows it has seen.
        finite: By rank, whether the state stayed finite in all means applied since the last
            delivery.
        metrics: Metrics of the window averaged last.
        begun: Windows whose average is not applied yet, oldest first.
        due: Known outcomes of the oldest of these windows.
        absent: Ranks of late devices, which get no programs.
        state: Weak reference to the state as returned; any other state starts a new session.
    """

    parts: list[TrainState]
    frozen: list[tuple[PyTree, Any]]
    step: int
    finite: list[Any]
    metrics: dict[str, Any]
    begun: list[Begun] = field(default_factory=list)
    due: deque[tuple[int, Outcome]] = field(default_factory=deque)
    absent: set[int] = field(default_factory=set)
    state: Callable[[], TrainState | None] = lambda: None

    @property
    def present(self) -> list[int]:
        """Ranks of the devices that get programs."""
        return [rank for rank in range(len(self.parts)) if rank not in self.absent]
