"""Whether JAX is in a state in which programs can be compiled and run."""

import threading
from functools import cache

import jax
from jax.extend import core


def check_outside(where: str) -> None:
    """Checks that a call is not part of what JAX transforms, and that JAX compiles at all.

    Args:
        where: The function the user called.

    Raises:
        ValueError: It is inside of `jit`, `vmap`, `grad` and the like, or under
            `jax_disable_jit`.
    """
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]  # made late
        raise ValueError(
            f"{where}: jax_disable_jit must be off, as windows are compiled programs, got it on. "
            "To look into loss_fn, call it by itself under jax.disable_jit()."
        )
    if core.get_opaque_trace_state() != _plain():
        raise ValueError(
            f"{where}: must be called outside of jit, vmap, grad and the like, got a call inside. "
            "It compiles and differentiates what it is given; call it as it is."
        )


@cache
def _plain() -> object:
    """The state outside: that of a thread of its own, wherever this is asked first."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(core.get_opaque_trace_state()))
    thread.start()
    thread.join()
    return found[0]
