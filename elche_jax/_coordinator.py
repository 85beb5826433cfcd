"""JAX's coordinator, through which the processes of a job tell each other things, by keys.

It is in process 0. Nothing here waits: who has left the job, or has not joined one, gets no answer.
"""

import sys
from contextlib import suppress
from typing import Any

import jax

NO_KEY = "elche_jax/nothing"
"""A key that is never set."""

JOIN_S = 5
"""Seconds within which the coordinator answers who joins in another one's name."""


def state() -> Any:
    """Return what JAX knows of the job."""
    distributed = sys.modules.get("jax._src.distributed")  # the store of keys has no public name
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
    """Tell the others something under a key; return whether it is told there now.

    It is not if there is nobody to tell, or it was told before and is not to be told anew.
    """
    with suppress(jax.errors.JaxRuntimeError):
        if client is not None:
            client.key_value_set(key, text, allow_overwrite=anew)
            return True
    return False


def told(client: Any, key: str) -> str | None:
    """Return what is told under a key; None if nothing is, or there is no coordinator."""
    with suppress(jax.errors.JaxRuntimeError):
        return None if client is None else client.key_value_try_get(key)
    return None


def told_in(client: Any, folder: str) -> dict[str, str]:
    """Return what is told under all keys of a folder, by their last part."""
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

    JAX has no call for it. But a process may join again, and leave: this one does so in its name.

    Only one process may do so, as the second one that leaves in its name would be aborted.

    Raises:
        RuntimeError: If the coordinator does not answer.
        AttributeError: If this version of JAX joins in another way; `TypeError`, too.
    """
    runtime = sys.modules["jax._src.distributed"]._jax  # `jax.distributed` joins as oneself
    proxy = runtime.get_distributed_runtime_client(
        state().coordinator_address, process, init_timeout=JOIN_S, shutdown_timeout=JOIN_S,
        heartbeat_timeout=JOIN_S, use_compression=True,
        missed_heartbeat_callback=lambda status: None,  # else an error would end this process
    )  # fmt: skip
    proxy.connect()
    proxy.shutdown()
