"""What processes compare of the arguments of `fit`."""

from dataclasses import dataclass

import numpy as np
import pytest

import elche_jax as elche
from elche_jax.engine.digests import digests_of
from elche_jax.trainer.plan import FitPlan


@dataclass
class Rows:
    """A dataset whose files are in another folder on each host."""

    root: str

    def __len__(self):
        return 8

    def __getitem__(self, at):
        return np.float32(at)


def digests(root="/host0", **options):
    evaluation = elche.Evaluation(max, Rows(root), 4, **options)
    return digests_of(FitPlan({}, Rows(root), 4, 1, evaluation=evaluation).shared())


@pytest.mark.parametrize(
    ("other", "equal"), [({"root": "/host1"}, True), ({"every_epochs": 2}, False)]
)
def test_an_evaluation_is_compared_without_its_data(other, equal):
    assert np.array_equal(digests(), digests(**other)) == equal
