"""A process of a job whose files belong to the last one, which ends."""

import json

import elche_jax as elche

if __name__ == "__main__":  # before anything asks for a device
    elche.distributed.initialize(heartbeat_timeout=4, exchange_timeout=5)

import jax  # after it, as what follows
import numpy as np
from losing import die
from scenes import raised

from elche_jax.engine.job import Job

if __name__ == "__main__":
    job = Job(tuple(jax.devices()[::-1]))
    assert job.by_first(jax.process_index) == jax.process_count() - 1
    if job.first:
        die()
    print(json.dumps([
        raised(lambda: job.by_first(lambda: None)),
        raised(lambda: job.from_first(None, (2,), np.float32)),
    ]))  # fmt: skip
