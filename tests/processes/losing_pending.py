"""A process of a job in which one ends while windows are pending; the others say what they did."""

import json
import logging
import re
import sys

from beats import HEARTBEAT

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize(heartbeat_timeout=HEARTBEAT, exchange_timeout=5)

import jax  # after it, as what follows
import jax.numpy as jnp
import numpy as np
from averaged import TX
from every_rule import WAYS
from held import Held
from losing import begin_to_die, die_soon
from reference import BATCH, data, loss_fn, params
from test_averaging_table import TABLE
from waits import eventually

from elche_jax.engine.host.runner import HostRunner

ROWS, EPOCHS = data(90), 2
BACK = 10
"""Window after which a device that is late since window 2 delivers."""

ROWS["at"] = np.arange(len(ROWS["x"]), dtype="float32") // BATCH


def loss_and_place(p, batch, rng):
    """The loss, and which microbatch it is of."""
    return loss_fn(p, batch, rng), {"at": batch["at"][0]}


def bad_later(p, batch, rng):
    """The same, not finite for a microbatch of window 2 once parameters have moved."""
    moved = jnp.any(p["w"] != params()["w"]) & (batch["at"][0] == 20)
    return loss_fn(p, batch, rng) * jnp.where(moved, jnp.nan, 1.0), {"at": batch["at"][0]}


class Ended(logging.Handler):
    """Notes which process ended, and before which window."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        said = r"process (\d+) .* ended before window (\d+) was complete"
        if found := re.search(said, record.getMessage()):
            self.seen.append([int(number) for number in found.groups()])


def note_dispatches(ran):
    """Notes which windows are dispatched with an exchange on the host, again included."""
    method = HostRunner._dispatch

    def noted(self, session, window, calls, launch, **options):
        ran.append([session.step, list(launch.counts)])
        return method(self, session, window, calls, launch, **options)

    HostRunner._dispatch = noted


def let_go_at_once(held):
    """Lets a late device deliver as windows are taken back, before the next one is dispatched."""
    method = HostRunner.take_back

    def back(self, state, clock, windows):
        taken = method(self, state, clock, windows)
        if jax.process_index() == 0:  # whose device it is
            held.let_go(2, 1)
            eventually(lambda: not clock.coordinator.late)
        return taken

    HostRunner.take_back = back


def main(rule, cadence, dying, how_else=None, exchange="device"):
    how, number = dying.get(str(jax.process_index()), (None, None))
    options, held = WAYS[exchange], Held({(2, 1)})
    if how_else == "late, back at once":
        let_go_at_once(held)
    if how_else in ("late", "late, back at once"):
        late = elche.HostExchange(timeout=2.0, run_ahead=exchange == "ahead")
        options = {"exchange": late, "emulate": held}
    train = elche.build_train_step(
        bad_later if how_else == "not finite later" else loss_and_place, TX, has_aux=True,
        averaging=TABLE[rule][0], cadence=getattr(elche, cadence[0])(*cadence[1:]), **options,
    )  # fmt: skip
    state, said, ended, ran = train.init(params()), [], Ended(), []
    note_dispatches(ran)
    logging.getLogger("elche_jax").addHandler(ended)
    begin_to_die(how, number)
    if how_else in ("two loops", "steps of an earlier loop"):
        with train.windows({name: rows[:96] for name, rows in ROWS.items()}, BATCH) as windows:
            for window in windows:  # three and more
                state, _ = train(state, window)
    if how_else == "steps of an earlier loop":  # as from a checkpoint
        state = state.replace(params=state.params)
    with train.windows(ROWS, BATCH, epochs=EPOCHS, shuffle=False) as windows:
        for window in windows:
            if window.index == 7 and how_else == "left early":
                break
            if window.index == 7 and how_else == "another state":
                state = state.replace(params=state.params)
            if how == "time" and window.index == 1 + 2 * number:
                die_soon(number)
            state, metrics = train(state, window)
            said.append(metrics)
            if window.index == BACK:
                held.let_go(2, 1)
    elche.check_replicas(train.common(state))
    print(json.dumps({
        "counts": train.counts_history,
        "records": [repr(one) for one in train.records],
        "weight": [float(one["weight"]) for one in said],
        "at": [float(one["at"]) for one in said],
        "finite": [bool(one["finite"]) for one in said],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in state.params.items()},
        "ended": ended.seen, "ran": ran,
        "seen": [int(np.asarray(leaf)[0]) for leaf in (state.microbatches, state.step)],
    }))  # fmt: skip


if __name__ == "__main__":
    try:
        main(*json.loads(sys.argv[1]))
    except (elche.ProcessLostError, elche.NonFiniteError) as error:
        processes = getattr(error, "processes", ())
        print(json.dumps({"error": str(error), "processes": processes}))
