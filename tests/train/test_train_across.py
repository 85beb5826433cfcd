"""What processes compare before a run: equal where a job is right, whatever their memory holds."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
import pytest
from small import loss_fn

import elche_jax as elche
from elche_jax.engine.digests import digests_of
from elche_jax.train.across import check_same_optimizer


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """Parameters with a function, as in Equinox, whose address is another one in each process."""

    w: Any
    activation: Any = field(metadata={"static": True})


class OtherProcess:
    """Notes what a process compares."""

    one_process = False

    def check_same(self, where, **values):
        assert where == "TrainStep.init"
        self.found = digests_of(values)


def compared(optimizer, width=3):
    train = elche.build_train_step(loss_fn, optimizer, devices=jax.devices()[:1])
    state = train.init(Layer(np.ones(width, "float32"), lambda x: x))
    job = OtherProcess()
    check_same_optimizer(job, state)
    return job.found


@pytest.mark.parametrize(
    ("optimizer", "width", "equal"),
    [(optax.adam(0.1), 3, True), (optax.adam(0.1), 4, False), (optax.sgd(0.1), 3, False)],
)
def test_optimizers_are_compared_by_the_shapes_of_their_states(optimizer, width, equal):
    same = np.array_equal(compared(optax.adam(0.1)), compared(optimizer, width))
    assert same == equal
