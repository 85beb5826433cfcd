"""Watches processes from outside, through the files in which they note what they do."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from elche_jax._progress import TOLD, ProgressFile
from elche_jax.launch.judge import Judge, Seen, Stuck
from elche_jax.launch.marked import state_of

PARTS = 20
"""Number of looks per timeout."""

SHORTEST_S, LONGEST_S = 0.02, 1.0
"""Bounds on the time between two looks."""


class Watchdog:
    """Looks at processes from time to time, and says which are stuck.

    Attributes:
        every: Seconds between two looks.

    Args:
        progress: The file in which each process notes what it does, by its number.
        timeout: Seconds that a window may take, see `Judge`.
        processes: Number of processes of the job, if it is known to have several.
    """

    def __init__(self, progress: Mapping[int, ProgressFile], timeout: float, processes: int = 1):
        self._progress, self._judge = progress, Judge(timeout, processes)
        self.every = min(max(timeout / PARTS, SHORTEST_S), LONGEST_S)
        self._looked = 0.0

    def look(self, alive: Mapping[int, int], now: float) -> list[Stuck]:
        """Return what is stuck.

        Args:
            alive: The process ids of the live processes, by number.
            now: The time in seconds, by any clock.
        """
        elapsed = now - self._looked
        if elapsed < self.every:
            return []
        self._looked = now
        seen: dict[int, Seen] = {}
        for process, pid in alive.items():
            noted = self._progress[process].read()
            seen[process] = Seen(noted, state_of(noted.pid or pid))
        # beyond two looks, this process was itself asleep
        self._judge, stuck = self._judge.observe(seen, min(elapsed, 2 * self.every))
        return stuck

    def tell(self, folder: Path, line: str, alive: Collection[int]) -> None:
        """Leave a line where the live processes find it, if there is room for it."""
        # on a full disk, or if the folder was cleared away, they go on without it
        with suppress(OSError), (folder / TOLD).open("a", encoding="utf-8") as file:
            print(line, file=file)
        for process in alive:
            self._progress[process].tell()
