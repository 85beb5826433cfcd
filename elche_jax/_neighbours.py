"""Notices soon that another process of the job has ended, if it was on the same host.

JAX's coordinator misses a process after the heartbeat timeout. The kernel knows at once: a thread
of every process looks at those on its host a few times a second, and the first to see an end
tells the coordinator, which then answers the processes that wait for the one that has ended. Only
the heartbeat notices the end of a whole host, or of a process that this one cannot see: in
containers with namespaces of their own, and on systems other than Linux.
"""

import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

from elche_jax import _coordinator
from elche_jax._leaving import has_left
from elche_jax._log import logger

WHERE = "elche_jax/where"
"""Folder of the keys, one per process index, under which processes say where they are."""

ENDED_KEY = "elche_jax/ended/{}"
"""Key, by process index, that says that the process has ended."""

EVERY_S = 0.1
"""Seconds between two looks."""

CLOSE_S = 10.0
"""Longest time in seconds to wait for the thread, which may be reporting an end."""


class Place(NamedTuple):
    """Where a process is.

    Attributes:
        host: Identifies the host, and the namespace of processes on it.
        pid: Its number there.
        began: When it began, in ticks since the host did, as numbers may be used again.
    """

    host: str
    pid: int
    began: str

    @classmethod
    def here(cls) -> Self | None:
        """Return the place of this process; None if the system does not tell."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            host = f"{os.uname().nodename}/{boot}/{os.readlink('/proc/self/ns/pid')}"
            return cls(host, os.getpid(), _stat(os.getpid())[1])
        except (AttributeError, OSError):  # Windows has no `uname`
            return None

    def ended(self) -> bool:
        """Return whether the process, which must be on this host, has ended."""
        try:
            state, began = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # too many open files, for example: says nothing about the process
            return False
        return state in "ZX" or began != self.began


def _stat(pid: int) -> tuple[str, str]:
    """Return state and start of a process."""
    text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    fields = text.rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], fields[19]


class Neighbours:
    """Watches the processes of the job that are on this host, until it is closed.

    Args:
        here: Where this process is.
        others: Indices of the others.
    """

    def __init__(self, here: Place, others: Iterable[int]):
        self._here, self._client = here, _coordinator.client()
        # not process 0: the coordinator ends with it, and JAX ends all
        self._unknown, self._places = set(others) - {0}, dict[int, Place]()
        self._ended: set[int] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="elche-neighbours", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def saw_end_of(self, process: int) -> bool:
        """Return whether a process on this host has ended; works after `close`, too."""
        place = self._places.get(process)
        return process in self._ended or (place is not None and place.ended())

    def _watch(self) -> None:
        looks = 0
        while not self._closing.wait(EVERY_S) and _coordinator.client() is self._client:
            looks += 1
            if self._unknown and looks & (looks - 1) == 0:  # 1, 2, 4, 8: less and less often
                self._ask()
            for process, place in [*self._places.items()]:
                if place.ended():
                    self._ended.add(process)
                    del self._places[process]
                    self._tell(process)

    def _ask(self) -> None:
        """Ask for the places of the processes that have not told them yet."""
        for name, said in _coordinator.told_in(self._client, WHERE).items():
            if (process := int(name)) in self._unknown:
                self._unknown.remove(process)
                place = Place(*json.loads(said))
                # a process that was never seen alive is left to the heartbeat
                if place.host == self._here.host and not place.ended():
                    self._places[process] = place

    def _tell(self, process: int) -> None:
        """Tell the coordinator that a process has ended, unless another process does."""
        if has_left(self._client, process):
            return
        # First the key: a process that sees this one join in its place then knows why.
        if not _coordinator.tell(self._client, ENDED_KEY.format(process)):
            return
        try:
            _coordinator.disconnect(process)
        except (AttributeError, TypeError, RuntimeError) as error:
            # this use of JAX is not public; the heartbeat does the same later
            logger.info(
                "elche: the others notice late that process %d has ended: %s", process, error
            )


def found_ended(process: int) -> bool:
    """Return whether the end of a process has been reported."""
    return _coordinator.told(_coordinator.client(), ENDED_KEY.format(process)) is not None


def watch() -> Neighbours | None:
    """Watch the other processes of the job on this host; return None if the system cannot."""
    if (here := Place.here()) is None:
        return None
    _coordinator.tell(_coordinator.client(), f"{WHERE}/{_coordinator.index()}", json.dumps(here))
    return Neighbours(here, _coordinator.others())
