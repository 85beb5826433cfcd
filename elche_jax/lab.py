"""Experiments with artificially slowed devices, for `build_train_step(emulate=...)`.

In this package, only the command line imports this module.

`EmulatedSpeeds` makes microbatches *last* a given time: a host callback after the loop sleeps
until a deadline. `ExtraWork` makes them *cost* a multiple: the gradient is computed several
times.
"""

import functools
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
from elche_jax._log import logger
from elche_jax._waiting import Condition
from elche_jax.engine.loop import Body, LoopHook, Seconds

PyTree = Any

Schedule = Callable[[int, int, int], float]
"""`schedule(window, rank, microbatch)`: duration of this microbatch in milliseconds."""


QUIET_S = 0.1
"""Seconds without work on any emulated device after which the process may exit; queued work
starts sooner than that."""

PATIENCE_S = 10.0
"""Longest wait in seconds for emulated devices at process exit."""

_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
_ZERO = np.float32(0)


def constant(ms: Sequence[float]) -> Schedule:
    """Create a schedule in which every microbatch of device `d` lasts `ms[d]` milliseconds.

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
            rule, got = "have one entry per device", f"{len(times)}, none for device {device}"
            raise ValueError(check.message("constant", "ms", rule, got))
        return times[device]

    return schedule


def throttle(
    base: Schedule, rank: int, factor: float, at: int, until: int | None = None
) -> Schedule:
    """Slow down one device by a factor from window `at` on, until window `until`.

    Args:
        base: The schedule to change.
        rank: Rank of the device.
        factor: Factor on its times, above 0.
        at: First slower window, at least 0.
        until: First window at normal speed again, above `at`; None for no end.

    Examples:
        >>> from elche_jax.lab import constant, throttle
        >>> slow = throttle(constant([5, 5]), rank=0, factor=3, at=10)
        >>> slow(9, 0, 0), slow(10, 0, 0), slow(10, 1, 0)
        (5.0, 15.0, 5.0)
    """
    _check_base("throttle", base)
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
    """Slow down one device linearly, by a fraction of its base time per window.

    Args:
        base: The schedule to change.
        rank: Rank of the device.
        per_window: Fraction per window, at least 0: 0.01 doubles the time in 100 windows.

    Examples:
        >>> from elche_jax.lab import constant, drift
        >>> drift(constant([10, 10]), rank=1, per_window=0.01)(50, 1, 0)
        15.0
    """
    _check_base("drift", base)
    check.integer("drift", "rank", rank, low=0)
    check.real("drift", "per_window", per_window, low=0)

    def schedule(window: int, device: int, microbatch: int) -> float:
        grown = 1.0 + per_window * window if device == rank else 1.0
        return base(window, device, microbatch) * grown

    return schedule


def jitter(base: Schedule, share: float, seed: int = 0) -> Schedule:
    """Vary the time of every microbatch by up to a fraction, uniformly distributed.

    Args:
        base: The schedule to change.
        share: Largest relative deviation, 0 to 1.
        seed: Seed, at least 0; times depend on it and the schedule's arguments alone.

    Examples:
        >>> from elche_jax.lab import constant, jitter
        >>> 8.0 <= jitter(constant([10]), share=0.2)(0, 0, 0) <= 12.0
        True
    """
    _check_base("jitter", base)
    check.real("jitter", "share", share, low=0, high=1)
    check.integer("jitter", "seed", seed, low=0)

    def schedule(window: int, device: int, microbatch: int) -> float:
        draw = np.random.default_rng((seed, window, device, microbatch)).uniform(-1, 1)
        return base(window, device, microbatch) * (1.0 + share * draw)

    return schedule


def _check_base(where: str, base: Any) -> None:
    todo = "Pass constant([5, 20]) for one time per device."
    check.instance(where, "base", base, Callable, "be a schedule", todo)


class AtWork:
    """The emulated devices at work.

    Process exit waits for them: otherwise their threads would return from the host callback
    into an interpreter that has been finalized.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._devices: set[Hashable] = set()
        self._since = 0.0

    def begins(self, device: Hashable) -> None:
        """Mark a device as at work; idempotent, as a failed one has not called `ends`."""
        with self._changed:
            self._devices.add(device)

    def ends(self, device: Hashable) -> None:
        """Mark a device as done."""
        with self._changed:
            self._devices.discard(device)
            self._since = time.perf_counter()
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for the devices at the end of the program; log if they take too long."""
        if not self.quiet():
            logger.warning(
                "elche: emulated devices are still at work %g s after the end of the program.",
                PATIENCE_S,
            )

    def quiet(self) -> bool:
        """Wait until no device has been at work for `QUIET_S`, at most `PATIENCE_S`."""
        begun = time.perf_counter()
        with self._changed:
            while (now := time.perf_counter()) < begun + PATIENCE_S:
                # since this wait began at the earliest: however long ago the last program ended,
                # one in the queue has not begun yet
                quiet = 0.0 if self._devices else now - max(self._since, begun)
                if quiet >= QUIET_S:
                    return True
                self._changed.wait(QUIET_S - quiet)
        return False


_AT_WORK = AtWork()


@functools.cache  # once per process
def _wait_at_exit() -> None:
    # without it, 18 of 50 processes that got a Ctrl-C crashed in the runtime
    before_exit(_AT_WORK.wait, last=True)  # after everything that may dispatch work


@dataclass(frozen=True)
class EmulatedSpeeds(LoopHook):
    """Devices whose microbatches last as long as a schedule says.

    The clock of a device starts with its program. After computing its microbatches the device
    waits until the sum of their scheduled times has passed: real computation counts towards
    it. There is a single wait per program, as host callbacks compete with the emulated devices
    for the same processors.

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
    _held_back: list[BaseException] = field(default_factory=list, repr=False, compare=False)

    def check(self, world_size: int) -> None:
        """Raise if the times do not fit the number of devices."""
        if not callable(self.schedule):
            times = check.reals("EmulatedSpeeds", "schedule", self.schedule, low=0)
            check.per_device("EmulatedSpeeds", "schedule", len(times), world_size)
            return
        for rank in range(world_size):
            try:
                ms: Any = self.schedule(0, rank, 0)
            except (LookupError, ValueError) as error:
                raise ValueError(
                    "EmulatedSpeeds: schedule must give a time for every device of the training "
                    f"step, got {type(error).__name__} for device {rank}: {error}."
                ) from error
            _checked(ms, 0, rank, 0)

    def of_rank(self, rank: int) -> "EmulatedSpeeds":
        """Return the emulation of a single device; errors name its rank among all."""
        return EmulatedSpeeds(lambda window, _, microbatch: self._ms(window, rank, microbatch))

    def begin(self, device: Any, step: Any, fresh: Any) -> Any:
        """Start the clock of a device."""
        _wait_at_exit()
        return _tell(self._begin, device, step, fresh)

    def end(self, device: Any, count: Any, carry: PyTree) -> Any:
        """Wait until the microbatches have lasted as long as scheduled.

        Later computation must use the result, a zero: XLA may move a wait that nothing
        depends on.
        """
        # one number that depends on every leaf, so that the wait comes after the work
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
            clock = self._clocks[rank]
            for _ in range(count):
                clock.deadline += self._ms(clock.window, rank, clock.microbatch) / 1e3
                clock.microbatch += 1
            time.sleep(max(0.0, clock.deadline - time.perf_counter()))
        except BaseException as error:
            # `settle` raises it. The runtime would turn an error of the schedule into its own, and
            # swallow a Ctrl-C: with one device the program may run in the main thread.
            self._held_back.append(error)
        finally:
            _AT_WORK.ends((id(self), rank))
        return _ZERO

    def on_host(self) -> Seconds:
        """Return the durations, as the host can wait in place of the program."""
        return self._seconds

    def settle(self) -> None:
        """Raise an error of the schedule, or a Ctrl-C, that came while a program ran."""
        held = self._held_back
        if not held:
            return
        error = next((one for one in held if isinstance(one, KeyboardInterrupt)), held[0])
        if not isinstance(error, KeyboardInterrupt):
            _AT_WORK.quiet()  # other devices, and windows in flight, may fail, too
        held.clear()
        raise error

    def _seconds(self, window: int, rank: int, count: int) -> float:
        return sum(self._ms(window, rank, i) for i in range(count)) / 1e3

    def _ms(self, window: int, rank: int, microbatch: int) -> float:
        if not callable(self.schedule):
            return self.schedule[rank]
        return _checked(self.schedule(window, rank, microbatch), window, rank, microbatch)


def _checked(ms: Any, window: int, rank: int, microbatch: int) -> float:
    """Check a duration that a user's schedule has returned; return it as a number."""
    call = f"schedule({window}, {rank}, {microbatch})"
    return check.real("EmulatedSpeeds", call, ms, low=0)


def _tell(callback: Callable[[Any], np.float32], *numbers: Any) -> Any:
    """Call the host with integers, packed in one array."""
    # each argument costs the host time: three take 110 us, one array of three takes 45
    return io_callback(callback, _SCALAR, jnp.stack([jnp.int32(n) for n in numbers]))


@dataclass(slots=True)
class _Clock:
    window: int
    microbatch: int = 0
    deadline: float = 0.0


@dataclass(frozen=True)
class ExtraWork(LoopHook):
    """Devices that compute the gradient of every microbatch several times.

    The results are those of a single computation.

    Attributes:
        times: Number of computations on each device, at least 1.

    Examples:
        >>> from elche_jax.lab import ExtraWork
        >>> ExtraWork((1, 3))
        ExtraWork(times=(1, 3))
    """

    times: Sequence[int]

    def check(self, world_size: int) -> None:
        """Raise if `times` does not fit the number of devices."""
        times = check.integers("ExtraWork", "times", self.times, low=1)
        check.per_device("ExtraWork", "times", len(times), world_size)

    def of_rank(self, rank: int) -> "ExtraWork":
        """Return the work of a single device."""
        return ExtraWork(self.times[rank : rank + 1])

    def around(self, body: Body, device: Any, i: Any, carry: PyTree) -> PyTree:
        """Run a microbatch `times[device]` times, always from the same carry."""
        times = jnp.asarray(self.times, jnp.int32)[device]

        def again(turn: Any, _: PyTree) -> PyTree:
            # the inputs depend on the turn, so that XLA cannot hoist the work out of the loop
            index, start, _ = jax.lax.optimization_barrier((i, carry, turn))
            return body(index, start)

        return jax.lax.fori_loop(0, times, again, carry)
