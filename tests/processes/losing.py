"""A process of a job in which one ends in the middle; the others say what they trained."""

import json
import os
import random
import signal
import sys
import threading

from beats import HEARTBEAT

import elche_jax as elche
from elche_jax import _neighbours

if __name__ == "__main__":  # before anything asks for a device
    if apart := sys.argv[2:] == ["apart"]:  # as on hosts of their own
        _neighbours.place = lambda pid: None
    elche.distributed.initialize(heartbeat_timeout=4 if apart else HEARTBEAT, exchange_timeout=5)

import jax  # after it, as what follows
import numpy as np
import optax
from reference import data, loss_fn, params

from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.host.average import HostAverage
from elche_jax.engine.host.runner import HostRunner
from elche_jax.engine.job import Job
from elche_jax.engine.lanes.window import LanesWindow

ROWS, BATCH, EPOCHS = data(150), 4, 3
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
RULES = {
    "mean gradient": None,
    "averaging": elche.ParameterAveraging(optimizer_state="keep"),
    "diloco": elche.DiLoCo(outer=OUTER),
    "int8": elche.ParameterAveraging(compression="int8"),
    "pending": elche.MeanGradient(delay=1),
}
EXCHANGES = {
    None: None,
    "host": elche.HostExchange(),
    "ahead": elche.HostExchange(run_ahead=True),
}


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon(seed):
    """Ends this process at a moment that depends on a number, within a window or two."""
    within = 0.004 * jax.process_count()  # as they share few processors
    threading.Timer(random.Random(seed).uniform(0.0, within), die).start()


def die_in(owner, name, number):
    """Ends this process when a method is called for the so-manyth time."""
    method, calls = getattr(owner, name), []

    def counted(self, *args, **options):
        calls.append(name)
        if len(calls) == number:
            die()
        return method(self, *args, **options)

    setattr(owner, name, counted)


class Rows:
    """A dataset that ends this process when it is read for the so-manyth time."""

    def __init__(self, number=None):
        self.left, self.read = number, []

    def __len__(self):
        return len(ROWS["x"])

    def __getitem__(self, number):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                die()
        return {name: row[number] for name, row in ROWS.items()}


def begin_to_die(how, number):
    """Lets this process end in a moment of a window."""
    if how == "exchange":
        die_in(LanesWindow, "_agree_across", number)
    elif how == "average":
        die_in(HostAverage, "__call__", number)
    elif how == "one of its exchanges":
        die_in(Job, "gather", number)
    elif how == "dispatch":
        die_in(HostRunner, "_dispatch", number)
    elif how == "contribute":
        die_in(LanesWindow, "_contribute", number)
    elif how == "compile":
        die_in(CompileCache, "begin", number)


def rows_of(how, number):
    """The data: a dataset, or where it is to be, an iterable of microbatches."""
    if how == "iterable":
        ends = range(0, len(ROWS["x"]), BATCH)
        return iter([{name: row[at : at + BATCH] for name, row in ROWS.items()} for at in ends])
    return Rows(number if how == "read" else None)


def main(rule, cadence, dying, data=None, exchange=None):
    how, number = dying.get(str(jax.process_index()), (None, None))
    cadence = getattr(elche, cadence[0])(*cadence[1:])
    train = elche.build_train_step(
        loss_fn, optax.adam(1e-2), averaging=RULES[rule], cadence=cadence,
        exchange=EXCHANGES[exchange],
    )  # fmt: skip
    state, said = train.init(params()), []
    begin_to_die(how, number)
    rows = rows_of("iterable" if data == "iterable" else how, number)
    batch, epochs = (None, 1) if data == "iterable" else (BATCH, EPOCHS)
    with train.windows(rows, batch, epochs=epochs) as windows:
        for window in windows:
            if how == "time" and window.index == 2 + 4 * number:
                die_soon(number)
            state, metrics = train(state, window)
            said.append(metrics)
    elche.check_replicas(train.common(state))
    leaves = jax.tree.leaves(state.params)
    print(json.dumps({
        "counts": train.counts_history,
        "plans": [(one.epoch, one.first, sum(one.counts)) for one in train.records],
        "records": [repr(one) for one in train.records],
        "weights": [float(metrics["weight"]) for metrics in said],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in state.params.items()},
        "bits": [np.asarray(leaf)[0].tobytes().hex() for leaf in leaves],
        "next": train.counts,
        "throughput": train.throughput,
    }))  # fmt: skip


if __name__ == "__main__":
    try:
        main(*json.loads(sys.argv[1]))
    except elche.ProcessLostError as error:
        print(json.dumps({"error": str(error), "processes": error.processes}))
