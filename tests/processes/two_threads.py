"""A process of a job in which a second thread begins to train while the first one does."""

import json
import threading

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    # so long that a test which waits for one of them is killed
    elche.distributed.initialize(heartbeat_timeout=600, exchange_timeout=600)

import optax  # after it, as what follows
from reference import BATCH, data, loss_fn, params

from elche_jax._processes import Processes

SAID = {}


def train(name):
    """Trains; notes what is raised."""
    try:
        step = elche.build_train_step(loss_fn, optax.sgd(0.1), cadence=elche.FixedTotal(8))
        state = step.init(params())
        with step.windows(data(90), BATCH, epochs=2) as windows:
            for window in windows:
                if window.index == 2 and name == "first":
                    Processes.together = meanwhile
                state, _ = step(state, window)
    except RuntimeError as error:
        SAID[name] = str(error)


def meanwhile(self, leads, exchange):
    """Lets the second thread begin in the middle of a window."""
    Processes.together = TOGETHER
    second = threading.Thread(target=train, args=["second"])
    second.start()
    second.join()
    return TOGETHER(self, leads, exchange)


TOGETHER = Processes.together


if __name__ == "__main__":
    train("first")
    print(json.dumps(SAID))
