"""What a run over the host knows between two windows."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from elche_jax.engine.host.coordinator import Outcome
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
        due: What came of the first of these, where another run has closed them.
        absent: Ranks that get no programs, as they are late.
        state: That state, weakly; with another one a new session begins.
    """

    parts: list[TrainState]
    frozen: list[tuple[PyTree, Any]]
    step: int
    fine: list[Any]
    metrics: dict[str, Any]
    begun: list[Begun] = field(default_factory=list)
    due: deque[tuple[int, Outcome]] = field(default_factory=deque)
    absent: set[int] = field(default_factory=set)
    state: Callable[[], TrainState | None] = lambda: None

    @property
    def present(self) -> list[int]:
        """Ranks that get programs."""
        return [rank for rank in range(len(self.parts)) if rank not in self.absent]


class Keeps(Protocol):
    """What keeps a session between two runs.

    Attributes:
        left: The session.
    """

    left: Session | None


def keeping(runner: Keeps) -> Callable[[Session, list[tuple[int, Outcome]]], None]:
    """Keeps what a run leaves for the next one, as long as there is its state."""
    owner = weakref.ref(runner)

    def forget(_: Any) -> None:
        runner = owner()
        if runner is not None:
            runner.left = None

    def keep(session: Session, closed: list[tuple[int, Outcome]]) -> None:
        runner, state = owner(), session.state()
        if runner is None or state is None:
            return
        # numbers of their own: the next run counts from 1
        session.begun = [replace(one, number=-i) for i, one in enumerate(session.begun)]
        session.due = deque((-i, outcome) for i, (_, outcome) in enumerate(closed))
        session.state = weakref.ref(state, forget)
        runner.left = session

    return keep
