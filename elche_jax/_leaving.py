"""How a process leaves its job, and what it tells the others through JAX's coordinator.

The coordinator is in process 0. JAX ends the processes that are still connected when it is gone, so
process 0 leaves last, even with an error: it lets the others notice that, and waits for them.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import jax

from elche_jax import _coordinator

REASON_KEY = "elche_jax/raised/{}"
"""Key under which a process tells the others why it leaves, by its index."""

LEFT_KEY = "elche_jax/left/{}"
"""Key under which a process tells process 0 that it has left, by its index."""

EVERY_S = 0.02
"""Between two looks into the coordinator's store."""

PATIENCE_S = 30.0
"""Seconds that processes wait for each other if an error ends process 0."""


_kept: list[Any] = []
"""The coordinator of a process 0 that has left: it ends with the process, and not before."""


def tell_reason(why: str) -> None:
    """Tell the others why this process leaves the job."""
    _coordinator.tell(_coordinator.client(), REASON_KEY.format(_coordinator.index()), why)


def reason_of(process: int) -> str | None:
    """Return why a process has left the job; None if it did not tell."""
    return _coordinator.told(_coordinator.client(), REASON_KEY.format(process))


def has_left(client: Any, process: int) -> bool:
    """Return whether a process has left the job; `client` asks the coordinator."""
    return _coordinator.told(client, LEFT_KEY.format(process)) is not None


def disconnect() -> Any:
    """Leave the job, and tell that; the coordinator stays until process 0 has ended.

    Returns:
        Asks the coordinator, see `wait_for_others` and `wait_for_first`.
    """
    state, client = _coordinator.state(), _coordinator.client()
    if getattr(state, "service", None) is not None:
        _kept.append(state.service)  # else it would end here
        state.service = None
    jax.distributed.shutdown()
    _coordinator.tell(client, LEFT_KEY.format(_coordinator.index()), "left")
    return client


def wait_for_others(
    client: Any, processes: Collection[int], ended: Callable[[int], bool], seconds: float
) -> None:
    """Wait in process 0 until others have left; nobody can tell it without a coordinator.

    Args:
        client: What `disconnect` returned; None if the script itself has ended the job.
        processes: Their indices.
        ended: Returns whether one was seen to end without a word.
        seconds: How long at most.
    """

    def over() -> bool:
        left = all(has_left(client, one) or ended(one) for one in processes)
        return left or not _coordinator.answers(client)

    _wait(over, seconds)


def wait_for_first(client: Any) -> None:
    """Wait until process 0 has ended, so that whoever has started them sees it end first.

    At most `PATIENCE_S`.
    """
    _wait(lambda: not _coordinator.answers(client), PATIENCE_S)


def _wait(over: Callable[[], bool], seconds: float) -> None:
    """Wait; the coordinator tells nothing by itself to one who has left."""
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(EVERY_S)
