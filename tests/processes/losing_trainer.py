"""A process of a job whose last one ends while a `Trainer` trains and saves."""

import json
import sys
from pathlib import Path

from beats import HEARTBEAT

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize(heartbeat_timeout=HEARTBEAT, exchange_timeout=5)

import jax  # after it, as what follows
import numpy as np
from fitting_jobs import BATCH, ROWS, fit, history, trainer
from losing import EXCHANGES, OUTER, die_in

from elche_jax.engine.host.average import HostAverage
from elche_jax.engine.lanes.window import LanesWindow

RULES = {
    "mean gradient": None,
    "averaging": elche.ParameterAveraging(optimizer_state="keep"),
    "diloco": elche.DiLoCo(outer=OUTER),
    "one pending": elche.MeanGradient(delay=1),
    "int8, one pending": elche.MeanGradient("int8", delay=1),
    "fragments": elche.DiLoCo(outer=OUTER, fragments=2),
}


def metric_fn(p, batch):
    return {"error": batch["x"] @ p["w"] + p["b"] + p["v"].sum() - batch["y"]}


def trained(rule, folder, exchange=None, **options):
    """A run that goes on from what is saved in a folder; what became of it."""
    saving = elche.Checkpoints(Path(folder) / "saved", every_windows=3, keep_last=99)
    result = fit(
        trainer(averaging=RULES[rule], exchange=EXCHANGES[exchange], **options),
        checkpoints=saving, resume="auto",
        evaluation=elche.Evaluation(metric_fn, ROWS, BATCH),
    )  # fmt: skip
    kept = result.state.averaging
    pending = () if kept is None else [(one.progress, one.steps) for one in kept.pending]
    work = [] if kept is None else jax.tree.leaves((kept.steps, kept.error, pending))
    params = elche.unreplicate(result.state.params)
    return {
        "history": history(result), "loss": result.loss, "stopped": str(result.stopped),
        "metrics": result.history[-1].evaluation if result.history else {},
        # whether each device has something that it has not exchanged yet
        "work": [[bool(np.any(row)) for row in np.asarray(leaf)] for leaf in work],
        "params": {name: np.asarray(leaf).tolist() for name, leaf in params.items()},
    }  # fmt: skip


if __name__ == "__main__":
    if jax.process_index() == jax.process_count() - 1:
        # with fragments after an evaluation, for which the parameters are averaged
        last = 15 if sys.argv[1] == "fragments" else 5
        die_in(LanesWindow, "_agree_across", last)
        die_in(HostAverage, "__call__", last)
    print(json.dumps(trained(*sys.argv[1:])))
