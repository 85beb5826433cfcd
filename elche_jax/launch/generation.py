"""The processes that run a job together, from their start to their end."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NamedTuple

from elche_jax._progress import AGAIN, MEMORY, VARIABLE, ProgressFile
from elche_jax.launch.child import Child
from elche_jax.launch.elastic import Elastic, Failure, Outcome
from elche_jax.launch.ends import End, Ends
from elche_jax.launch.memory import Folder
from elche_jax.launch.output import Output
from elche_jax.launch.watchdog import Watchdog

NAME = "elche-jax launch"
STEPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end processes, in the order in which they are sent."""

DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # otherwise JAX's service takes SIGTERM as a notice, and the process does not end
    "JAX_ENABLE_PREEMPTION_SERVICE": "0",
}
"""Environment variables of the processes, unless this process's environment sets them."""


LATE_S = 10.0
"""Seconds that the others have to end after the first process, before they are named."""


@dataclass(frozen=True)
class Asked:
    """What to launch.

    Attributes:
        command: The program and its arguments.
        processes: Number of processes to start here.
        total: Number of processes of the job.
        first: Number of the first process here.
        coordinator: Address of process 0; None for a free port of this machine.
        cpu_devices: Virtual CPU devices of each process; None for the devices there are.
        go_on: Whether the others continue when a process fails.
        timeout: Seconds that a window may take; None for no watchdog.
        grace: Seconds between two signals of `STEPS`.
        elastic: How many processes generations may have; None for a single generation.
        number_file: A file that holds the wanted number of processes; or None.
    """

    command: Sequence[str]
    processes: int
    total: int
    first: int = 0
    coordinator: str | None = None
    cpu_devices: int | None = None
    go_on: bool = False
    timeout: float | None = None
    grace: float = 10.0
    elastic: Elastic | None = None
    number_file: Path | None = None


class Shared(NamedTuple):
    """What all generations of a job share.

    Attributes:
        selector: Waits for the processes' output.
        output: Where this output goes.
        folder: A private folder.
        memory: A folder in memory for the checkpoint that the next generation starts from; or None.
        mark: Name of an environment variable that all processes have.
    """

    selector: selectors.BaseSelector
    output: Output
    folder: Path
    memory: Folder | None
    mark: str


class Generation:
    """The processes of a job that are started here.

    Attributes:
        code: The exit code so far.
        failed: Whether `code` is that of a failure or of what ended all processes.

    Args:
        asked: What to launch.
        places: The places of the processes on this machine, in the order of their numbers.
        shared: What all generations share.
        folder: A new folder, in which the processes note what they do.
    """

    def __init__(self, asked: Asked, places: Sequence[int], shared: Shared, folder: Path):
        self._asked, self._output, self._folder = asked, shared.output, folder
        self._stack = ExitStack()
        self._children: list[Child] = []
        self._alive: dict[int, Child] = {}
        self._step: int | None = None  # the last signal, an index in `STEPS`; when the next is due
        self._due = 0.0
        self._stopped = False
        self._ends = Ends(asked.grace)
        self._late_at = inf  # when to say whom this waits for, once the first has ended
        self._watchdog: Watchdog | None = None
        self._killed: set[int] = set()  # by the watchdog
        self.code = 0
        self.failed = False
        self._first_code = 0
        self._failures: list[Failure] = []
        self._asked_to_end = False
        try:
            self._start(places, shared)
        except BaseException:
            self.close()
            raise

    def _start(self, places: Sequence[int], shared: Shared) -> None:
        asked, memory = self._asked, shared.memory
        total = asked.total if asked.elastic is None else len(places)
        address = asked.coordinator
        if address is None:
            address = f"localhost:{self._stack.enter_context(_free_port())}"
        common = {
            **DEFAULTS,
            **os.environ,
            "JAX_COORDINATOR_ADDRESS": address,
            "ELCHE_NUM_PROCESSES": str(total),
            MEMORY: "" if memory is None else str(memory.path),
            shared.mark: "1",
        }
        inherited = () if memory is None else (memory.lock,)
        if asked.cpu_devices is not None:
            common |= {"JAX_NUM_CPU_DEVICES": str(asked.cpu_devices), "JAX_PLATFORMS": "cpu"}
        self._place_of = dict(enumerate(places, asked.first))
        width = len(str(max(self._place_of)))
        watched = asked.timeout is not None
        noted = watched or asked.elastic is not None
        self._notes = {
            at: ProgressFile.create(self._folder / str(at), watched, noted) for at in self._place_of
        }
        if asked.timeout is not None:
            self._watchdog = Watchdog(self._notes, asked.timeout, total)
        for at, place in self._place_of.items():
            own = {"ELCHE_PROCESS_ID": str(at), "ELCHE_LOCAL_ID": str(place)}
            own[VARIABLE] = str(self._notes[at].path)
            prefix = f"[{at:{width}}] ".encode()
            child = Child(
                at, asked.command, common | own, prefix, shared.output, shared.selector, inherited
            )
            self._children.append(child)
            self._alive[at] = child

    @property
    def over(self) -> bool:
        """Whether all processes have ended, and all ends have been handled."""
        return not self._alive and not self._ends

    @property
    def ending(self) -> bool:
        """Whether the processes are being ended."""
        return self._step is not None

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return Outcome(self._first_code, self._failures, self._progress, self._asked_to_end)

    @property
    def _progress(self) -> bool:
        """Whether a process has trained a window."""
        return any(file.read().trained for file in self._notes.values())

    @property
    def _raised(self) -> int | None:
        """A live process whose error ends others; None if there is none."""
        return next((at for at in self._alive if self._notes[at].because == at), None)

    def read(self) -> None:
        """Read what the processes print, unless too much of it waits to be written."""
        for child in self._children:
            child.read(not self._output.full)

    @property
    def due(self) -> float:
        """When `go_on` has to be called even if nothing happens, in terms of `time.monotonic`."""
        if self._step is not None:
            return self._due if self._step < len(STEPS) - 1 else inf
        look = inf if self._watchdog is None else time.monotonic() + self._watchdog.every
        return min(look, self._ends.due, self._late_at)

    def go_on(self) -> None:
        """Handle processes that have ended, and end those that have to."""
        for child in [*self._alive.values()]:
            if (code := child.ended()) is not None:
                del self._alive[child.number]
                because = self._notes[child.number].because
                if because is None and code:
                    because = self._raised  # JAX aborted it before it could note that itself
                end = End(child.number, code, because)
                for one in self._ends.after(end, self._alive, time.monotonic()):
                    self._on_end(one)
        for one in self._ends.overdue(time.monotonic()):
            self._on_end(one)
        if self._step is not None and time.monotonic() >= self._due:
            self._end(self._step + 1)
        if self._watchdog is not None and self._step is None:
            self._look(self._watchdog)
        self._tell_who_is_late()

    def ask(self) -> None:
        """Ask the processes to save and to end."""
        self._asked_to_end = True
        for at in self._alive:
            self._notes[at].ask()

    def stop(self, code: int, step: int, hurry: bool = False) -> None:
        """End all processes with an exit code.

        Args:
            code: The exit code, unless a failure or an earlier call has already set one.
            step: Index in `STEPS` of the signal to begin with; nothing happens if it was already
                sent.
            hurry: Whether to send the next signal at once if this was called before.
        """
        if not self.failed:
            self.failed, self.code = True, code
        if self._step is not None and hurry and self._stopped:
            step = self._step + 1
        self._stopped = True
        if self._step is None or step > self._step:
            self._end(step)

    def pass_on(self, number: int) -> None:
        """Send a signal to all processes, unless they are being ended."""
        if self._step is None:
            for child in self._alive.values():
                child.pass_on(number)

    def close(self) -> None:
        """Kill what is left of the processes and their groups."""
        for child in self._alive.values():
            child.signal(signal.SIGKILL)
        for child in self._children:
            child.close()
        self._stack.close()

    def _end(self, step: int) -> None:
        self._step = min(step, len(STEPS) - 1)
        self._due = time.monotonic() + self._asked.grace
        for child in reversed(self._alive.values()):  # the coordinator last: the others need it
            child.signal(STEPS[self._step])

    def _on_end(self, end: End) -> None:
        """Handle the end of a process."""
        asked, (number, code, because) = self._asked, end
        if number == asked.first and self._step is None:
            self._first_code, self._late_at = code, time.monotonic() + LATE_S
            if asked.go_on:
                self.code = code
        if not code or self._step is not None:
            return
        if code == AGAIN:  # not a failure: it has saved, and the others leave likewise
            self.code = self.code if asked.go_on else AGAIN
            return
        how = f"exit code {code}"
        if code > 128 and code - 128 in set(signal.Signals):
            how = signal.Signals(code - 128).name
        said = f"process {number} ended with {how}"
        if because not in (None, number):
            said += f" because of process {because}"
        if asked.elastic is not None:
            self._failures.append(Failure(number, self._place_of[number], code))
            self._without(number, said)
            return
        say(self._output, f"{said}{self._fate_of_others(end) if self._alive else ''}")
        if not asked.go_on:
            self.stop(code, 1)

    def _tell_who_is_late(self) -> None:
        """Name the processes that still run some time after the first, whose end is the job's."""
        if time.monotonic() < self._late_at:
            return
        self._late_at = inf
        if self._alive and self._step is None:
            left = ", ".join(map(str, self._alive))
            first = self._asked.first
            say(self._output, f"process {first} has ended, waiting for process {left}")

    def _fate_of_others(self, end: End) -> str:
        """Return what becomes of the others after a failure, as part of a line."""
        if not self._asked.go_on:
            return ", ending the others"
        if end.because is None:
            if 0 in self._notes and 0 not in self._alive and self._notes[0].read().several:
                return ", the job ends with it" if end.number == 0 else ""
            return ", the others go on"
        # those that exchange again raise, too
        return ", the others are told why" if end.because == end.number else ""

    def _without(self, number: int, said: str) -> None:
        """After the end of a process, let the others save, or end them if they cannot."""
        if not self._alive or 0 not in (number, *self._alive):
            say(self._output, said)  # it was the last one, or the first has done its work
        elif number == 0 or not self._progress:
            # the coordinator has gone, or there is nothing to save
            self._first_code = self._first_code or self._failures[0].code
            say(self._output, f"{said}, ending the others")
            self._end(1)
        else:
            # they save, unless they raise, for example because it has left with an error
            asks = "" if self._asked_to_end else ", the others are asked to save and to end"
            say(self._output, f"{said}{asks}")
            self.ask()

    def _look(self, watchdog: Watchdog) -> None:
        alive = {n: child.pid for n, child in self._alive.items() if n not in self._killed}
        for stuck in watchdog.look(alive, time.monotonic()):
            ended = [*alive] if stuck.process is None else [stuck.process]
            say(self._output, str(stuck))
            watchdog.tell(self._folder, f"{NAME}: {stuck}", alive.keys() - set(ended))
            self._killed.update(ended)
            for number in ended:
                self._alive[number].signal(signal.SIGKILL)


def say(output: Output, text: str) -> None:
    """Print a line of the launcher."""
    # keeps the bytes of a file's name as they are
    output.put(2, f"{NAME}: {text}\n".encode("utf-8", "surrogateescape"))


@contextmanager
def _free_port() -> Generator[int]:
    """Reserve a port, so that no other launcher takes it meanwhile.

    It is bound without listening. The coordinator can bind it as well, as both allow its reuse.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]
