"""What the devices agree on may be computed by one of them."""

import averaged
import numpy as np
import pytest
from reference import LEAVES
from test_averaging_lanes import APART
from test_averaging_table import COUNTS, TABLE

from elche_jax.engine.collectives import broadcast_from
from elche_jax.engine.mapped import AXIS
from elche_jax.engine.rule import Rule

LAST = 1  # rank of the device that computes


def applied_by_the_last(self, ended, mean):
    """`Rule.apply` in which the other devices get the result of the last one, bit for bit."""
    agreed = broadcast_from(self.agree(ended, mean), LAST, AXIS)
    return self.adopt(ended, agreed), agreed.fine


@pytest.mark.slow  # lanes compute it so: test_every_rule_over_lanes
@pytest.mark.parametrize("name", ["DiLoCo, int8, one pending", *APART])
def test_what_one_device_agrees_on_serves_all(name, monkeypatch):
    rule, _ = TABLE[name]
    want, *_ = averaged.train_on(rule, COUNTS[2])
    monkeypatch.setattr(Rule, "apply", applied_by_the_last)
    got, *_ = averaged.train_on(rule, COUNTS[2])
    for now, before in zip(got, want, strict=True):
        for leaf in LEAVES:
            np.testing.assert_allclose(now[leaf], before[leaf], rtol=1e-6, atol=1e-7)
