"""How a process leaves its job, and what it tells the others through JAX's coordinator.

The coordinator runs in process 0. When it is gone, JAX ends the processes that are still connected,
so process 0 leaves last, even with an error: it lets the others notice the error, and waits for
them.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import jax

from elche_jax import _coordinator

REASON_KEY = "elche_jax/raised/{}"
"""Key under which a process, by its index, tells the others why it leaves."""

LEFT_KEY = "elche_jax/left/{}"
"""Key under which a process, by its index, tells process 0 that it has left."""

EVERY_S = 0.02
"""Seconds between two reads of the coordinator's store."""

PATIENCE_S = 30.0
"""Longest time in seconds that processes wait for each other if an error ends process 0."""


_kept: list[Any] = []
"""The coordinator of a process 0 that has left, kept so that it does not end before the process."""


def tell_reason(why: str) -> None:
    """Tell the others why this process leaves the job."""
    _coordinator.tell(_coordinator.client(), REASON_KEY.format(_coordinator.index()), why)


def reason_of(process: int) -> str | None:
    """Return why a process has left the job; None if it gave no reason."""
    return _coordinator.told(_coordinator.client(), REASON_KEY.format(process))


def has_left(client: Any, process: int) -> bool:
    """Return whether a process has left the job; `client` asks the coordinator."""
    return _coordinator.told(client, LEFT_KEY.format(process)) is not None


def disconnect() -> Any:
    """Leave the job, and say so; the coordinator stays until process 0 has ended.

    Returns:
        The coordinator's client, for `wait_for_others` and `wait_for_first`.
    """
    state, client = _coordinator.state(), _coordinator.client()
    if getattr(state, "service", None) is not None:
        _kept.append(state.service)  # otherwise it would end here
        state.service = None
    jax.distributed.shutdown()
    _coordinator.tell(client, LEFT_KEY.format(_coordinator.index()), "left")
    return client


def wait_for_others(
    client: Any, processes: Collection[int], ended: Callable[[int], bool], seconds: float
) -> None:
    """Wait in process 0 until others have left; return at once if there is no coordinator.

    Args:
        client: What `disconnect` returned; None if the script itself has ended the job.
        processes: Indices of the others.
        ended: Returns whether a process was seen to end without saying that it left.
        seconds: Longest time to wait.
    """

    def over() -> bool:
        left = all(has_left(client, one) or ended(one) for one in processes)
        return left or not _coordinator.answers(client)

    _wait(over, seconds)


def wait_for_first(client: Any) -> None:
    """Wait until process 0 has ended, so that a launcher sees its end first.

    At most `PATIENCE_S`.
    """
    _wait(lambda: not _coordinator.answers(client), PATIENCE_S)


def _wait(over: Callable[[], bool], seconds: float) -> None:
    """Poll, as the coordinator does not notify a process that has left."""
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(EVERY_S)
