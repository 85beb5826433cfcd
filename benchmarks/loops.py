"""Loops that are measured in turns: a user's, a hand-written one, and the control."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import jax
from baselines import PlainJit
from measure import Rates

import elche_jax as elche


class Loop:
    """A user's loop over one training step; a turn begins and ends with nothing in flight.

    Args:
        train: The training step.
        params: Initial parameters.
        data: Training data, used repeatedly.
        batch_size: Examples per microbatch.
        windows: Options of `TrainStep.windows`.
    """

    def __init__(self, train: elche.TrainStep, params, data, batch_size: int, **windows):
        self.train = train
        self._state = train.init(params)
        options = {"batch_size": batch_size, "epochs": None, **windows}
        self._windows = train.windows(data, **options)

    def warm(self, windows: int) -> None:
        """Train some windows, so that programs are compiled and speeds are known."""
        for _ in range(windows):
            self._window()
        jax.block_until_ready(self._state)

    def rate(self, seconds: float) -> float:
        """Return microbatches per ms over a turn of about this length."""
        begun, done = time.perf_counter(), 0
        while not done or time.perf_counter() - begun < seconds:
            done += self._window()
        jax.block_until_ready(self._state)
        return done / (1e3 * (time.perf_counter() - begun))

    def _window(self) -> int:
        window = next(self._windows)
        self._state, _ = self.train(self._state, window)
        return sum(window.counts)


def steps_rate(
    step: Callable[[], object], microbatches: int, seconds: float, warm: int = 3
) -> float:
    """Return microbatches per ms of a hand-written step, with at most two in flight.

    Args:
        step: Dispatches one step; returns something to wait for.
        microbatches: Microbatches per step.
        seconds: Approximate length.
        warm: Steps before the measurement; the second one may compile again.
    """
    for _ in range(warm):
        jax.block_until_ready(step())
    begun, done, before = time.perf_counter(), 0, None
    while not done or time.perf_counter() - begun < seconds:
        out = step()
        done += microbatches
        jax.block_until_ready(before)
        before = out
    jax.block_until_ready(before)
    return done / (1e3 * (time.perf_counter() - begun))


class Meter:
    """Records the processor time that turns take, in all threads of this process.

    If devices are threads on the machine's processors, this measures the cost of a loop
    almost independently of what else is running.
    """

    def __init__(self):
        self._per_ms: dict[str, list[float]] = defaultdict(list)

    def on(self, turns: Mapping[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
        """Return the same turns, metered."""
        return {name: partial(self._metered, name, turn) for name, turn in turns.items()}

    def rates(self) -> Rates:
        """Return microbatches per ms of processor time, in the form of `interleave`."""
        return {name: tuple(found) for name, found in self._per_ms.items()}

    def _metered(self, name: str, turn: Callable[[], float]) -> float:
        begun, spent = time.perf_counter(), time.process_time()
        rate = turn()
        seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        self._per_ms[name].append(rate * seconds / spent)
        return rate


class Apart:
    """The control: the same devices at the same time, each in its own loop.

    Every device has a hand-written step, a thread that dispatches it, and no connection to the
    others: no exchange, no engine, no cadence. Whatever concurrent devices lose on this machine,
    they lose here, too, so no schedule of these devices can reach more.

    Args:
        steps: The step of each device; called without arguments, returns something to wait for.
        counts: Microbatches per step of each device.
    """

    def __init__(self, steps: Sequence[Callable[[], object]], counts: Sequence[int]):
        self._steps, self._counts = tuple(steps), tuple(counts)
        for step in self._steps:
            steps_rate(step, 1, 0.0)  # compiles

    def rates(self, seconds: float) -> tuple[float, ...]:
        """Return microbatches per ms of every device in a turn of about this length."""
        together = Barrier(len(self._steps))

        def loop(step: Callable[[], object], count: int) -> float:
            together.wait()
            return steps_rate(step, count, seconds, warm=0)

        with ThreadPoolExecutor(len(self._steps)) as pool:
            return tuple(pool.map(loop, self._steps, self._counts))

    def alone(self, rank: int, seconds: float) -> float:
        """Return microbatches per ms of a device while the others are idle."""
        return steps_rate(self._steps[rank], self._counts[rank], seconds)

    def rate(self, seconds: float) -> float:
        """Return microbatches per ms of all devices."""
        return sum(self.rates(seconds))


def apart(
    params, devices: Sequence[jax.Device], counts: Sequence[int], batch: int, emulate=None,
    updates: int = 1, **options,
) -> Apart:  # fmt: skip
    """Return the control of a training run: every device accumulates and updates on its own.

    Args:
        params: Initial parameters.
        devices: The devices.
        counts: Microbatches per step of each device.
        batch: Examples per microbatch.
        emulate: Slows the devices down, or None.
        updates: Steps per call. The CPU runtime does not queue programs that call the host, as
            those of emulated devices do. With several steps per call, the dispatching thread
            rarely delays the device, as if there were a queue.
        options: Further arguments of `baselines.PlainJit`.
    """
    options |= {"emulate": emulate, "updates": updates}
    steps = [
        PlainJit(params, device, count, batch, rank=rank, **options)
        for rank, (device, count) in enumerate(zip(devices, counts, strict=True))
    ]
    return Apart(steps, [updates * count for count in counts])


def busiest(train: elche.TrainStep) -> tuple[int, ...]:
    """Return the counts of the last window in which all devices worked."""
    return next(one.counts for one in reversed(train.records) if all(one.counts))
