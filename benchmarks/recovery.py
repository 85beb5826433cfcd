"""What a process that is killed costs: to go on, to start again, to restart by hand.

    python benchmarks/recovery.py [--minutes 3] [--out FILE]

Three processes, each with an emulated device of 20 ms, and a schedule of kills (`kill -9`), the
same for each way:

- `elastic`: `elche-jax launch --elastic`: the others go on, save, and all start again;
- `go on`: `elche-jax launch --on-failure continue`: the others go on, nobody comes back;
- `by hand`: the job ends, and is started again at once from its last checkpoint.

An hour with a fault every quarter of it is compressed to minutes, with checkpoints as often in it;
imports, compiles and heartbeats are not compressed, so the hour itself is computed, too. Progress
counts once: what is trained again after a restart is lost.
"""

import argparse
import json
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import kill
from pathlib import Path
from statistics import median

from measure import Result, show
from recovery_worker import MS

PROCESSES, FAULTS, HEARTBEAT = 3, 3, 5
CHECKPOINTS = 12
"""Checkpoints of the hour: one in five minutes."""

WAYS = {
    "elastic": ["--elastic", f"1:{PROCESSES}", "--max-restarts", "100"],
    "go on": ["--on-failure", "continue"],
    "by hand": [],
}
HERE = Path(__file__).parent
READY = 20
"""Windows after which the clock begins."""


@dataclass
class Way:
    """One way of going on, as it was seen.

    Attributes:
        name: Its name.
        back_s: Seconds from each kill to the next window beyond those that were finished.
        again: Microbatches that were trained again.
        goodput: Microbatches of the schedule over those of all devices without a fault.
    """

    name: str
    back_s: list[float] = field(default_factory=list)
    again: int = 0
    goodput: float = 0.0


class Job:
    """A job that is killed now and then.

    Args:
        way: Options of `elche-jax launch`.
        folder: Of the checkpoints.
        every: Seconds between checkpoints.
    """

    def __init__(self, way: Sequence[str], folder: str, every: float):
        worker = [str(HERE / "recovery_worker.py"), folder, str(every), str(HEARTBEAT)]
        self._command = [
            sys.executable, "-m", "elche_jax", "launch", "-n", str(PROCESSES),
            "--cpu-devices", "1", *way, *worker,
        ]  # fmt: skip
        self._said: queue.Queue[dict | None] = queue.Queue()
        self.pids: dict[int, int] = {}
        self._start()

    def _start(self) -> None:
        self._child = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, args=[self._child], daemon=True).start()

    def _read(self, child) -> None:
        for line in child.stdout:
            number, _, rest = line.partition(" ")
            with suppress(ValueError):
                self._said.put(json.loads(rest) | {"process": int(number.strip("[]"))})
        self._said.put(None)

    def windows(self, until: float):
        """Yields the time and the microbatches of each window; starts what has ended again."""
        while (left := until - time.time()) > 0:
            try:
                said = self._said.get(timeout=left)
            except queue.Empty:
                return
            if said is None:
                self._child.wait()
                self._start()
            elif "pid" in said:
                self.pids[said["process"]] = said["pid"]
            else:
                yield said["at"], said["done"]

    def end(self) -> None:
        """Ends all of it."""
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()
        self._child.stdout.close()


def measure(name: str, seconds: float, seed: int = 0) -> Way:
    """Runs the schedule."""
    way, chance = Way(name), random.Random(seed)
    # in the middle of each part, so that there is time to come back
    due = [(k + chance.uniform(0.2, 0.4)) * seconds / FAULTS for k in range(FAULTS)]
    victims = [1, 2, 1] if name != "go on" else [1, 2]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(WAYS[name], folder, seconds / CHECKPOINTS)
        try:
            for count, (at, done) in enumerate(job.windows(time.time() + 120)):  # noqa: B007
                if count == READY:
                    break
            else:
                raise SystemExit(f"{name}: no {READY} windows in two minutes")
            begun, first, most, last = at, done, done, done
            killed: float | None = None
            for at, done in job.windows(begun + seconds):
                if done < last:  # from a checkpoint
                    way.again += last - done
                last = done
                if done > most:
                    most = done
                    if killed is not None:
                        way.back_s.append(at - killed)
                        killed = None
                if killed is None and due and victims and at - begun > due[0]:
                    due.pop(0)
                    killed = time.time()
                    kill(job.pids[victims.pop(0)], signal.SIGKILL)
        finally:
            job.end()
    way.goodput = (most - first) * MS / 1e3 / (PROCESSES * seconds)
    return way


def results(ways: Sequence[Way]) -> list[Result]:
    """Returns the figures."""
    found = []
    for way in ways:
        back, case = median(way.back_s), way.name
        values = tuple(way.back_s)
        apart = back if case == "by hand" else back - HEARTBEAT
        found += [
            Result(case, "from the kill to the next new window", back, "s", repeats=values),
            Result(case, "the same, heartbeat apart", apart, "s"),
            Result(case, "microbatches trained again, per kill", way.again / len(values)),
            Result(case, "goodput of the schedule", way.goodput),
        ]
        if case != "go on":  # whose devices do not come back
            lost = FAULTS * back
            if case == "by hand":  # half of what lies between checkpoints is trained again
                lost += FAULTS * 3600 / CHECKPOINTS / 2
            found.append(Result(case, "goodput of the hour, computed", 1 - lost / 3600))
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--way", choices=WAYS, action="append")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recovery.json"))
    arguments = parser.parse_args()
    ways = [measure(name, 60 * arguments.minutes) for name in arguments.way or WAYS]
    show(results(ways), arguments.out)


if __name__ == "__main__":
    main()
