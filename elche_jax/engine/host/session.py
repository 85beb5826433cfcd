"""What a run over the host knows between two windows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elche_jax.engine.state import PendingUpdate, TrainState

PyTree = Any


@dataclass
class Begun:
    """A window that was launched and whose average the devices have not taken up.

    Attributes:
        number: Number of its dispatch.
        part: The part of the parameters that is exchanged.
        pending: What every device did in it; None of one that got no programs.
        before: By rank the state that it began with; empty where devices run ahead.
    """

    number: int
    part: int
    pending: list[PendingUpdate | None]
    before: list[TrainState]


@dataclass
class Session:
    """What a run knows of the state it has returned last.

    Attributes:
        parts: That state by rank, `params` being those that are trained, without the key.
        frozen: By rank the frozen parameters and the key.
        step: Windows it has had.
        fine: By rank whether all parameters were finite that were taken up since the last
            delivery.
        metrics: Metrics of the window averaged last.
        begun: Windows that are not averaged yet, oldest first.
        absent: Ranks that get no programs, as they are late.
        state: That state, weakly; with another one a new session begins.
    """

    parts: list[TrainState]
    frozen: list[tuple[PyTree, Any]]
    step: int
    fine: list[Any]
    metrics: dict[str, Any]
    begun: list[Begun] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    state: Callable[[], TrainState | None] = lambda: None

    @property
    def present(self) -> list[int]:
        """Ranks that get programs."""
        return [rank for rank in range(len(self.parts)) if rank not in self.absent]
