"""The loop over a device's microbatches, and what emulation may put round it."""

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

import jax

from elche_jax.engine.fetch import CallArgs

PyTree = Any
Body = Callable[[Any, PyTree], PyTree]


Seconds = Callable[[int, int, int], float]
"""`seconds(window, rank, count)`: how long so many microbatches last at least."""


class LoopHook(Protocol):
    """What emulation puts round the loop over microbatches."""

    def check(self, world_size: int) -> None:
        """Raises `ValueError` where it does not fit the number of devices."""
        ...

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Before the loop; gives a float32 scalar zero that the loop depends on."""
        ...

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Runs one microbatch; gives the new carry."""
        ...

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """After the loop; gives a float32 scalar zero that the results depend on."""
        ...

    def on_host(self) -> Seconds | None:
        """How long microbatches last, where all it does is wait, so that the host can do it
        instead of the program; else None."""
        ...

    def settle(self) -> None:
        """After the dispatch, on the host: raises what could not be raised in the program."""
        ...


class Carry(Protocol):
    """What the loop carries: a pytree with a sum of losses and one of weights."""

    @property
    def loss(self) -> Any: ...

    @property
    def weight(self) -> Any: ...

    @property
    def metrics(self) -> dict[str, Any]: ...

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        ...


C = TypeVar("C", bound=Carry)


def run_loop(
    hook: LoopHook | None,
    step: Any,
    call_args: CallArgs,
    body: Callable[[Any, C], C],
    carry: C,
) -> tuple[C, Any]:
    """Runs `call_args.count` microbatches.

    Args:
        hook: Emulation, or None.
        step: Number of the window.
        call_args: How many microbatches.
        body: Runs one, `body(i, carry) -> carry`.
        carry: What the first one gets.

    Returns:
        What the last one gave, and a token: a small array that is there when the loop is
        over.
    """
    if hook is None:
        carry = jax.lax.fori_loop(0, call_args.count, body, carry)
        return carry, carry.weight
    device = call_args.rank
    zero = hook.begin(device, step, call_args.fresh)
    carry = carry.replace(loss=carry.loss + zero)
    carry = jax.lax.fori_loop(
        0, call_args.count, lambda i, carry: hook.around(body, device, i, carry), carry
    )
    zero = hook.end(device, call_args.count, carry)
    return carry.replace(loss=carry.loss + zero), carry.weight + zero
