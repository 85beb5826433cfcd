"""A process of a job in which one raises or leaves in the middle; the others say what they saw."""

import json
import os
import sys
from contextlib import nullcontext

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    # so long that a test which waits for one of them is killed
    limit = 5 if "another call" in sys.argv else 600
    elche.distributed.initialize(heartbeat_timeout=600, exchange_timeout=limit)
    if "nothing to do" in sys.argv:
        sys.exit()

import jax  # after it, as what follows
import optax
from reference import BATCH, data, loss_fn, params
from scenes import Noted
from waits import eventually

from elche_jax import _leaving

ROWS = data(90)


class Faulty(Noted):
    """A dataset that a process cannot read to its end."""

    def __getitem__(self, number):
        if len(self.read) == 9 * BATCH:
            raise OSError("the disk is gone")
        return super().__getitem__(number)


def faulty_loss(p, batch, rng):
    raise KeyError("no such name")


def mistake():
    """Raises in the first process before all others, which still need its coordinator."""
    if os.environ["ELCHE_PROCESS_ID"] != "0":
        eventually(lambda: _leaving.reason_of(0) is not None)
    raise ValueError("a mistake")


def evaluated(rows):
    elche.build_eval_step(lambda p, batch: {"x": batch["x"].sum(1)})(params(), rows, BATCH)


def main(how, who):
    if how == "all at the start":
        mistake()
    raises = jax.process_index() == who
    cadence = elche.FixedTotal(8)
    rows = Faulty(ROWS) if raises and how.startswith("data") else Noted(ROWS)
    loss = faulty_loss if raises and how == "loss" else loss_fn
    if how == "data, Trainer":
        trainer = elche.Trainer(loss, optax.sgd(0.1), cadence=cadence)
        trainer.fit(params(), rows, BATCH, 2, progress=False)
        return
    train = elche.build_train_step(loss, optax.sgd(0.1), cadence=cadence)
    state = train.init(params())
    windows = train.windows(rows, BATCH, epochs=2)
    # many loops have no `with`: an error of their body is seen by nobody
    with nullcontext(windows) if how.endswith("without with") else windows:
        for window in windows:
            if how == "all" and window.index == 5:
                mistake()
            if raises and window.index == 5:
                if how.startswith("own code"):
                    raise ValueError("a mistake\nwhat to do")
                if how.startswith("exit"):
                    sys.exit(3)
                if how == "break":
                    return
                if how == "break after an evaluation":  # a loop within the loop, which has ended
                    break
                if how == "another call":
                    break
                if how == "step":
                    state = elche.unreplicate(state)
            state, _ = train(state, window)
            if how == "break after an evaluation" and window.index == 3:
                evaluated(ROWS)
    if raises and how == "break after an evaluation":
        return
    if how == "another call":
        elche.check_replicas(train.common(state))
        evaluated(ROWS)
    print(json.dumps({"counts": train.counts_history, "examples": sum(
        one.examples for one in train.records)}))  # fmt: skip


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except elche.ProcessLostError as error:
        print(json.dumps({"error": str(error), "processes": error.processes}))
    except (OSError, ValueError):
        if sys.argv[1] in ("data", "own code", "all", "all at the start"):
            raise
        sys.exit(1)  # as a script does that reports an error in its own way
