"""The loop over a device's microbatches, with hooks for emulation."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from elche_jax.engine.fetch import CallArgs

PyTree = Any
Body = Callable[[Any, PyTree], PyTree]


Seconds = Callable[[int, int, int], float]
"""`seconds(window, rank, count)`: minimum duration of the first `count` microbatches."""


class LoopHook(Protocol):
    """Hooks with which emulation slows down the loop over microbatches."""

    def check(self, world_size: int) -> None:
        """Raise `ValueError` if the hook does not fit the number of devices."""
        ...

    @abstractmethod
    def of_rank(self, rank: int) -> "LoopHook":
        """Return the hook for a single device that is as slow as this rank among all devices."""
        ...

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Run before the loop; return a float32 zero that the loop must depend on."""
        return jnp.zeros((), jnp.float32)

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Run one microbatch; return the new carry."""
        return body(i, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """Run after the loop; return a float32 zero that the results must depend on."""
        return jnp.zeros((), jnp.float32)

    def on_host(self) -> Seconds | None:
        """Return the durations if the hook only waits, as the host can then wait instead."""
        return None

    def settle(self) -> None:
        """Raise, on the host, errors that the programs could not raise.

        Called after each dispatch, and when all programs have run.
        """
        return None


def emulated_loop(
    hook: LoopHook | None, step: Any, call_args: CallArgs, body: Body, carry: PyTree
) -> tuple[PyTree, Any]:
    """Run the microbatches of a call.

    Args:
        hook: Emulation, or None.
        step: Index of the window.
        call_args: Arguments of the call.
        body: Runs one microbatch, `body(i, carry) -> carry`.
        carry: The initial carry.

    Returns:
        The final carry, and the zero of `LoopHook.end`, which must be added to a result; None
        in its place without a hook.
    """
    # the count is a value of the program, which can thus run any counts; on a GPU such a loop needs
    # the options in `mapped.py`
    if hook is None:
        return jax.lax.fori_loop(call_args.begin, call_args.end, body, carry), None
    device = call_args.rank
    # adding the zero of `begin` to the start makes the loop wait for it
    start = call_args.begin + jnp.asarray(hook.begin(device, step, call_args.fresh), jnp.int32)
    carry = jax.lax.fori_loop(
        start, call_args.end, lambda i, carry: hook.around(body, device, i, carry), carry
    )
    return carry, hook.end(device, call_args.end - call_args.begin, carry)
