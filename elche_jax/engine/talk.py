"""What the processes of a job tell each other between collectives, including errors."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from elche_jax._processes import PROCESSES, of_process
from elche_jax.engine.digests import digests_of
from elche_jax.engine.job import Job


@dataclass(frozen=True)
class _Failed:
    """What a process sends in place of a value if it cannot go on."""

    error: str


class Talk(AbstractContextManager["Talk"]):
    """What the processes of a job tell each other while each does its own work.

    All processes make the same calls. If one raises in the context, it sends the error in place of
    its next value, and the others raise at that call, too, so that no process is left waiting.

    Args:
        job: The processes.
        where: The function the user called, for messages.
    """

    def __init__(self, job: Job, where: str):
        self._job, self._where, self._ended = job, where, False

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        # a Ctrl-C ends the process, whatever the script does next
        if isinstance(error, KeyboardInterrupt):
            PROCESSES.raised(error)
        # a loop that is left early is left in all processes
        if isinstance(error, Exception) and not self._ended and not self._job.one_process:
            self._job.exchange(_Failed(f"{type(error).__name__}: {error}"), self._where)

    def tell(self, value: Any) -> list[Any]:
        """Return the values that all live processes pass, in the order of processes.

        Raises:
            RuntimeError: If a process has failed.
        """
        self._ended = True  # in case the exchange fails, for example because a process has ended
        told = self._job.exchange(value, self._where)
        for process, one in zip(self._job.ranks_of, told, strict=True):
            if isinstance(one, _Failed):
                error = RuntimeError(
                    f"{self._where}: every process must get through it, but process {process} "
                    f"raised {one.error}"
                )
                raise of_process(error, process)
        self._ended = False
        return told

    def check_same(self, **values: Any) -> None:
        """Raise unless all processes pass the same values, see `Job.check_same`."""
        if not self._job.one_process:
            found = np.stack(self.tell(digests_of(values)))
            self._ended = True  # if they differ, all processes find out
            self._job.compare(self._where, values, found)
            self._ended = False
