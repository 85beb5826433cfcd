"""A process of a job that ends and begins again with more or fewer processes; says what it saw.

Started by `elche-jax launch --elastic`, with what is to happen as JSON: before which windows all
wait for a file of the test, before which one a process is killed, and whether the first one is
while it writes the end of a generation to disk.
"""

import json
import os
import signal
import sys
from pathlib import Path

from beats import HEARTBEAT

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize(heartbeat_timeout=HEARTBEAT, exchange_timeout=5)

import jax  # after it, as what follows
import numpy as np
import optax
from reference import data, loss_fn, params
from waits import eventually

from elche_jax.checkpoint.store import Store

BATCH, TOTAL, EPOCHS = 4, 6, 3
ROWS = data(60)
EXAMPLES = len(ROWS["x"])


def build(**options):
    cadence = elche.FixedTotal(TOTAL)
    return elche.build_train_step(loss_fn, optax.adam(1e-2), cadence=cadence, **options)


class Journal:
    """What each generation did, a line per window, written by its first process.

    Args:
        folder: Where `journal` is, and files that let a window go on.
        pauses: Windows before which the loop waits until the test creates a file of that number.
        kill: `[window, process]`: which process kills itself, once.
    """

    def __init__(self, folder, pauses=(), kill=None):
        self._folder, self._pauses, self._kill = folder, pauses, kill
        self._file = (folder / "journal").open("a") if jax.process_index() == 0 else None

    def before(self, window):
        if window.index in self._pauses:
            (self._folder / f"at-{window.index}-{jax.process_index()}").touch()
            eventually((self._folder / f"go-{window.index}").exists, 120)
        if self._kill == [window.index, jax.process_index()] and not self._once():
            saved = self._folder / "saved" / str(window.index // 4 * 4)
            eventually(saved.exists)  # a thread writes it
            os.kill(os.getpid(), signal.SIGKILL)

    def die_saving(self):
        """Kills this process in the first checkpoint that is due by nothing else."""
        save = Store.save

        def saves(store, saved):
            if store.folder == self._folder / "saved" and saved.step % 4 and not self._once("died"):
                os.kill(os.getpid(), signal.SIGKILL)
            return save(store, saved)

        Store.save = saves

    def _once(self, name="killed"):
        try:
            (self._folder / name).touch(exist_ok=False)
        except FileExistsError:
            return True

    def after(self, window, loss):
        if self._file is not None:
            line = [window.index, window.epoch, window.plan.first, list(window.counts), loss]
            print(json.dumps(line), file=self._file, flush=True)


def loop(folder, journal):
    """A loop of one's own; every fourth window is saved."""
    train = build()
    state = train.init(params())
    with elche.Checkpointer(train, elche.Checkpoints(folder / "saved", every_windows=4)) as saver:
        state, cursor = saver.restore(state, "auto")
        for window in train.windows(ROWS, BATCH, EPOCHS, cursor=cursor, seed=3):
            journal.before(window)
            state, metrics = train(state, window)
            journal.after(window, float(metrics["loss"]))
            saver.save(state, window)
    return state


def fit(folder, journal):
    """The same with `Trainer`."""

    class Steps(elche.Callback):
        def on_window(self, context):
            journal.before(context.window)
            journal.after(context.window, float(context.metrics["loss"]))

    trainer = elche.Trainer(loss_fn, optax.adam(1e-2), cadence=elche.FixedTotal(TOTAL))
    saving = elche.Checkpoints(folder / "saved")
    result = trainer.fit(
        params(), ROWS, BATCH, EPOCHS, seed=3, checkpoints=saving, resume="auto",
        callbacks=[Steps()], progress=False,
    )  # fmt: skip
    (folder / "history").write_text(json.dumps([epoch.loss for epoch in result.history]))
    return result.state


def main():
    how, folder, happens = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    dies_saving = happens.pop("dies_saving", False)
    journal = Journal(folder, **happens)
    if dies_saving:
        journal.die_saving()
    state = {"loop": loop, "fit": fit}[how](folder, journal)
    found = elche.unreplicate(state.params)
    print(json.dumps({name: np.asarray(leaf).tolist() for name, leaf in found.items()}))


if __name__ == "__main__":
    main()
