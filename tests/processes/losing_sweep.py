"""A process of a job in which one ends in an evaluation; the others say what they computed."""

import json
import logging
import sys

from beats import HEARTBEAT

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize(heartbeat_timeout=HEARTBEAT, exchange_timeout=5)

import jax  # after it, as what follows
from evaluated import BATCH, ROWS, W, apply_fn, metric_fn, plain
from losing import die, die_in
from scenes import Noted, raised

from elche_jax.engine.job import Job

TOTAL = elche.FixedTotal(8)


class Dying(Noted):
    """A dataset that ends the last process when it is read there for the so-manyth time."""

    def __init__(self, number):
        super().__init__(ROWS)
        last = jax.process_index() == jax.process_count() - 1
        self.left = number if last else None

    def __getitem__(self, number):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                die()
        return super().__getitem__(number)


def batches():
    """The data as an iterable, which cannot be read twice."""
    ends = range(0, len(ROWS["x"]) - BATCH, BATCH)
    return iter([{name: row[at : at + BATCH] for name, row in ROWS.items()} for at in ends])


def by_hand():
    """A block that is timed over the processes."""
    ddp = elche.DDP()
    with ddp.timed([1] * ddp.world_size) as clock:
        clock.synced(clock.worked(ddp.replicate(1.0)))


def reduced():
    ddp = elche.DDP()
    return ddp.all_reduce_gradients(ddp.replicate(1.0))


class Losses(logging.Handler):
    """Keeps what is logged of processes that have ended."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("elche_jax").addHandler(self)

    def emit(self, record):
        if "ended before" in record.getMessage():
            self.lines.append(record.getMessage())


def main(what, moment, number):
    losses = Losses()
    noted = Dying(number if moment == "read" else None)
    if moment == "told" and jax.process_index() == jax.process_count() - 1:
        die_in(Job, "exchange", number)
    evaluate = elche.build_eval_step(metric_fn, cadence=TOTAL)
    if what == "iterable":
        return {"error": raised(lambda: evaluate(W, batches()))}
    during = (
        evaluate(W, noted, BATCH) if what == "evaluate"
        else elche.predict(apply_fn, W, noted, BATCH, cadence=TOTAL)
    )  # fmt: skip
    return {
        "during": plain(during), "read": len(noted.read),
        "after": plain(evaluate(W, ROWS, BATCH)), "new": plain(
            elche.build_eval_step(metric_fn)(W, ROWS, BATCH)),
        "predicted": plain(elche.predict(apply_fn, W, ROWS, BATCH)),
        "batches": plain(evaluate(W, batches())),
        "counts": list(evaluate.counts),
        "records": [repr(record) for record in evaluate.records],
        "recording": raised(lambda: elche.build_eval_step(
            metric_fn, cadence=elche.Replay([(2, 2, 2)] * 99))(W, ROWS, BATCH)),
        "by hand": raised(by_hand), "reduced": raised(reduced), "said": losses.lines,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
