"""What the end of a generation leaves in memory for the next one, before it is on disk."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from elche_jax._progress import MEMORY
from elche_jax.checkpoint.errors import described
from elche_jax.checkpoint.leaves import digest
from elche_jax.checkpoint.store import Saved, Store

logger = logging.getLogger("elche_jax")


class Memory:
    """A checkpoint in a folder in memory, which outlives the processes of a generation.

    `elche-jax launch --elastic` gives the folder, by a variable, and removes it at the end of the
    job. Without it nothing is kept. A checkpoint stays until it, or a later one, is on disk.

    Attributes:
        step: Number of windows trained, of the checkpoint that this object has kept; None if there
            is none.

    Args:
        folder: The folder on disk, by which the checkpoint is found again.
    """

    def __init__(self, folder: Path):
        given = os.environ.get(MEMORY)
        self._place = Path(given, digest(str(folder).encode())) if given else None
        self.step: int | None = None

    def keep(
        self,
        step: int,
        leaves: Mapping[str, np.ndarray],
        own: frozenset[str],
        notes: Mapping[str, Any],
    ) -> None:
        """Keep a checkpoint, see `Store.save`; one that does not fit is logged."""
        if self._place is None:
            return
        try:
            store = Store(self._place)
            try:
                store.save(step, leaves, own, notes)
            finally:
                store.close()
            self.step = step
        except OSError as error:
            logger.warning(
                "elche: the checkpoint of window %d is kept on disk only: %s", step - 1,
                described(error),
            )  # fmt: skip

    def newest(self, after: int) -> Saved | None:
        """Read the checkpoint that is kept, if it has more than so many windows and is intact."""
        if self._place is None or not self._place.exists():
            return None
        store = Store(self._place)
        try:
            return store.newest() if max(store.steps, default=-1) > after else None
        finally:
            store.close()

    def forget(self) -> None:
        """Free the memory."""
        self.step = None
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
