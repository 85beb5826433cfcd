"""JAX's coordinator, whose store of keys the processes of a job use to tell each other things.

It runs in process 0. Nothing here waits: a process that has left the job, or has joined none, gets
no answer.
"""

import sys
from contextlib import suppress
from typing import Any

import jax

NO_KEY = "elche_jax/nothing"
"""A key that is never set."""

JOIN_S = 5
"""Seconds within which the coordinator answers a process that joins in another one's name."""


def state() -> Any:
    """Return what JAX knows of the job."""
    distributed = sys.modules.get("jax._src.distributed")  # the store has no public name
    return getattr(distributed, "global_state", None)


def client() -> Any:
    """Return the client of JAX's coordinator; None after the end of the job."""
    return getattr(state(), "client", None)


def index() -> int:
    """Return the index of this process; unlike `jax.process_index`, it starts no backend."""
    known = getattr(state(), "process_id", None)
    return jax.process_index() if known is None else int(known)


def others() -> list[int]:
    """Return the indices of the other processes of the job."""
    return [one for one in range(getattr(state(), "num_processes", 1)) if one != index()]


def tell(client: Any, key: str, text: str = "", anew: bool = False) -> bool:
    """Tell the others something under a key; return whether this wrote the key.

    It does not if there is no coordinator, or if the key exists and `anew` is false.
    """
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.key_value_set(key, text, allow_overwrite=anew)
            return True
    return False


def told(client: Any, key: str) -> str | None:
    """Return the text under a key; None if there is none, or no coordinator."""
    with suppress(jax.errors.JaxRuntimeError):
        return None if client is None else client.key_value_try_get(key)
    return None


def told_in(client: Any, folder: str) -> dict[str, str]:
    """Return the texts under all keys of a folder, by the last part of the key."""
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            return {key.rpartition("/")[2]: text for key, text in client.key_value_dir_get(folder)}
    return {}


def answers(client: Any) -> bool:
    """Return whether there still is a coordinator."""
    try:
        return client is not None and client.key_value_try_get(NO_KEY) is None
    except jax.errors.JaxRuntimeError as error:
        return "NOT_FOUND" in str(error)


def disconnect(process: int) -> None:
    """Let the coordinator know that another process has ended.

    JAX has no call for this, but lets a process join again, and leave: this process does both in
    the other's name. Only one process may do so: a second one that leaves in that name would be
    aborted.

    Raises:
        RuntimeError: If the coordinator does not answer.
        AttributeError, TypeError: If this version of JAX joins in a different way.
    """
    runtime = sys.modules["jax._src.distributed"]._jax  # `jax.distributed` joins in its own name
    proxy = runtime.get_distributed_runtime_client(
        state().coordinator_address, process, init_timeout=JOIN_S, shutdown_timeout=JOIN_S,
        heartbeat_timeout=JOIN_S, use_compression=True,
        missed_heartbeat_callback=lambda status: None,  # otherwise an error would end this process
    )  # fmt: skip
    proxy.connect()
    proxy.shutdown()
