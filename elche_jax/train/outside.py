"""Checks that JAX can compile and run programs at this point, and that no other thread does so."""

import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cache

import jax
from jax.extend import core

from elche_jax._settings import setting
from elche_jax._turns import TURNS, OneThread
from elche_jax.engine.job import Job

ONE_THREAD = (
    "train: a training step must be used by one thread at a time, but another one is in a call of "
    "it. Build a step for each."
)


class Calls:
    """Checks that a training step is called outside of transformations, by one thread at a time.

    Args:
        job: The devices of the step.
    """

    def __init__(self, job: Job):
        self._own, self._job = OneThread(ONE_THREAD), job

    @contextmanager
    def __call__(self, where: str) -> Generator[None]:
        """Return a context for a call.

        Args:
            where: The function the user called, for messages.

        Raises:
            RuntimeError: Another thread is in a call.
            ValueError: See `check_outside`, `check_debug` and `check_mesh`.
        """
        check_outside(where)
        check_debug(where)
        check_mesh(where, self._job.world_size)
        with self._own, nullcontext() if self._job.one_process else TURNS.call():
            yield


def check_outside(where: str) -> None:
    """Check that a call is not inside a JAX transformation, and that `jit` is enabled.

    Args:
        where: The function the user called.

    Raises:
        ValueError: The call is inside `jit`, `vmap`, `grad` or the like, or
            `jax_disable_jit` is set.
    """
    if setting("disable_jit"):
        raise ValueError(
            f"{where}: jax_disable_jit must be off, as windows are compiled programs, but it is "
            "on. To look into loss_fn, call it by itself under jax.disable_jit()."
        )
    if core.get_opaque_trace_state() != _plain():
        raise ValueError(
            f"{where}: must be called outside of jit, vmap, grad and the like, got a call inside. "
            "It compiles and differentiates what it is given; call it directly."
        )


def check_debug(where: str) -> None:
    """Check that JAX does not raise for NaN or infinite outputs of a window's programs.

    It would raise only after the buffers of the state have been donated.

    Args:
        where: The function the user called.

    Raises:
        ValueError: `jax_debug_nans` or `jax_debug_infs` is set.
    """
    for name in ("debug_nans", "debug_infs"):
        if setting(name):
            raise ValueError(
                f"{where}: jax_{name} must be off, as programs may return such values (metrics "
                "that are not known yet, windows that are dropped), but it is on. NonFiniteError "
                "names the microbatches; to find the operation, call loss_fn by itself with them "
                f"under jax.{name}(True)."
            )


def check_mesh(where: str, world_size: int) -> None:
    """Check that no mesh is set: the programs of a call use their own.

    Args:
        where: The function the user called.
        world_size: Number of devices that these programs run on.

    Raises:
        ValueError: `jax.set_mesh` has set a mesh, and it or the programs have several devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or max(mesh.size, world_size) == 1:  # with one device, all meshes are alike
        return
    raise ValueError(
        f"{where}: must be called without a mesh of jax.set_mesh, got one with the axes "
        f"{dict(mesh.shape)}. Programs run on the devices given as devices; call it outside of "
        "jax.set_mesh."
    )


@cache
def _plain() -> object:
    """Return JAX's trace state outside any transformation."""
    # this call may itself be inside one, but a new thread never is
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(core.get_opaque_trace_state()))
    thread.start()
    thread.join()
    return found[0]
