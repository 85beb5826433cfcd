"""A process of a job that trains with `Trainer`, and says what it saw."""

import json
import os
import signal
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
import numpy as np
import optax
from reference import data, loss_fn, params
from scenes import collect_seldom, raised

ROWS, BATCH = data(60), 4
FIRST, OTHER = jax.process_index() == 0, jax.process_index() == 1
TIMELINE = elche.Timeline()


def trainer(**options):
    options = {"cadence": elche.FixedTotal(6)} | options
    return elche.Trainer(loss_fn, optax.adam(1e-2), **options)


@cache
def shared():
    """That of runs which need none of their own: what one has compiled, the next ones use."""
    return trainer(timeline=TIMELINE)


def fit(made, epochs=2, **options):
    return made.fit(params(), ROWS, BATCH, epochs, **{"progress": False} | options)


def history(result):
    """What the processes must know alike; NaN is equal to itself in a text."""
    return [repr(asdict(epoch)) for epoch in result.history]


class Steps(elche.Callback):
    """Notes what it is called with, and does something in a window."""

    def __init__(self, window=None, do=None):
        self.window, self.do, self.seen, self.written = window, do, [], []

    def on_window(self, context):
        self.seen.append(context.window.index)
        if context.window.index == self.window:
            self.do(context)

    def on_checkpoint(self, context, step):
        self.written.append([step, context.window.index])


class Broken:
    """A writer that cannot write."""

    def scalars(self, step, values):
        raise OSError("the writer is broken")

    def close(self):
        pass


def whole(folder):
    """A run with all outputs, and the same with a stop after the first epoch."""
    steps = Steps()
    own = folder / "run" if FIRST else folder / "elsewhere"  # hosts need not share it
    result = fit(
        shared(), run_dir=own, callbacks=[steps], log_every=4,
        early_stopping=elche.EarlyStopping(patience=9),
    )  # fmt: skip
    events = len(TIMELINE.events)
    fit(shared(), epochs=1, run_dir=own.with_name("half" if FIRST else "nothing"))
    again = fit(shared(), run_dir=own.with_name("half" if FIRST else "nothing"), resume="must")
    return {
        "history": history(result), "losses": [epoch.loss for epoch in result.history],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in result.params.items()},
        "seen": steps.seen, "written": steps.written, "stopped": result.stopped,
        "files": sorted(str(file.relative_to(own)) for file in own.rglob("*.*")),
        "own timeline": events,
        "again": [epoch.loss for epoch in again.history],
        "again, params": {n: np.asarray(leaf).tolist() for n, leaf in again.params.items()},
    }  # fmt: skip


def stopped(folder):
    """Who stops a run, why, and after how many windows; only one process asks for it."""
    found = {}
    limits = {"max_seconds": 1e-6 if OTHER else 1e6, "max_windows": None}
    result = fit(shared(), epochs=None, **limits)
    found["max_seconds"] = [result.stopped, result.windows]
    result = fit(shared(), epochs=None, max_windows=7)
    found["max_windows"] = [result.stopped, result.windows]
    steps = Steps(3, lambda context: context.stop() if FIRST else None)
    result = fit(shared(), epochs=None, callbacks=[steps])
    found["callback"] = [result.stopped, result.windows]
    handle = shared().start(params(), ROWS, BATCH, None, progress=False)
    if OTHER:
        next(handle.metrics())
        handle.stop()
    result = handle.join()
    found["stop"] = [result.stopped, result.windows, history(result)]
    rule = elche.EarlyStopping(patience=1, min_delta=1e9)
    result = fit(shared(), epochs=9, early_stopping=rule)
    found["early_stopping"] = [result.stopped, result.windows]
    return found


def interrupted(folder):
    """How a run ends if one process gets Ctrl-C, with a checkpoint of its last window."""

    def interrupt(context):
        if OTHER:
            os.kill(os.getpid(), signal.SIGINT)

    saving = elche.Checkpoints(folder / "interrupted")
    try:
        steps = Steps(3, interrupt)
        result = fit(shared(), epochs=None, callbacks=[steps], checkpoints=saving)
        return [result.stopped, result.windows]
    except KeyboardInterrupt:
        return ["KeyboardInterrupt", steps.seen[-1] + 1]


def broken(folder):
    """What is raised, and after how many windows, if something of one process fails."""
    found = {}

    def fail(context):
        if OTHER:
            raise RuntimeError("the callback is broken")

    steps = Steps(2, fail)
    found["callback"] = raised(lambda: fit(shared(), epochs=None, callbacks=[steps]))
    found["windows"] = steps.seen[-1]
    handle = shared().start(params(), ROWS, BATCH, None, progress=False)
    found["twice"] = raised(lambda: fit(shared()))
    handle.stop()
    found["went on"] = handle.join().stopped
    writers = [Broken()]
    found["writer"] = raised(lambda: fit(shared(), writers=writers))
    place = folder / ("file/run" if FIRST else "run2")
    if FIRST:
        (folder / "file").touch()
    found["run_dir"] = raised(lambda: fit(shared(), run_dir=place))
    found["must"] = raised(lambda: fit(shared(), run_dir=folder / "new", resume="must"))
    own = {
        "own run_dir": {"run_dir": folder / "own"},
        "own checkpoints": {"checkpoints": elche.Checkpoints(folder / "own", every_windows=2)},
        "own evaluation": {"evaluation": elche.Evaluation(metric_fn, ROWS, BATCH)},
        "own early_stopping": {"early_stopping": elche.EarlyStopping(patience=2)},
        "own max_windows": {"max_windows": 5},
    }
    for name, options in own.items():  # as of one that alone wants to write, evaluate or stop
        found[name] = raised(lambda options=options: fit(shared(), **(options if FIRST else {})))
    return found


def metric_fn(params, batch):
    guess = batch["x"] @ params["w"] + params["b"] + params["v"].sum()
    return {"error": (guess - batch["y"]) ** 2}


def evaluated(folder):
    """A run that is evaluated, which ends by that, and keeps the best of what it saves."""
    result = fit(
        shared(), epochs=3, evaluation=elche.Evaluation(metric_fn, held_out(), batch_size=8),
        checkpoints=elche.Checkpoints(folder / "best", keep_last=1, keep_best=1, monitor="error"),
        early_stopping=elche.EarlyStopping("error", patience=1, min_delta=1e9),
    )  # fmt: skip
    return {
        "history": history(result), "stopped": result.stopped,
        "errors": [epoch.evaluation["error"] for epoch in result.history],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in result.params.items()},
    }  # fmt: skip


def ahead(folder):
    """Devices that run ahead in a run that is evaluated and saved, until one process stops it."""
    averaging = elche.ParameterAveraging(optimizer_state="keep")
    steps = Steps(13, lambda context: context.stop() if OTHER else None)
    result = fit(
        trainer(averaging=averaging, exchange=elche.HostExchange(run_ahead=True)), epochs=None,
        evaluation=elche.Evaluation(metric_fn, held_out(), batch_size=8), callbacks=[steps],
        checkpoints=elche.Checkpoints(folder / "ahead", every_windows=4),
    )  # fmt: skip
    return {
        "history": history(result), "stopped": [result.stopped, result.windows],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in result.params.items()},
        "saved": sorted(int(path.name) for path in (folder / "ahead").glob("[0-9]*")),
    }  # fmt: skip


def stateful_loss_fn(params, model_state, batch, rng):
    peak = jax.numpy.maximum(model_state["peak"], batch["x"].max())
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(axis=0)
    return loss_fn(params, batch, rng), {"peak": peak, "mean": mean}


def stateful_metric_fn(params, model_state, batch):
    return {"error": (batch["x"] - model_state["mean"]).sum(axis=1) ** 2}


def kept_apart(folder):
    """A run in which each device has a model state of its own, which is then joined."""
    averaging = elche.ParameterAveraging(optimizer_state="keep")
    result = elche.Trainer(
        stateful_loss_fn, optax.adam(1e-2), cadence=elche.FixedTotal(6), averaging=averaging,
        merge={"peak": "keep", "mean": "keep"},
    ).fit(
        params(), ROWS, BATCH, model_state={"peak": np.float32(-9), "mean": np.zeros(3, "f4")},
        evaluation=elche.Evaluation(stateful_metric_fn, held_out(), batch_size=8), progress=False,
    )  # fmt: skip
    own = result.state.model_state
    return {
        "joined": {name: np.asarray(leaf).tolist() for name, leaf in result.model_state.items()},
        "own": {name: np.asarray(leaf).tolist() for name, leaf in own.items()},
        "error": result.history[-1].evaluation["error"],
    }


def held_out():
    return {name: rows[:50] for name, rows in ROWS.items()}


SCENES = (whole, stopped, interrupted, broken, evaluated, kept_apart)

if __name__ == "__main__":
    collect_seldom()
    folder, asked = Path(sys.argv[1]), sys.argv[2:]
    scenes = [*SCENES, *[ahead] * ("ahead" in asked)]
    print(json.dumps({scene.__name__: scene(folder) for scene in scenes}))
