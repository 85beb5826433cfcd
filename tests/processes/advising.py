"""A process of a job that asks for advice, and trains as that says."""

import json
import sys

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize()

import jax  # after it, as what follows
import numpy as np
import optax
from scenes import raised

from elche_jax.lab import EmulatedSpeeds

ROWS, BATCH = 4096, 4


class Broken:
    """A dataset that another process cannot read any more after some microbatches."""

    def __init__(self, reads):
        self._left = reads

    def __len__(self):
        return ROWS

    def __getitem__(self, at):
        self._left -= 1
        if self._left < 0:
            raise OSError("the disk is gone")
        return {"x": np.ones(8, "float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def asked(width, ms, data=None, seconds=0.1):
    data = data or {"x": np.ones((ROWS, 8), "float32")}
    return elche.advise(
        loss_fn, optax.sgd(1e-3), {"w": np.ones((8, width), "float32")}, data, BATCH,
        seconds=seconds, emulate=EmulatedSpeeds(ms),
    )  # fmt: skip


def trained(width, ms, windows):
    """Trains by ElChe; returns its counts, and the parameters in the end."""
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), cadence=elche.ElChe(anchor=2), emulate=EmulatedSpeeds(ms)
    )
    state = train.init({"w": np.ones((8, width), "float32")})
    with train.windows({"x": np.ones((ROWS, 8), "float32")}, BATCH, epochs=None) as all_windows:
        for window in all_windows:
            state, _ = train(state, window)
            if window.index + 1 == windows:
                break
    return train.counts_history, np.asarray(jax.device_get(state.params["w"])).tobytes().hex()


if __name__ == "__main__":
    width, ms, what = json.loads(sys.argv[1])
    if what == "error":
        reads = 10**9 if jax.process_index() == 0 else 100
        told = raised(lambda: asked(width, ms, Broken(reads)))
    else:
        advice = asked(width, ms, seconds=2.0)
        told = {"advice": advice.to_dict(), "text": str(advice), "share": advice.sync_share}
        told["counts"], told["params"] = trained(width, ms, 8)
    print(json.dumps(told))
