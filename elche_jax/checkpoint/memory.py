"""What the end of a generation leaves in memory for the next one, before it is on disk."""

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elche_jax._log import logger
from elche_jax._progress import DESTINATION, MEMORY
from elche_jax.checkpoint.errors import described
from elche_jax.checkpoint.leaves import digest
from elche_jax.checkpoint.options import Checkpoints
from elche_jax.checkpoint.store import Saved, Store

ROOM = 1.25
"""How much memory must be free for a checkpoint, in its size."""

LIMITS = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Files of a control group that say its limit and what is used, in versions 2 and 1."""

AFTER = "after"
"""Name, in its notes, of the newest checkpoint that was on disk when one was kept."""


class Memory:
    """A checkpoint in a folder in memory, which outlives the processes of a generation.

    `elche-jax launch --elastic` gives the folder, by a variable; without it nothing is kept. At
    the end of the job the launcher removes it, unless a checkpoint is in it that is not on disk.

    Attributes:
        step: Number of windows trained, of the checkpoint that this object has kept; None if there
            is none.

    Args:
        folder: The folder on disk, by which the checkpoint is found again.
        checkpoints: Those on disk; in memory there is only the last one.
    """

    def __init__(self, folder: Path, checkpoints: Checkpoints):
        given = os.environ.get(MEMORY)
        self._folder = folder
        self._checkpoints = replace(checkpoints, keep_last=1, keep_best=0)
        self._place = Path(given, digest(str(folder).encode())) if given else None
        self.step: int | None = None

    def keep(self, step: int, after: int, content: Callable[[], Saved]) -> None:
        """Keep a checkpoint, see `Store.save`; an error is logged, as the disk comes next.

        Args:
            step: Number of windows trained.
            after: The newest checkpoint on disk, -1 if there is none.
            content: Returns it.
        """
        if self._place is None:
            return
        try:
            saved = content()
            need = sum(leaf.nbytes for leaf in saved.leaves.values())
            room = _room(self._place.parent)
            if ROOM * need > room:
                text = f"{need} bytes, of which {room:.0f} are free"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)
            if (there := max(self.steps, default=-1)) >= step:  # of a run that began anew
                self.forget(there)
            self._place.mkdir(exist_ok=True)
            (self._place / DESTINATION).write_text(str(self._folder))
            store = Store(self._place, self._checkpoints)
            store.save(replace(saved, notes={**saved.notes, AFTER: after}))
            self.step = step
        except Exception as error:  # whatever it is, the checkpoint may still reach the disk
            logger.warning(
                "elche: the checkpoint after %d windows is not kept in memory, only on disk: %s",
                step,
                described(error),
            )

    @property
    def steps(self) -> list[int]:
        """Windows of what is kept."""
        if self._place is None or not self._place.exists():
            return []
        return sorted(int(path.name) for path in self._place.iterdir() if path.name.isdecimal())

    def newest(self, on_disk: int, seen: int) -> Saved | None:
        """Read the checkpoint that is kept, if it is intact and continues what is on disk.

        Args:
            on_disk: Windows of the newest intact checkpoint on disk, -1 if there is none.
            seen: Windows of the newest one there, intact or not. If there are fewer than when the
                checkpoint was kept, the run has begun anew.
        """
        if self._place is None or max(self.steps, default=-1) <= on_disk:
            return None
        saved = Store(self._place, self._checkpoints).newest()
        return None if saved is None or saved.notes[AFTER] > seen else saved

    def forget(self, step: int) -> None:
        """Free the memory of a checkpoint, as this or a later one is on disk.

        A thread may call it while the loop keeps a later one.
        """
        if self._place is not None and self.steps and self.steps[-1] <= step:
            self.step = None
            shutil.rmtree(self._place, ignore_errors=True)


def _room(folder: Path, root: Path = Path("/")) -> float:
    """Return the bytes that are free in a folder in memory and in the memory of this job.

    Args:
        folder: The folder.
        root: Where `/proc` and `/sys` are.
    """
    rooms = [float(shutil.disk_usage(folder).free)]
    with (root / "proc/meminfo").open() as lines:
        free = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        rooms += [1024 * float(kib) for kib in free]
    # of the control groups around this process, as Slurm and Kubernetes limit them
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # none are named in version 2
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            # in a container, what this names may be outside: the top is that of the container then
            rooms += [_left(one) for one in (group, *group.parents) if one.is_relative_to(top)]
    return min(rooms)


def _left(group: Path) -> float:
    """Return the bytes that a control group may still take."""
    for limit, used in LIMITS:
        if (group / limit).exists() and (most := (group / limit).read_text().strip()) != "max":
            return float(most) - float((group / used).read_text())
    return float("inf")
