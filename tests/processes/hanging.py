"""A process of a job in which one hangs, or only takes long; started by `elche-jax launch`."""

import json
import os
import signal
import sys
import threading
import time

if __name__ == "__main__":  # before it takes part in the job
    MOMENTS = json.loads(sys.argv[1]).get(os.environ["ELCHE_PROCESS_ID"], {})
    # what happens in this process: by the moment, the seconds that it takes, 0 for ever
    if "start-up" in MOMENTS:
        time.sleep(MOMENTS.pop("start-up") or 600)

from beats import HEARTBEAT

import elche_jax as elche  # after it, as what follows

if __name__ == "__main__":
    if len(sys.argv) > 2:
        elche.distributed.watch(float(sys.argv[2]))
    elche.distributed.initialize(heartbeat_timeout=HEARTBEAT, exchange_timeout=5)

import optax  # after it, as what follows
from reference import data, loss_fn, params

from elche_jax._processes import Processes
from elche_jax.checkpoint.store import Store
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.lanes import window as lanes_window

ROWS, BATCH = data(150), 4


def hang(moment):
    """Takes long, or for ever, if this is to happen."""
    if moment in MOMENTS:
        print("hangs", flush=True)
        threading.Event().wait(MOMENTS.pop(moment) or None)


def hanging_in(owner, name, moment, number=1):
    """Lets a method hang when it is called for the so-manyth time."""
    method, calls = getattr(owner, name), []

    def called(*args, **options):
        calls.append(name)
        if len(calls) == number:
            hang(moment)
        return method(*args, **options)

    setattr(owner, name, called)


def compiles_slowly():
    """Lets the first compile hang."""
    fill = CompileCache._fill

    def filled(self, key, program, build, ahead=0):
        fill(self, key, program, lambda: hang("compile") or build(), ahead)

    CompileCache._fill = filled


def stopped_after(seconds):
    """Stops this process in some seconds, if it is still there."""
    if seconds:
        print("hangs", flush=True)
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGSTOP))
        timer.daemon = True
        timer.start()


class Rows:
    """A dataset that hangs when its first example is read, or a later one."""

    def __init__(self):
        self._read = 0

    def __len__(self):
        return len(ROWS["x"])

    def __getitem__(self, number):
        self._read += 1
        if self._read in (1, 40):  # more than a window reads
            hang("first batch" if self._read == 1 else "data")
        return {name: row[number] for name, row in ROWS.items()}


def main():
    cadence = elche.FixedTotal(8)
    train = elche.build_train_step(loss_fn, optax.adam(1e-2), cadence=cadence)
    state = train.init(params())
    compiles_slowly()
    hanging_in(Store, "newest", "restore")
    with elche.Checkpointer(train, elche.Checkpoints("checkpoints")) as checkpointer:
        state, _ = checkpointer.restore(state)
    hanging_in(Processes, "_together", "exchange", 12)
    hanging_in(lanes_window, "_accumulate", "window", 9)
    begin, seconds = MOMENTS.get("any", (0, 0))
    for window in train.windows(Rows(), BATCH, epochs=3):
        if window.index == begin:
            stopped_after(seconds)
        if window.index == 4:
            hang("loop")
            if "stop" in MOMENTS:
                stopped_after(MOMENTS["stop"])
                time.sleep(2 * MOMENTS["stop"])
        state, _ = train(state, window)
    print("trained", sum(map(sum, train.counts_history)), flush=True)


if __name__ == "__main__":
    main()
