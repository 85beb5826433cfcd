"""What a killed process costs if the others go on, if all start again, or by a manual restart.

    python benchmarks/recovery.py [--minutes 3] [--out FILE]

Three processes, each with an emulated device of 20 ms, and a schedule of kills (`kill -9`), the
same for each way:

- `elastic`: `elche-jax launch --elastic`: the others go on, save, and all start again;
- `go on`: `elche-jax launch --on-failure continue`: the others go on without it (one kill);
- `by hand`: the job ends, and is started again at once from its last checkpoint.

An hour with three faults is compressed to minutes, with the same number of checkpoints. The cost of
a fault is what all devices would have trained from the kill to the end of its part of the schedule,
at their rate before the first kill, minus the new microbatches trained in that time. So the cost
includes the restart of all processes and the time with fewer devices, and microbatches that are
trained again do not count as new. Starts, compiles and heartbeats are not compressed, so the
goodput of the hour is computed from the cost of a fault. By hand, half the time between two
checkpoints of the hour replaces the time spent on training again here.
"""

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
from itertools import pairwise
from os import kill
from pathlib import Path
from statistics import median

from measure import Result, options_of, show
from recovery_worker import MS

PROCESSES, FAULTS = 3, 3
HEARTBEAT = 30
"""Seconds until the others know that a process has ended, if its whole host has."""

CHECKPOINTS = 12
"""Checkpoints in the hour: one every five minutes."""

WAYS = {
    "elastic": ["--elastic", f"1:{PROCESSES}", "--max-restarts", "100"],
    "go on": ["--on-failure", "continue"],
    "by hand": [],
}
HERE = Path(__file__).parent
READY = 20
"""Windows before the clock starts."""


@dataclass
class Way:
    """One way of recovering, as measured.

    Attributes:
        name: Its name.
        back_s: Seconds from each kill to the next window beyond all that were finished before.
        known_s: Seconds from each kill until the others know of it; empty if they do not go on.
        lost_s: What each kill cost, in seconds of all devices.
        again_s: The part of this cost that was spent on training again, on average.
        goodput: Microbatches trained, as a share of what all devices could without a fault.
    """

    name: str
    back_s: list[float] = field(default_factory=list)
    known_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    again_s: float = 0.0
    goodput: float = 0.0


class Job:
    """A job whose processes are killed now and then.

    Args:
        way: Options of `elche-jax launch`.
        folder: Folder of the checkpoints.
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
        self.known: list[float] = []  # when a process noticed that another had ended
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
        """Yield the time and the microbatches of each window; start the job again if it ends."""
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
            elif "known" in said:
                self.known.append(said["known"])
            else:
                yield said["at"], said["done"]

    def end(self) -> None:
        """End the job."""
        self._child.send_signal(signal.SIGTERM)
        self._child.wait()
        self._child.stdout.close()


def measure(name: str, seconds: float, seed: int = 0) -> Way:
    """Run the schedule."""
    way, chance = Way(name), random.Random(seed)
    faults = 1 if name == "go on" else FAULTS
    part = seconds / faults
    due = [(k + chance.uniform(0.2, 0.4)) * part for k in range(faults)]
    seen: list[tuple[float, int]] = []  # seconds since the start, microbatches
    kills: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(WAYS[name], folder, seconds / CHECKPOINTS)
        try:
            for at, done in job.windows(time.time() + 120 + seconds):
                seen.append((at, done))
                if len(seen) <= READY:
                    continue
                since = at - seen[READY][0]
                if since > seconds:
                    break
                if len(kills) < faults and since > due[len(kills)]:
                    kills.append(time.time())
                    kill(job.pids[1 + len(kills) % 2], signal.SIGKILL)
        finally:
            job.end()
    if len(kills) < faults:
        raise SystemExit(f"{name}: it ended before {faults} processes were killed")
    if job.known:
        way.known_s = [min(t for t in job.known if t > at) - at for at in kills]
    _reckon(way, seen[READY:], kills, part, seconds)
    return way


def _reckon(
    way: Way, seen: Sequence[tuple[float, int]], kills: Sequence[float], part: float, seconds: float
) -> None:
    """Compute what the kills cost."""
    begun, first = seen[0]

    def most(until: float) -> int:
        return max(done for at, done in seen if at <= until)

    rate = (most(kills[0]) - first) / (max(at for at, _ in seen if at <= kills[0]) - begun)
    for k, at in enumerate(kills):
        end = begun + (k + 1) * part
        before = most(at)
        way.back_s.append(next(t for t, done in seen if t > at and done > before) - at)
        way.lost_s.append(end - at - (most(end) - before) / rate)
    again = sum(max(0, a - b) for (_, a), (_, b) in pairwise(seen))  # back to a checkpoint
    way.again_s = again / rate / len(kills)
    way.goodput = (most(begun + seconds) - first) * MS / 1e3 / (PROCESSES * seconds)


def results(ways: Sequence[Way]) -> list[Result]:
    """Return the figures."""
    found = []
    for way in ways:
        case, lost = way.name, median(way.lost_s)
        back = tuple(way.back_s)
        known = tuple(way.known_s) or (0.0,) * len(back)
        apart = tuple(b - k for b, k in zip(back, known, strict=True))
        found += [
            Result(case, "kill to the next new window", median(back), "s", repeats=back),
            Result(case, "kill until the others know", median(known), "s", repeats=known),
            Result(case, "from then to the next new window", median(apart), "s", repeats=apart),
            Result(case, "goodput of the schedule", way.goodput),
        ]
        if case == "go on":  # its devices do not come back: a fault costs without end
            continue
        found += [
            Result(case, "a fault costs, of all devices", lost, "s", repeats=tuple(way.lost_s)),
            Result(case, "of it trained again", way.again_s, "s"),
        ]
        if case == "by hand":
            lost += 3600 / CHECKPOINTS / 2 - way.again_s
        found.append(Result(case, "goodput of the hour", 1 - FAULTS * lost / 3600))
        if case != "by hand":
            share = 1 - FAULTS * (lost + HEARTBEAT) / 3600
            found.append(Result(case, f"the same, heartbeat of {HEARTBEAT} s", share))
    return found


def main() -> None:
    """Run the benchmark."""
    parser = options_of(__doc__, "benchmarks/results/recovery.json")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--way", choices=WAYS, action="append")
    arguments = parser.parse_args()
    ways = [measure(name, 60 * arguments.minutes) for name in arguments.way or WAYS]
    show(results(ways), arguments.out)


if __name__ == "__main__":
    main()
