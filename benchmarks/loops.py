"""Loops that are measured in turns: a user's, a hand-written one, and the control."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import jax
from baselines import PlainJit

import elche_jax as elche


class Loop:
    """A user's loop over one training step. A turn begins and ends with nothing in flight.

    Args:
        train: The training step.
        params: Parameters to begin with.
        data: What it trains on, over and over.
        batch_size: Examples of a microbatch.
        windows: Options of `TrainStep.windows`.
    """

    def __init__(self, train: elche.TrainStep, params, data, batch_size: int, **windows):
        self.train = train
        self._state = train.init(params)
        options = {"batch_size": batch_size, "epochs": None, **windows}
        self._windows = train.windows(data, **options)

    def warm(self, windows: int) -> None:
        """Trains some windows, so that what follows is compiled and the speeds are known."""
        for _ in range(windows):
            self._window()
        jax.block_until_ready(self._state)

    def rate(self, seconds: float) -> float:
        """Microbatches per ms of a turn of about so long."""
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
    """Microbatches per ms of a hand-written step, at most two in flight.

    Args:
        step: Dispatches one step; gives something to wait for.
        microbatches: How many a step is of.
        seconds: About how long.
        warm: Steps before, not counted; the second may compile once more.
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
    """Notes the processor time that turns take, of all threads of this process.

    Where devices are threads of the machine's processors it says what a loop costs nearly
    whatever else the machine does in the meantime.
    """

    def __init__(self):
        self._per_ms: dict[str, list[float]] = defaultdict(list)

    def on(self, turns: Mapping[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
        """The same turns, metered."""
        return {name: partial(self._metered, name, turn) for name, turn in turns.items()}

    def rates(self) -> dict[str, tuple[float, ...]]:
        """Microbatches per ms of processor time, as `interleave` gives those of a clock."""
        return {name: tuple(found) for name, found in self._per_ms.items()}

    def _metered(self, name: str, turn: Callable[[], float]) -> float:
        begun, spent = time.perf_counter(), time.process_time()
        rate = turn()
        seconds, spent = time.perf_counter() - begun, time.process_time() - spent
        self._per_ms[name].append(rate * seconds / spent)
        return rate


class Apart:
    """The control: the same devices at the same time, each in a loop of its own.

    Every device has a hand-written step, a thread that dispatches it, and nothing to do with the
    others: no exchange, no engine, no cadence. What the machine takes from devices that work at
    once, it takes here, too; more than this no scheduling of these devices can reach.

    Args:
        steps: The step of each device; called without arguments, gives something to wait for.
        counts: Microbatches of a step of each device.
    """

    def __init__(self, steps: Sequence[Callable[[], object]], counts: Sequence[int]):
        self._steps, self._counts = tuple(steps), tuple(counts)
        for step in self._steps:
            steps_rate(step, 1, 0.0)  # compiles

    def rates(self, seconds: float) -> tuple[float, ...]:
        """Microbatches per ms of every device in a turn of about so long."""
        together = Barrier(len(self._steps))

        def loop(step: Callable[[], object], count: int) -> float:
            together.wait()
            return steps_rate(step, count, seconds, warm=0)

        with ThreadPoolExecutor(len(self._steps)) as pool:
            return tuple(pool.map(loop, self._steps, self._counts))

    def rate(self, seconds: float) -> float:
        """Microbatches per ms of all devices."""
        return sum(self.rates(seconds))


def apart(
    params, devices: Sequence[jax.Device], counts: Sequence[int], batch: int, emulate=None,
    updates: int = 1, **options,
) -> Apart:  # fmt: skip
    """The control of a training: accumulation and an update of its own on every device.

    Args:
        params: Parameters to begin with.
        devices: The devices.
        counts: Microbatches of a step of each device.
        batch: Examples of a microbatch.
        emulate: What makes the devices slow, or None.
        updates: Steps of one call. The CPU's runtime does not queue a program that calls the
            host, as emulated devices do: more than one keeps the thread that dispatches out of
            their way, as a queue would.
        options: The rest for `baselines.PlainJit`.
    """
    options |= {"emulate": emulate, "updates": updates}
    steps = [
        PlainJit(params, device, count, batch, rank=rank, **options)
        for rank, (device, count) in enumerate(zip(devices, counts, strict=True))
    ]
    return Apart(steps, [updates * count for count in counts])
