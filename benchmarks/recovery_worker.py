"""A process of a job that trains and saves; the first one prints a JSON line per window.

recovery_worker.py FOLDER SECONDS_BETWEEN_CHECKPOINTS HEARTBEAT
"""

import json
import logging
import os
import sys
import time

import elche_jax as elche

BATCH, MS = 8, 20.0
EPOCH = 10**6
"""Examples per epoch, more than a run of minutes needs."""


class Known(logging.Handler):
    """Prints the time at which this process learned that another had ended."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the time, if this is what the record says."""
        if "ended before" in record.getMessage():
            print(json.dumps({"known": record.created}), flush=True)


def main(folder: str, every: float, heartbeat: int) -> None:
    """Train until killed."""
    print(json.dumps({"pid": os.getpid()}), flush=True)
    elche.distributed.initialize(heartbeat_timeout=heartbeat)
    logging.getLogger("elche_jax").addHandler(Known())
    import jax
    import numpy as np
    import optax
    from baselines import mlp_loss, mlp_params

    from elche_jax.lab import EmulatedSpeeds

    data = {
        "x": np.zeros((EPOCH, 64), "float32"), "y": np.zeros(EPOCH, "int32"),
    }  # fmt: skip
    train = elche.build_train_step(
        mlp_loss, optax.adam(1e-3), cadence=elche.ElChe(anchor=10),
        emulate=EmulatedSpeeds([MS] * jax.device_count()),
    )  # fmt: skip
    state = train.init(mlp_params(64, 1))
    with elche.Checkpointer(train, elche.Checkpoints(folder, every_seconds=every)) as saver:
        state, cursor = saver.restore(state, resume="auto")
        with train.windows(data, BATCH, epochs=None, cursor=cursor) as windows:
            for window in windows:
                state, metrics = train(state, window)
                jax.block_until_ready(metrics["loss"])
                if jax.process_index() == 0:
                    done = window.cursor.epoch * EPOCH // BATCH + window.cursor.microbatch
                    print(json.dumps({"at": time.time(), "done": done}), flush=True)
                saver.save(state, window)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
