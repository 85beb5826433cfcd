"""The errors of a run: found in threads, raised in all processes' loops before the same window."""

from elche_jax._processes import ExchangeLost
from elche_jax._waiting import Condition
from elche_jax.engine.job import Job


class RunErrors:
    """The first error of a run.

    Attributes:
        first: The error for the loop to raise; None if there is none.
        raised: Whether the loop has seen it.

    Args:
        changed: Notified of every change.
        job: The processes.
    """

    def __init__(self, changed: Condition, job: Job):
        self._changed, self._job = changed, job
        self.first: BaseException | None = None
        self.raised = False
        # an error that all processes find, and the number of the dispatch in which they do
        self._shared: tuple[int, Exception] | None = None

    def keep(self, error: BaseException) -> None:
        """Keep the first exception of a thread, for the loop to raise.

        Lost windows are not an error: a thread that waits for them decides what to do.
        """
        with self._changed:
            if not isinstance(error, ExchangeLost):
                self.first = self.first or error
            self._changed.notify_all()

    @property
    def broken(self) -> bool:
        """Whether there is an error; a Ctrl-C that waits to be raised does not count."""
        return self.first is not None and not isinstance(self.first, KeyboardInterrupt)

    def take_interrupt(self) -> bool:
        """Return whether a Ctrl-C waits to be raised; if so, the caller must raise it."""
        waits = isinstance(self.first, KeyboardInterrupt) and not self.raised
        self.raised |= waits
        return waits

    def found(self, number: int, error: Exception) -> None:
        """Keep an error that every process finds in the window of this dispatch."""
        if self._job.one_process:
            self.keep(error)
        elif self._shared is None:
            self._shared = number, error

    def release(self, last: int | None) -> None:
        """Raise an error of a thread, or one that all processes have found up to a dispatch.

        All raise it before the same window: a process that went on would wait for the others there.

        Args:
            last: Number of the dispatch; None for any.
        """
        if self._shared is not None and (last is None or self._shared[0] <= last):
            self.keep(self._shared[1])
        self.check()

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.first is not None:
            self.raised = True
            raise self.first
