"""How many processes each generation of a job has, given how the last one ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elche_jax._progress import AGAIN

RESTARTS = 3
"""Default number of restarts after failures."""


class Failure(NamedTuple):
    """A process that has failed.

    Attributes:
        number: Its number in the job.
        place: Its place on this machine.
        code: Its exit code, or 128 plus the number of the signal that ended it.
    """

    number: int
    place: int
    code: int


class Outcome(NamedTuple):
    """How a generation ended.

    Attributes:
        code: The exit code of process 0, which has the last word.
        failures: The processes that failed, in order of failure.
        progress: Whether a window was completed.
        asked: Whether the launcher had asked the processes to end.
    """

    code: int
    failures: Sequence[Failure] = ()
    progress: bool = True
    asked: bool = False


class Ended(NamedTuple):
    """No generation follows.

    Attributes:
        code: The exit code of the launcher.
        why: What to print; empty after success.
    """

    code: int
    why: str = ""


@dataclass(frozen=True)
class Elastic:
    """The number of processes, from one generation to the next.

    A machine has `high` places, each for one process. A place whose process failed before the
    generation had completed a window is left out until a different number is wanted.

    Attributes:
        low: The smallest number; with fewer the job ends.
        high: The largest number.
        wanted: The wanted number.
        restarts: How many more times the job may be restarted after a failure.
        broken: Places that are left out.

    Examples:
        >>> elastic = Elastic(low=2, high=4, wanted=3)
        >>> elastic.places
        (0, 1, 2)
        >>> lost = Outcome(AGAIN, [Failure(1, place=1, code=137)], asked=True)
        >>> elastic.after(lost).places  # it comes back
        (0, 1, 2)
        >>> elastic.after(lost._replace(progress=False)).places  # it could not run
        (0, 2, 3)
    """

    low: int
    high: int
    wanted: int
    restarts: int = RESTARTS
    broken: frozenset[int] = frozenset()

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the next generation's processes, in the order of their numbers."""
        whole = [place for place in range(self.high) if place not in self.broken]
        return tuple(whole[: self.wanted])

    def resized(self, wanted: int) -> "Elastic":
        """Return what follows if a different number is wanted; no place is left out any more."""
        return replace(self, wanted=wanted, broken=frozenset())

    def after(self, outcome: Outcome) -> "Elastic | Ended":
        """Return what follows a generation."""
        code, failures = outcome.code, outcome.failures
        if code == 0:
            return Ended(0)
        if code == AGAIN and outcome.asked and not failures:
            return self
        first = failures[0] if failures else Failure(0, place=0, code=code)
        code, last = first.code, f"process {first.number} ended with exit code {first.code}"
        if not self.restarts:
            return Ended(code, f"all restarts are used up (--max-restarts): {last}")
        following = replace(self, restarts=self.restarts - 1)
        if failures and not outcome.progress:
            following = replace(following, broken=self.broken | {first.place})
        can = len(following.places)
        if can < self.low:  # only possible if a place is left out
            last += " before the first window was complete"
            several = "es" if can != 1 else ""
            without = f"without its place {can} process{several} could run"
            return Ended(code, f"{last}; {without}, but at least {self.low} must (--elastic)")
        return following


def parsed(text: str, elastic: Elastic) -> int | None:
    """Return the number of processes in a text; None if it is not a number or out of range.

    Examples:
        >>> elastic = Elastic(low=2, high=4, wanted=3)
        >>> parsed("4\\n", elastic), parsed("5", elastic), parsed("", elastic)
        (4, None, None)
    """
    text = text.strip()
    number = int(text) if text.isdecimal() and text.isascii() and len(text) < 9 else 0
    return number if elastic.low <= number <= elastic.high else None
