"""Check that JAX can compile and run programs at this point, and that no other thread does."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cache

import jax
from jax.extend import core

from elche_jax._turns import TURNS, OneThread
from elche_jax.engine.job import Job

ONE_THREAD = (
    "train: a training step must be used by one thread at a time, but another one is in a call of "
    "it. Build a step for each."
)


class Calls:
    """Checks the calls of a training step: outside of transformations, by one thread at a time.

    Args:
        job: The devices of the step.
    """

    def __init__(self, job: Job):
        self._own, self._one_process = OneThread(ONE_THREAD), job.one_process

    @contextmanager
    def __call__(self, where: str) -> Generator[None]:
        """Return a context for a call.

        Args:
            where: The function the user called, for messages.

        Raises:
            RuntimeError: Another thread is in one.
            ValueError: See `check_outside`.
        """
        check_outside(where)
        with self._own, nullcontext() if self._one_process else TURNS.call():
            yield


def check_outside(where: str) -> None:
    """Check that a call is not inside a JAX transformation, and that `jit` is enabled.

    Args:
        where: The function the user called.

    Raises:
        ValueError: The call is inside `jit`, `vmap`, `grad` or the like, or
            `jax_disable_jit` is set.
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
    """Return JAX's trace state outside any transformation."""
    # the first call may itself be inside one, but a new thread never is
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(core.get_opaque_trace_state()))
    thread.start()
    thread.join()
    return found[0]
