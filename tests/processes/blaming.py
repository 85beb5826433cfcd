"""A process whose error ends another one, and which itself ends only when that has ended."""

import atexit
import os
from pathlib import Path

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    # so long that a test which waits for one of them is killed
    elche.distributed.initialize(heartbeat_timeout=600, exchange_timeout=600)

import jax  # after it, as what follows
import optax
from reference import BATCH, data, loss_fn, params
from waits import eventually

PID = Path("pid")


def end_last():
    """Ends this process when the launcher has seen the end of the other one."""
    eventually(PID.exists)
    eventually(lambda: not Path("/proc", PID.read_text()).exists())
    os._exit(7)


def main():
    train = elche.build_train_step(loss_fn, optax.sgd(0.1), cadence=elche.FixedTotal(8))
    state = train.init(params())
    with train.windows(data(90), BATCH, epochs=2) as windows:
        for window in windows:
            if jax.process_index() == 1 and window.index == 2:
                atexit.register(end_last)
                raise ValueError("a mistake")
            state, _ = train(state, window)


def end_first():
    Path("new").write_text(str(os.getpid()))
    os.rename("new", PID)


if __name__ == "__main__":
    if jax.process_index() == 0:
        atexit.register(end_first)
    main()
