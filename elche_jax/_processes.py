"""Which processes of a job are there, and what they do when one of them has ended.

A job of several processes is *recoverable* if JAX's runtime lets the others go on when one ends
(`elche_jax.distributed.initialize` asks for this). An exchange is then a transaction: either all
live processes have its result, or none uses it.
"""

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.experimental import multihost_utils

from elche_jax import _coordinator, _leaving, _neighbours, _progress
from elche_jax._exit import before_exit
from elche_jax._log import logger
from elche_jax._turns import TURNS
from elche_jax._waiting import HeldInterrupt

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

NO_COORDINATOR = (
    "train: process 0, which holds JAX's coordinator, ended, and the job ends with it. Start the "
    "job again, with resume='auto' to go on from its last checkpoint."
)


REPLACED = (
    "train: a process of the job ended, and the one that took its place cannot join. Start the "
    "job again, with resume='auto' to go on from its last checkpoint."
)


RAISED = (
    "train: every process of the job must get through its loop, but process {} {}. Start "
    "the job again, with resume='auto' to go on from its last checkpoint."
)

SAME_GPU = (
    "train: each process of the job must have GPUs of its own, but two of them use the same one. "
    "Let each choose its own, for example with elche_jax.distributed.initialize(local_device_ids="
    "int(os.environ['ELCHE_LOCAL_ID']))."
)

SAME_CALLS = (
    "All must make the same calls in the same order: one that leaves its loop before the others, "
    "or that evaluates or saves alone, for example, meets them in a different call."
)

OTHER_CALL = (
    "train: an exchange among the processes failed, or took longer than exchange_timeout. "
    f"{SAME_CALLS}"
)

MET = f"elche_jax: process {{}} is in a different call from process {{}}. {SAME_CALLS}"

CALLS = "elche_jax/call"
"""Folder of the keys, one per process index, under which processes say in which call they are."""

EXPLAINED = {"Duplicate GPU": SAME_GPU, "Gloo": OTHER_CALL}
"""Explanations of errors in an exchange, by a part of the message of NCCL or gloo."""

LEFT = "left it before its end"
"""The reason given for a process that was in a loop, if no error is known."""

COUNT = "ELCHE_NUM_PROCESSES"
"""Environment variable in which a launcher says how many processes it has started."""

ALONE = (
    "elche: this process works alone, though it is one of %s that were started together. Call "
    "elche_jax.distributed.initialize() first thing, before JAX is used."
)

MOST = 1000
"""Largest number of an error's characters that the others get."""

WHOSE = "elche_process"
"""Attribute of another process's error: the index of that process."""

DEEP = 100
"""Largest number of errors that a chain of causes is followed through."""


class ProcessLostError(RuntimeError):
    """A process of the job has ended, and the job cannot go on without it.

    Attributes:
        processes: Indices of the processes that have ended.
    """

    def __init__(self, message: str, processes: Sequence[int] = ()):
        super().__init__(" ".join([message, *_progress.told()]))
        self.processes = tuple(processes)


class RestartRequested(SystemExit):
    """This process has saved a checkpoint, as it was asked to, and should be started again.

    Raised by `Checkpointer.save` and `Trainer.fit` in all processes of the job after the same
    window. If nothing catches it, the process ends with exit code 75, without a traceback.

    Attributes:
        windows: Number of windows in the checkpoint.
    """

    def __init__(self, windows: int):
        super().__init__(_progress.AGAIN)
        self.windows = windows


class Why(NamedTuple):
    """Why a process leaves its job.

    Attributes:
        text: The reason, for the others.
        process: The process because of which it leaves; None if the reason is its own.
    """

    text: str
    process: int | None = None


class ExchangeLost(Exception):
    """An exchange had no result because a process had ended; the others have noted its end."""


class Processes:
    """The processes of the job that this process is part of.

    Attributes:
        gone: Indices of those that have ended. The processes that are left all change it in the
            same exchange.
    """

    def __init__(self) -> None:
        self.gone: frozenset[int] = frozenset()
        # one device of each process, always the same: JAX compares what it finds with these
        self._asked: Sequence[jax.Device] = ()
        self._one_at_a_time = threading.Lock()
        self._logged: set[int] = set()  # processes whose end was logged
        self._warned = self._has_left = False
        self._store: Any = None  # the coordinator's client once this process has left
        self._neighbours: _neighbours.Neighbours | None = None
        self._calls = 0  # only those with a name, see `together`
        self._why: Why | None = None  # set while others may still be in the loop
        # several at once if loops are nested, for example an evaluation in a training loop
        self._loops: weakref.WeakSet[object] = weakref.WeakSet()

    def loop_begins(self, loop: object) -> None:
        """Note that a loop begins: if the process leaves before its end, the others are told."""
        self._loops.add(loop)
        self._why = Why(LEFT)

    def loop_ends(self, loop: object) -> None:
        """Note that a loop has reached its end; the loops around it have not."""
        self.loop_closes(loop)
        self._why = Why(LEFT) if self._loops else None

    def loop_closes(self, loop: object) -> None:
        """Note that a loop is over, at its end or before."""
        self._loops.discard(loop)

    def raised(self, error: BaseException) -> None:
        """Note the error with which a loop of this process was left."""
        if not isinstance(error, ExchangeLost | RestartRequested):  # all processes have the latter
            # not the error itself, which would keep the arrays of its frames alive
            self._why = _why(error)

    def log_loss(self, processes: Sequence[int], message: str) -> None:
        """Log that processes have ended; once for each, as training and evaluation both notice."""
        if not self._logged.issuperset(processes):
            self._logged.update(processes)
            logger.warning("elche: %s", message)

    def warn_if_alone(self) -> None:
        """Log, once, that this process has not joined the job that a launcher has started."""
        count = os.environ.get(COUNT, "1")
        if count != "1" and not jax.distributed.is_initialized() and not self._warned:
            self._warned = True
            logger.warning(ALONE, count)

    def joined(self, secure: bool) -> None:
        """Note that this process has joined a recoverable job.

        Args:
            secure: Whether joining needs a certificate: then no process can join in another's name.
        """
        self._watch_no_more()
        self._neighbours = None if secure else _neighbours.watch()

    @property
    def recoverable(self) -> bool:
        """Whether the others go on when a process ends."""
        return bool(jax.config.values["jax_enable_recoverability"])

    def together(
        self, leads: Sequence[jax.Device], exchange: Callable[[], T], call: str | None = None
    ) -> T:
        """Return the result of an exchange, which all live processes then have.

        Args:
            leads: A device of each process of the job, at the first call.
            exchange: Dispatches the exchange, and waits for its result.
            call: Name of the call: processes in different calls would wait in the exchange, or be
                aborted. None for the exchange of a window, in which looking at the others would
                cost too much; a process that meets it in another call notices.

        Raises:
            ExchangeLost: In all live processes, if one of the others has ended; `gone`
                then includes it.
            ProcessLostError: If process 0 has ended, or a process that left with an error.
            RuntimeError: If two processes use the same GPU, or are in different calls.
        """
        TURNS.wait()
        with _progress.phase("exchange"), _in_our_words():
            if not self.recoverable:
                return exchange()
            if not self._asked:
                self._asked = tuple(leads)
                before_exit(self._leave_with_error)
            # A Ctrl-C between barrier and collective would leave the others in the collective. None
            # of these calls can be interrupted, so this delays it by no more than the exchange.
            with HeldInterrupt() as interrupt, self._one_at_a_time:
                interrupt.begin()
                result = self._together(exchange, call)
        if interrupt.came:
            raise KeyboardInterrupt
        return result

    def _together(self, exchange: Callable[[], T], call: str | None) -> T:
        if call is not None:
            self._calls += 1
            call = f"{self._calls} {call}"
            key = f"{CALLS}/{_coordinator.index()}"
            _coordinator.tell(_coordinator.client(), key, call, anew=True)
        try:
            # A barrier first: processes wait here for a late one, so the exchange itself is short,
            # and they notice one that has ended before they depend on it.
            self._agree(lambda: None)
            if call is not None:
                self._check_call(call)
            return self._agree(exchange)
        except jax.errors.JaxRuntimeError as error:
            # gloo, too, may look for the coordinator, and not find it
            said = "oordination" in str(error)
            if not said or _coordinator.answers(_coordinator.client()):
                raise
            # logged at once: JAX ends this process as soon as it notices
            logger.error("elche: %s", NO_COORDINATOR)
            raise ProcessLostError(NO_COORDINATOR, (0,)) from error

    def _check_call(self, call: str) -> None:
        """Raise if a process is in a different call, which the exchange itself cannot show."""
        told = _coordinator.told_in(_coordinator.client(), CALLS)
        for process in sorted({device.process_index for device in self._asked} - self.gone):
            if told.get(str(process), call) != call:
                raise of_process(RuntimeError(MET.format(process, _coordinator.index())), process)

    def _agree(self, run: Callable[[], T]) -> T:
        """Return the result of a function once all live processes have run theirs."""
        before = {device.process_index for device in self._asked} - self.gone
        try:
            with multihost_utils.live_devices(list(self._asked)) as there:
                if before - _processes_of(there):
                    raise ExchangeLost
                if self.gone & _processes_of(there):  # started again, after its end was noticed
                    raise ProcessLostError(REPLACED)
                result = run()
        except (multihost_utils.ProcessFailureError, ExchangeLost) as error:
            _progress.log_told()
            gone = before - _processes_of(multihost_utils.live_devices.devices or ())
            if not gone:  # one seems to be back: for a moment another joins, to report its end
                back = _processes_of(getattr(error, "failed_devices", ()))
                gone = {process for process in back if _neighbours.found_ended(process)}
            if not gone:  # otherwise it would be tried again forever
                raise ProcessLostError(REPLACED) from error
            self.gone |= gone
            for process in sorted(gone):
                if (why := _leaving.reason_of(process)) is not None:
                    said = RAISED.format(process, why.removesuffix("."))
                    raise ProcessLostError(said, (process,)) from None
            raise ExchangeLost from error
        return result

    def leave(self) -> None:
        """Leave the job at the end of the program; process 0 once all others have left or ended.

        The coordinator runs in process 0: JAX would end the others with it. The others leave at
        once. A process that still needs them notices in its next exchange; so do all if process 0
        has an error. If the error ends process 0, it waits for them only for a while.
        """
        error = getattr(sys, "last_value", None)
        why, first = self._why if error is None else _why(error), _coordinator.index() == 0
        with _progress.phase("leave"):
            if first and why is None and self._asked:
                self._wait()
                self._watch_no_more()
                jax.distributed.shutdown()
                return
            # no reason for a process that has not begun: the others go on without it
            self._leave_at_once(why if first or self._asked else None)
            if first:
                others = set(_coordinator.others()) - self.gone
                # if the script has handled its error, this waits as after success
                seconds = math.inf if error is None else _leaving.PATIENCE_S
                _leaving.wait_for_others(self._store, others, self._ended, seconds)
            elif isinstance(error, ProcessLostError) and 0 in error.processes:
                _leaving.wait_for_first(self._store)

    def _leave_at_once(self, why: Why | None) -> None:
        if not self._has_left:
            self._has_left = True
            if why is not None:
                # before the reason: as soon as the others know it, a launcher may see one end
                _progress.blame(_coordinator.index() if why.process is None else why.process)
                _leaving.tell_reason(why.text)
            self._watch_no_more()
            self._store = _leaving.disconnect()

    def _watch_no_more(self) -> None:
        if self._neighbours is not None:
            self._neighbours.close()

    def _ended(self, process: int) -> bool:
        return self._neighbours is not None and self._neighbours.saw_end_of(process)

    def _wait(self) -> None:
        # a process that has ended does not matter any more
        ended, asked = multihost_utils.ProcessFailureError, list(self._asked)
        with suppress(ended), multihost_utils.live_devices(asked):
            pass

    def _leave_with_error(self) -> None:
        """Leave the job at once if an error ends this process: the others must not wait for it."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._leave_at_once(_why(error))


@contextmanager
def _in_our_words() -> Generator[None]:
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # gloo raises either
        for said, meaning in EXPLAINED.items():
            if said in str(error):
                raise RuntimeError(meaning) from error
        raise


def _processes_of(devices: Iterable[jax.Device]) -> set[int]:
    return {device.process_index for device in devices}


def _why(error: BaseException) -> Why:
    line = next(iter(str(error).strip().splitlines()), "without a message")
    return Why(f"raised {type(error).__name__}: {line}"[:MOST], _whose(error))


def of_process(error: E, process: int) -> E:
    """Mark an error that this process raises because of another one; return the error."""
    vars(error)[WHOSE] = process
    return error


def _whose(error: BaseException | None) -> int | None:
    """Return the process whose error this is, or comes from; None for this process."""
    for _ in range(DEEP):
        if error is None:
            break
        if isinstance(error, ProcessLostError) and error.processes:
            return error.processes[0]
        if (process := vars(error).get(WHOSE)) is not None:
            return process
        error = error.__cause__ or error.__context__
    return None


PROCESSES = Processes()
"""The processes of this process's job."""


def noting_errors(fn: Callable[P, T]) -> Callable[P, T]:
    """Note what a function raises, to tell the others if this process leaves the job with it."""

    @wraps(fn)
    def noted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            PROCESSES.raised(error)
            raise

    return noted
