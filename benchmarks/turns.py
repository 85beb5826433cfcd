"""Several loops that take turns, some windows at a time: what a machine does besides hits all."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax


class Turns:
    """Whose turn it is, and how fast everybody was in theirs.

    A turn ends with nothing in flight. What comes before somebody's second turn, as what is
    compiled and placed, is not counted.

    Args:
        names: Who takes part.
        windows: Windows of a turn.
    """

    def __init__(self, names: tuple[str, ...], windows: int):
        self._windows = windows
        self._changed = threading.Condition()
        self._left = list(names)  # the first one's turn it is
        self._turns: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        self._seen, self._done, self._begun = 0, 0, 0.0

    def begin(self, name: str) -> None:
        """Waits for a turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._left[0] == name)
        self._seen, self._done, self._begun = 0, 0, time.perf_counter()

    def window(self, name: str, microbatches: int, state: Any) -> None:
        """A window was dispatched; after the last one of a turn waits for the next turn."""
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
        """Takes part no more."""
        with self._changed:
            self._left.remove(name)
            self._changed.notify_all()

    def rate(self, name: str) -> float:
        """Microbatches per second of all turns but the first."""
        done, seconds = zip(*self._turns[name][1:], strict=True)
        return sum(done) / sum(seconds)


def take_turns(
    loops: Mapping[str, Callable[[Turns, str], None]], windows: int, seed: int = 0
) -> dict[str, float]:
    """Runs loops in threads, in turns; gives the microbatches per second of each.

    Args:
        loops: Called with the turns and the own name: `begin` before the first window, `window`
            after each one.
        windows: Windows of a turn.
        seed: Of the order, so that not the same one always comes after another.
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
