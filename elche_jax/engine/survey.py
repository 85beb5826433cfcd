"""What the processes of a job tell each other about a window."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Survey:
    """What the processes of a job tell each other about a window in its exchange.

    Attributes:
        measure: Returns the rows of this process's devices, see `Measured`; None once called.
        lost: Ranks of the devices missing from the window, as their processes have ended.
        rows: What `measure` returned; None before.
        found: The rows of all devices, on a device or the host; None before the exchange.
    """

    measure: Callable[[], np.ndarray] | None
    lost: tuple[int, ...] = ()
    rows: Any = None
    found: Any = None

    def take(self) -> np.ndarray:
        """Measure once and drop the function: it refers to the run, which refers to this object."""
        assert self.measure is not None
        measure, self.measure = self.measure, None
        self.rows = measure()
        return self.rows
