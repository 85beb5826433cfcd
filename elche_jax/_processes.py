"""Which processes of a job are there, and what they do when one of them has ended.

A job of several processes is *recoverable* if JAX's runtime lets the others outlive one
(`elche_jax.distributed.initialize` asks for it). An exchange is then a transaction: all processes
that are there have its result, or none uses it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from elche_jax import _progress

T = TypeVar("T")
logger = logging.getLogger("elche_jax")

NO_COORDINATOR = (
    "train: process 0, which holds JAX's coordinator, ended, and the job ends with it. Start the "
    "job again, with resume='auto' to go on from its last checkpoint."
)


REPLACED = (
    "train: a process of the job ended and another one took its place, which cannot join. Start "
    "the job again, with resume='auto' to go on from its last checkpoint."
)


class ProcessLostError(RuntimeError):
    """A process of the job has ended, and the job cannot go on without it.

    Attributes:
        processes: Indices of the processes that have ended.
    """

    def __init__(self, message: str, processes: Sequence[int] = ()):
        super().__init__(" ".join([message, *_progress.told()]))
        self.processes = tuple(processes)


class ExchangeLost(Exception):
    """An exchange that had no result, as a process had ended; the others have noted it."""


class Processes:
    """The processes of the job that this process is part of.

    Attributes:
        gone: Indices of those that have ended. All that are left change it in the same exchange.
    """

    def __init__(self) -> None:
        self.gone: frozenset[int] = frozenset()
        # one device of each process, always the same: JAX compares what it finds with these
        self._asked: Sequence[jax.Device] = ()
        self._one_at_a_time = threading.Lock()

    @property
    def recoverable(self) -> bool:
        """Whether the others outlive a process that ends."""
        return bool(jax.config.values["jax_enable_recoverability"])

    def together(self, leads: Sequence[jax.Device], exchange: Callable[[], T]) -> T:
        """Return the result of an exchange that all processes which are there have.

        Args:
            leads: A device of each process of the job, at the first call.
            exchange: Dispatches the exchange, and waits for its result.

        Raises:
            ExchangeLost: In all processes that are there, if one of the others has ended. Which
                it was is in `gone`.
            ProcessLostError: If it was process 0.
        """
        with _progress.phase("exchange"):
            if not self.recoverable:
                return exchange()
            self._asked = self._asked or tuple(leads)
            with self._one_at_a_time:
                return self._together(exchange)

    def _together(self, exchange: Callable[[], T]) -> T:
        try:
            # All are there. A process waits here for one that is late, so the exchange itself is
            # short, and one that has ended is noticed before the others depend on it.
            self._agree(lambda: None)
            return self._agree(exchange)
        except jax.errors.JaxRuntimeError as error:
            if "oordination" not in str(error):
                raise
            # said at once: JAX ends this process as soon as it notices
            logger.error("elche: %s", NO_COORDINATOR)
            raise ProcessLostError(NO_COORDINATOR, (0,)) from error

    def _agree(self, run: Callable[[], T]) -> T:
        """Return what a function returns, once all processes that are there have run theirs."""
        before = {device.process_index for device in self._asked} - self.gone
        try:
            with multihost_utils.live_devices(list(self._asked)) as there:
                if before - _processes_of(there):
                    raise ExchangeLost
                result = run()
        except (multihost_utils.ProcessFailureError, ExchangeLost) as error:
            _progress.log_told()
            gone = before - _processes_of(multihost_utils.live_devices.devices or ())
            if not gone:  # else it would be tried again for ever
                raise ProcessLostError(REPLACED) from error
            self.gone |= gone
            raise ExchangeLost from error
        return result

    def leave(self) -> None:
        """Leave the job when all other processes that are there do, or have ended.

        The coordinator is in process 0, which leaves last: the others would be ended with it.
        """
        if not self._asked:
            first = {device.process_index: device for device in reversed(jax.devices())}
            self._asked = tuple(first.values())
        self._wait()
        if jax.process_index() == 0:
            self._wait()  # until there is nobody to wait for
        jax.distributed.shutdown()

    def _wait(self) -> None:
        # a process that has ended is no matter any more
        ended, asked = multihost_utils.ProcessFailureError, list(self._asked)
        with _progress.phase("leave"), suppress(ended), multihost_utils.live_devices(asked):
            pass


def _processes_of(devices: Iterable[jax.Device]) -> set[int]:
    return {device.process_index for device in devices}


PROCESSES = Processes()
"""Those of this process's job."""
