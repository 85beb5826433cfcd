"""Several loops that take turns, so that other load on the machine affects all equally."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


class Turns:
    """Tracks whose turn it is, and the speed of each participant in its turns.

    A turn ends with nothing in flight. Everything before a participant's second turn, such as
    compilation and placement, is not counted.

    Args:
        names: The participants.
        windows: Windows per turn.
    """

    def __init__(self, names: tuple[str, ...], windows: int):
        self._windows = windows
        self._changed = threading.Condition()
        self._left = list(names)  # it is the first one's turn
        self._turns: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        self._seen, self._done, self._begun = 0, 0, 0.0

    def begin(self, name: str) -> None:
        """Wait for a turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[0] == name)
        self._seen, self._done, self._begun = 0, 0, time.perf_counter()

    def window(self, name: str, microbatches: int, state: Any) -> None:
        """Count a dispatched window; after the last one of a turn, wait for the next turn."""
        self._seen += 1
        self._done += microbatches
        if self._seen < self._windows:
            return
        jax.block_until_ready(state)
        self._turns[name].append((self._done, time.perf_counter() - self._begun))
        with self._changed:
            self._left.append(self._left.pop(0))
            self._changed.notify_all()
        self.begin(name)

    def over(self, name: str) -> None:
        """End a loop's participation."""
        with self._changed:
            self._left.remove(name)
            self._changed.notify_all()

    def rate(self, name: str) -> float:
        """Return the microbatches per second over all turns except the first."""
        done, seconds = zip(*self._turns[name][1:], strict=True)
        return sum(done) / sum(seconds)


def take_turns(
    loops: Mapping[str, Callable[[Turns, str], None]], windows: int, seed: int = 0
) -> dict[str, float]:
    """Run loops in threads, in turns; return the microbatches per second of each.

    Args:
        loops: Each is called with the turns and its name, and calls `begin` before the first
            window and `window` after each one.
        windows: Windows per turn.
        seed: Seed of the order, so that no loop always follows the same one.
    """
    names = random.Random(seed).sample(list(loops), len(loops))
    turns = Turns(tuple(names), windows)

    def run(name: str) -> None:
        try:
            loops[name](turns, name)
        finally:
            turns.over(name)

    with ThreadPoolExecutor(len(names)) as pool:
        for ended in [pool.submit(run, name) for name in names]:
            ended.result()
    return {name: turns.rate(name) for name in names}
