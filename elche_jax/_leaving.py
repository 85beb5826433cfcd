"""How a process leaves its job, and what it tells the others through JAX's coordinator.

The coordinator is in process 0. JAX ends the processes that are still connected when it is gone, so
process 0 leaves last, even with an error: it lets the others notice that, and waits for them.
"""

import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import jax

REASON_KEY = "elche_jax/raised/{}"
"""Key under which a process tells the others why it leaves, by its index."""

LEFT_KEY = "elche_jax/left/{}"
"""Key under which a process tells process 0 that it has left, by its index."""

NO_KEY = "elche_jax/nothing"
"""A key that is never set."""

EVERY_S = 0.02
"""Between two looks into the coordinator's store."""

PATIENCE_S = 30.0
"""Seconds that processes wait for each other if an error ends process 0."""


_kept: list[Any] = []
"""The coordinator of a process 0 that has left: it ends with the process, and not before."""


def index() -> int:
    """Return the index of this process; unlike `jax.process_index`, it starts no backend."""
    known = getattr(_state(), "process_id", None)
    return jax.process_index() if known is None else int(known)


def others() -> list[int]:
    """Return the indices of the other processes of the job."""
    return [one for one in range(getattr(_state(), "num_processes", 1)) if one != index()]


def tell_reason(why: str) -> None:
    """Tell the others why this process leaves the job."""
    with suppress(jax.errors.JaxRuntimeError):  # it is gone: there is nobody to tell
        if (client := _client()) is not None:
            client.key_value_set(REASON_KEY.format(index()), why)


def reason_of(process: int) -> str | None:
    """Return why a process has left the job; None if it did not tell."""
    return _found(_client(), REASON_KEY.format(process))


def disconnect() -> Any:
    """Leave the job, and tell that; the coordinator stays until process 0 has ended.

    Returns:
        Asks the coordinator, see `wait_for_others` and `wait_for_first`.
    """
    state, client = _state(), _client()
    if getattr(state, "service", None) is not None:
        _kept.append(state.service)  # else it would end here
        state.service = None
    jax.distributed.shutdown()
    with suppress(jax.errors.JaxRuntimeError):  # process 0 has ended: nobody asks
        if client is not None:
            client.key_value_set(LEFT_KEY.format(index()), "left")
    return client


def wait_for_others(client: Any, processes: Collection[int], seconds: float) -> None:
    """Wait in process 0 until others have left; nobody can tell it without a coordinator.

    Args:
        client: What `disconnect` returned; None if the script itself has ended the job.
        processes: Their indices.
        seconds: How long at most.
    """

    def over() -> bool:
        left = all(_found(client, LEFT_KEY.format(one)) for one in processes)
        return left or not _answers(client)

    _wait(over, seconds)


def wait_for_first(client: Any) -> None:
    """Wait until process 0 has ended, so that whoever has started them sees it end first.

    At most `PATIENCE_S`.
    """
    _wait(lambda: not _answers(client), PATIENCE_S)


def _wait(over: Callable[[], bool], seconds: float) -> None:
    """Wait; the coordinator tells nothing by itself to one who has left."""
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:
        time.sleep(EVERY_S)


def _state() -> Any:
    """Return what JAX knows of the job."""
    distributed = sys.modules.get("jax._src.distributed")  # the store of keys has no public name
    return getattr(distributed, "global_state", None)


def _client() -> Any:
    """Return the client of JAX's coordinator; None after the end of the job."""
    return getattr(_state(), "client", None)


def _found(client: Any, key: str) -> str | None:
    """Return what is told under a key; None if nothing is, or there is no coordinator."""
    with suppress(jax.errors.JaxRuntimeError):
        return None if client is None else client.key_value_try_get(key)
    return None


def _answers(client: Any) -> bool:
    """Return whether there still is a coordinator."""
    try:
        return client is not None and client.key_value_try_get(NO_KEY) is None
    except jax.errors.JaxRuntimeError as error:
        return "NOT_FOUND" in str(error)
