"""Decides which process of a job is stuck, from what each has noted and the time that passed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elche_jax._progress import Noted, Phase

MORE = 20
"""How many times longer than a window a phase may last that is not part of every window."""

WAITS = {"connect", "leave", "exchange"}
"""Phases in which a process waits for others."""

LONG = {"start-up", "connect", "leave", "compile", "restore", "checkpoint", "loop"}
"""Phases with a limit of `MORE` timeouts, like all phases of the first window, and an exchange
outside of a run. `"start-up"` lasts until the first note. In `"loop"` a process is in the middle of
a run and in no other phase."""

STOPPED = "stopped"
"""The phase of a process that a signal has stopped, which it cannot note itself."""

PAUSED_BY = {"data": LONG, "window": LONG | WAITS, "restore": WAITS}
"""Phases during which the time of a phase does not count, as it waits for them."""


Since = Mapping[Phase, float]
"""Seconds for which a process has been seen in each of its phases."""


class Seen(NamedTuple):
    """A process as seen in one look.

    Attributes:
        noted: What it has noted.
        state: Its state, a letter as in `ps`.
    """

    noted: Noted
    state: str = "S"


class Stuck(NamedTuple):
    """A process that makes no progress, or with `process=None` a collective in which all wait.

    Attributes:
        process: Its number.
        ranks: The ranks of its devices, as text.
        seconds: How long it has been in the phase.
        window: The window that it is in; None if it is in none.
        kind: The phase.
        stopped: Whether a signal has stopped it.
    """

    process: int | None
    ranks: str
    seconds: float
    window: int | None
    kind: str
    stopped: bool = False

    def __str__(self) -> str:
        """Return what becomes of it, as one line.

        Examples:
            >>> print(Stuck(1, "ranks 2 and 3", 30.2, 17, "data"))
            process 1 (ranks 2 and 3) made no progress for 30 s in window 17, phase "data": killed
        """
        where = "" if self.window is None else f" in window {self.window}"
        where += f'{"," if where else " in"} phase "{self.kind}"'
        if self.process is None:
            return f"all processes waited for each other for {self.seconds:.0f} s{where}: killed"
        ranks = f" ({self.ranks})" if self.ranks else ""
        stopped = ", stopped by a signal" if self.stopped else ""
        return (
            f"process {self.process}{ranks} made no progress for {self.seconds:.0f} s{where}"
            f"{stopped}: killed"
        )


@dataclass(frozen=True)
class Judge:
    """How long every process has been in each of its phases, and when that is too long.

    Time counts only if it was seen to pass and the process could have gone on: a watchdog that was
    itself asleep blames no process.

    Attributes:
        timeout: Seconds that a window or reading its data may take.
        processes: Number of processes of the job. Only while all are seen is it known that all
            wait: if one has ended, the others wait for it until JAX's own timeouts expire.
        since: How long each process has been seen in its phases.

    Examples:
        >>> reads = Noted(notes=1, running=True, ranks="rank 0", phases=(Phase("data", 4),))
        >>> judge, stuck = Judge(timeout=30.0).observe({0: Seen(reads)}, elapsed=1.0)
        >>> judge, stuck = judge.observe({0: Seen(reads)}, elapsed=31.0)
        >>> print(*stuck)
        process 0 (rank 0) made no progress for 31 s in window 4, phase "data": killed
    """

    timeout: float
    processes: int = 1
    since: Mapping[int, Since] = field(default_factory=dict[int, Since])

    def observe(self, seen: Mapping[int, Seen], elapsed: float) -> tuple["Judge", list[Stuck]]:
        """Return an updated judge, and what is stuck.

        Args:
            seen: The live processes, by number.
            elapsed: Seconds since they were last seen.
        """
        since = {
            process: _since(self.since.get(process, {}), one, elapsed)
            for process, one in seen.items()
        }
        found = (self._stuck(process, one, since[process]) for process, one in seen.items())
        stuck = [one for one in found if one is not None]
        alone = len(seen) == 1 and not any(one.noted.several for one in seen.values())
        if not stuck and len(seen) == self.processes and (len(seen) > 1 or alone):
            stuck = self._all_wait(seen, since)
        return replace(self, since=since), stuck

    def _stuck(self, process: int, seen: Seen, since: Since) -> Stuck | None:
        """Return in what a process itself is stuck; None if it is not."""
        for phase, seconds in since.items():
            if phase.kind not in WAITS and seconds > self._limit(phase, seen.noted):
                stopped = phase.kind == STOPPED
                if stopped:  # show the phase that it was stopped in
                    phase = max(since, key=lambda one: (one != phase, since[one]))
                kind = "none" if phase.kind == STOPPED else phase.kind
                window = _window(phase, seen.noted)
                return Stuck(process, seen.noted.ranks, seconds, window, kind, stopped)
        return None

    def _all_wait(self, seen: Mapping[int, Seen], since: Mapping[int, Since]) -> list[Stuck]:
        """Return what is stuck if every process waits for others, so that none can go on."""
        found: dict[int, Stuck] = {}
        for process, own in since.items():
            noted = seen[process].noted
            for phase, seconds in own.items():
                if phase.kind in WAITS and seconds > self._limit(phase, noted):
                    window = _window(phase, noted)
                    found[process] = Stuck(process, noted.ranks, seconds, window, phase.kind)
        if not found or len(found) < len(seen):
            return []
        if len(found) == 1:  # its devices wait for each other
            return [*found.values()]
        last = min(found.values(), key=lambda one: one.seconds)
        return [last._replace(process=None, ranks="")]

    def _limit(self, phase: Phase, noted: Noted) -> float:
        """Return how many seconds a phase may last."""
        window = _window(phase, noted)
        # outside of a run, an exchange may be the first one, which compiles its program
        long = phase.kind in LONG or (window is None and phase.kind in WAITS)
        return self.timeout * (MORE if long or window == noted.first else 1)


def _since(before: Since, seen: Seen, elapsed: float) -> Since:
    """Return how long a process has been in its phases."""
    phases = _phases(seen)
    kinds = {phase.kind for phase in phases}

    def paused(phase: Phase) -> bool:
        if seen.state == "t":  # in a debugger
            return True
        stopped = STOPPED in kinds and phase.kind != STOPPED
        return stopped or not kinds.isdisjoint(PAUSED_BY.get(phase.kind, ()))

    # counted from the look that first sees it
    return {
        phase: before[phase] + (0.0 if paused(phase) else elapsed) if phase in before else 0.0
        for phase in phases
    }


def _phases(seen: Seen) -> list[Phase]:
    """Return the phases of a process, including those that it does not note itself."""
    noted, phases = seen.noted, [*seen.noted.phases]
    if not noted.notes:
        phases.append(Phase("start-up"))
    elif noted.running and not phases:
        phases.append(Phase("loop", begun=noted.notes))
    if seen.state == "T":
        phases.append(Phase(STOPPED))
    return phases


def _window(phase: Phase, noted: Noted) -> int | None:
    if phase.window >= 0:
        return phase.window
    return noted.window if noted.running else None
