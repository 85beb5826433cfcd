"""Slow devices on purpose, per device and per microbatch.

Handed to `build_train_step(emulate=...)`. `EmulatedSpeeds` makes microbatches *last* a
given time: a host callback after the loop sleeps up to a deadline. `ExtraWork` makes them
*cost* a multiple: the gradient is computed several times.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from elche_jax import _check as check
from elche_jax._exit import before_exit

PyTree = Any

Schedule = Callable[[int, int, int], float]
"""`schedule(window, rank, microbatch)`: milliseconds that this microbatch lasts."""

logger = logging.getLogger("elche_jax")

QUIET_S = 0.1
"""A program ends only when no emulated device has been at work for so long: one that is in a
queue begins sooner."""

PATIENCE_S = 10.0
"""Longest wait for emulated devices at the end of a program."""

_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
_ZERO = np.float32(0)


def constant(ms: Sequence[float]) -> Schedule:
    """Every microbatch of device `d` lasts `ms[d]` milliseconds.

    Args:
        ms: Milliseconds per microbatch for each device, at least 0.

    Examples:
        >>> from elche_jax.lab import constant
        >>> constant([5, 20])(0, 1, 0)
        20.0
    """
    times = check.reals("constant", "ms", ms, low=0)

    def schedule(window: int, device: int, microbatch: int) -> float:
        if device >= len(times):
            rule, got = "have one entry per device", f"{len(times)} and device {device}"
            raise ValueError(check.message("constant", "ms", rule, got))
        return times[device]

    return schedule


def throttle(
    base: Schedule, rank: int, factor: float, at: int, until: int | None = None
) -> Schedule:
    """One device is `factor` times slower from window `at` on (before `until`).

    Args:
        base: The schedule it changes.
        rank: The device.
        factor: Multiplies its times, above 0.
        at: First window that is slower, at least 0.
        until: First window that is not any more, above `at`; None: for good.

    Examples:
        >>> from elche_jax.lab import constant, throttle
        >>> slow = throttle(constant([5, 5]), rank=0, factor=3, at=10)
        >>> slow(9, 0, 0), slow(10, 0, 0), slow(10, 1, 0)
        (5.0, 15.0, 5.0)
    """
    check.integer("throttle", "rank", rank, low=0)
    check.real("throttle", "factor", factor, above=0)
    check.integer("throttle", "at", at, low=0)
    if until is not None:
        check.integer("throttle", "until", until, low=at + 1)
    end = float("inf") if until is None else until

    def schedule(window: int, device: int, microbatch: int) -> float:
        slow = device == rank and at <= window < end
        return base(window, device, microbatch) * (factor if slow else 1.0)

    return schedule


def drift(base: Schedule, rank: int, per_window: float) -> Schedule:
    """One device becomes slower by a share of its first time in every window.

    Args:
        base: The schedule it changes.
        rank: The device.
        per_window: Share per window, at least 0: 0.01 doubles the time in 100 windows.

    Examples:
        >>> from elche_jax.lab import constant, drift
        >>> drift(constant([10, 10]), rank=1, per_window=0.01)(50, 1, 0)
        15.0
    """
    check.integer("drift", "rank", rank, low=0)
    check.real("drift", "per_window", per_window, low=0)

    def schedule(window: int, device: int, microbatch: int) -> float:
        grown = 1.0 + per_window * window if device == rank else 1.0
        return base(window, device, microbatch) * grown

    return schedule


def jitter(base: Schedule, share: float, seed: int = 0) -> Schedule:
    """Every microbatch varies by up to a share of its time, evenly distributed.

    Args:
        base: The schedule it changes.
        share: Largest deviation, 0 to 1.
        seed: Seed, at least 0; the times are a function of it and of the arguments
            alone.

    Examples:
        >>> from elche_jax.lab import constant, jitter
        >>> 8.0 <= jitter(constant([10]), share=0.2)(0, 0, 0) <= 12.0
        True
    """
    check.real("jitter", "share", share, low=0, high=1)
    check.integer("jitter", "seed", seed, low=0)

    def schedule(window: int, device: int, microbatch: int) -> float:
        draw = np.random.default_rng((seed, window, device, microbatch)).uniform(-1, 1)
        return base(window, device, microbatch) * (1.0 + share * draw)

    return schedule


class AtWork:
    """Which emulated devices are at work. The end of a program waits for them, as their
    threads would come back from the host into an interpreter that is no more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._devices: set[Hashable] = set()
        self._since = 0.0
        self._waits = False

    def watch(self) -> None:
        """There will be such devices."""
        with self._changed:
            waits, self._waits = self._waits, True
        if not waits:
            before_exit(self.wait, last=True)  # when nobody gives them work any more

    def begins(self, device: Hashable) -> None:
        """A device begins; any thread. One that has failed in between begins again."""
        with self._changed:
            self._devices.add(device)

    def ends(self, device: Hashable) -> None:
        """It is done."""
        with self._changed:
            self._devices.discard(device)
            self._since = time.perf_counter()
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until no device has been at work for `QUIET_S`, at most `PATIENCE_S`."""
        begun = time.perf_counter()
        with self._changed:
            while (now := time.perf_counter()) < begun + PATIENCE_S:
                quiet = 0.0 if self._devices else now - max(self._since, begun)
                if quiet >= QUIET_S:
                    return
                self._changed.wait(QUIET_S - quiet)
        logger.warning(
            "elche: emulated devices are still at work %g s after the end of the program.",
            PATIENCE_S,
        )


_AT_WORK = AtWork()


@dataclass(frozen=True)
class EmulatedSpeeds:
    """Devices whose microbatches last as long as a schedule says.

    The clock of a device starts when its program does. When the device has computed its
    microbatches it waits until the sum of their times is over: real computation counts
    in, and one wait for all of them keeps the host, which shares its processors with the
    emulated devices, out of their way.

    Attributes:
        schedule: A schedule, or one number of milliseconds per device.

    Examples:
        >>> from elche_jax.lab import EmulatedSpeeds, constant, throttle
        >>> EmulatedSpeeds([5, 5, 10, 20])  # doctest: +ELLIPSIS
        EmulatedSpeeds(...)
        >>> EmulatedSpeeds(throttle(constant([5, 5]), rank=0, factor=3, at=10))
        ... # doctest: +ELLIPSIS
        EmulatedSpeeds(...)
    """

    schedule: Schedule | Sequence[float]
    _clocks: dict[int, "_Clock"] = field(default_factory=dict, repr=False, compare=False)
    _interrupted: threading.Event = field(
        default_factory=threading.Event, repr=False, compare=False
    )

    def check(self, world_size: int) -> None:
        """Raises where the times do not fit the number of devices."""
        if callable(self.schedule):
            for rank in range(world_size):
                self._check_first(self.schedule, rank)
        else:
            times = check.reals("EmulatedSpeeds", "schedule", self.schedule, low=0)
            check.per_device("EmulatedSpeeds", "schedule", len(times), world_size)

    def _check_first(self, schedule: Schedule, rank: int) -> None:
        try:
            ms: Any = schedule(0, rank, 0)
        except (LookupError, ValueError) as error:
            raise ValueError(
                "EmulatedSpeeds: schedule must give a time for every device of the training "
                f"step, got {type(error).__name__} for device {rank}: {error}."
            ) from error
        check.real("EmulatedSpeeds", f"schedule(0, {rank}, 0)", ms, low=0)

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Starts the clock of a device."""
        _AT_WORK.watch()
        return _tell(self._begin, device, step, fresh)

    def around(
        self, body: Callable[[Any, PyTree], PyTree], device: Any, i: Any, carry: PyTree
    ) -> PyTree:
        """Runs a microbatch as it is."""
        return body(i, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """Waits until the microbatches have lasted as long as asked.

        What follows must use the result, a zero: a wait that nothing depends on may
        happen at another time.
        """
        # one number that needs every leaf, so that the wait comes after the work
        carry = jax.lax.optimization_barrier(carry)
        leaves = [leaf for leaf in jax.tree.leaves(carry) if leaf.size]
        done = sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in leaves)
        return _tell(self._wait, device, count, jnp.isnan(done))

    def _begin(self, call_args: Any) -> np.float32:
        now = time.perf_counter()
        rank, step, fresh = call_args.tolist()
        _AT_WORK.begins((id(self), rank))
        clock = self._clocks.get(rank)
        if clock is None or fresh:
            clock = self._clocks[rank] = _Clock(step)
        clock.deadline = now
        return _ZERO

    def _wait(self, call_args: Any) -> np.float32:
        rank, count, _ = call_args.tolist()
        try:
            self._sleep(rank, count)
        finally:
            _AT_WORK.ends((id(self), rank))
        return _ZERO

    def _sleep(self, rank: int, count: int) -> None:
        clock = self._clocks[rank]
        for _ in range(count):
            clock.deadline += self._ms(clock.window, rank, clock.microbatch) / 1e3
            clock.microbatch += 1
        left = clock.deadline - time.perf_counter()
        try:
            if left > 0:
                time.sleep(left)
        except KeyboardInterrupt:
            # One device: the program may run in the main thread. The runtime would swallow
            # the interrupt or make another error of it.
            self._interrupted.set()

    def on_host(self) -> Callable[[int, int, int], float]:
        """How long the first microbatches of a window last: the host can wait as well."""
        return self._seconds

    def settle(self) -> None:
        """Raises the Ctrl-C that came while the program ran in the main thread."""
        if self._interrupted.is_set():
            self._interrupted.clear()
            raise KeyboardInterrupt

    def _seconds(self, window: int, rank: int, count: int) -> float:
        return sum(self._ms(window, rank, i) for i in range(count)) / 1e3

    def _ms(self, window: int, rank: int, microbatch: int) -> float:
        if callable(self.schedule):
            return self.schedule(window, rank, microbatch)
        return self.schedule[rank]


def _tell(callback: Callable[[Any], np.float32], *numbers: Any) -> Any:
    """Calls the host with integers, in one array: every argument costs the host time."""
    return io_callback(callback, _SCALAR, jnp.stack([jnp.int32(n) for n in numbers]))


@dataclass(slots=True)
class _Clock:
    window: int
    microbatch: int = 0
    deadline: float = 0.0


@dataclass(frozen=True)
class ExtraWork:
    """Devices that compute the gradient of every microbatch several times over.

    The results are those of one computation.

    Attributes:
        times: How often each device computes it, at least 1.

    Examples:
        >>> from elche_jax.lab import ExtraWork
        >>> ExtraWork((1, 3))
        ExtraWork(times=(1, 3))
    """

    times: Sequence[int]

    def check(self, world_size: int) -> None:
        """Raises where the factors do not fit the number of devices."""
        times = check.integers("ExtraWork", "times", self.times, low=1)
        check.per_device("ExtraWork", "times", len(times), world_size)

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Nothing to start."""
        return jnp.zeros((), jnp.float32)

    def around(
        self, body: Callable[[Any, PyTree], PyTree], device: Any, i: Any, carry: PyTree
    ) -> PyTree:
        """Runs a microbatch `times[device]` times, always from the same sums."""
        times = jnp.asarray(self.times, jnp.int32)[device]

        def again(turn: Any, _: PyTree) -> PyTree:
            # the barrier makes the inputs depend on the turn: nothing moves out of the loop
            index, start, _ = jax.lax.optimization_barrier((i, carry, turn))
            return body(index, start)

        return jax.lax.fori_loop(0, times, again, carry)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """Nothing to wait for."""
        return jnp.zeros((), jnp.float32)

    def on_host(self) -> None:
        """The devices do work; no host can do it for them."""

    def settle(self) -> None:
        """Nothing is left open."""
