"""Every rule on every transport, over 1, 2 and 4 devices with uneven counts, against NumPy."""

import dataclasses
from itertools import product

import averaged
import exchanged
import jax
import numpy as np
import optax
import pytest
from averaged import NESTEROV, PARTS
from marks import slow
from reference import LEAVES, Outer

import elche_jax as elche

OUTER = optax.sgd(**NESTEROV)
KEEP = {"optimizer_state": "keep"}


@dataclasses.dataclass(frozen=True)
class InverseLoss(elche.ParameterAveraging):
    """A rule of one's own: devices count by the inverse of their loss."""

    def weigh(self, work):
        return 1 / work.xp.where(work.loss > 0, work.loss, 1)


LOCAL = {"local": True}
BY_HAND = LOCAL | {"outer": lambda: Outer(0.7, 0.9, nesterov=True)}
TABLE = {
    "mean gradient": (None, {}),
    "mean gradient, one pending": (elche.MeanGradient(delay=1), {"delay": 1}),
    "mean gradient, three pending": (elche.MeanGradient(delay=3), {"delay": 3}),
    "mean gradient, bfloat16": (elche.MeanGradient("bfloat16"), {"kind": "bfloat16"}),
    "mean gradient, int8": (elche.MeanGradient("int8"), {"kind": "int8"}),
    "mean gradient, int8, three pending": (
        elche.MeanGradient("int8", 3), {"kind": "int8", "delay": 3},
    ),
    "Local SGD": (elche.ParameterAveraging(), LOCAL | {"optimizer_state": "average"}),
    "Local SGD, one pending": (elche.ParameterAveraging(**KEEP, delay=1), LOCAL | {"delay": 1}),
    "Local SGD, three pending": (elche.ParameterAveraging(**KEEP, delay=3), LOCAL | {"delay": 3}),
    "Local SGD, bfloat16": (
        elche.ParameterAveraging(**KEEP, compression="bfloat16"), LOCAL | {"kind": "bfloat16"},
    ),
    "Local SGD, int8": (
        elche.ParameterAveraging(**KEEP, compression="int8"), LOCAL | {"kind": "int8"},
    ),
    "DiLoCo": (elche.DiLoCo(OUTER), BY_HAND),
    "DiLoCo, fragments": (elche.DiLoCo(OUTER, fragments=2), BY_HAND | {"parts": PARTS[2]}),
    "DiLoCo, fragments, int8": (
        elche.DiLoCo(OUTER, fragments=2, compression="int8"),
        BY_HAND | {"parts": PARTS[2], "kind": "int8"},
    ),
    "DiLoCo, bfloat16": (
        elche.DiLoCo(OUTER, compression="bfloat16"), BY_HAND | {"kind": "bfloat16"},
    ),
    "DiLoCo, int8": (elche.DiLoCo(OUTER, compression="int8"), BY_HAND | {"kind": "int8"}),
    "DiLoCo, int8, one pending": (
        elche.DiLoCo(OUTER, compression="int8", delay=1), BY_HAND | {"kind": "int8", "delay": 1},
    ),
    "DiLoCo, three pending": (elche.DiLoCo(OUTER, delay=3), BY_HAND | {"delay": 3}),
    "a rule of one's own, moments averaged": (
        InverseLoss(),
        LOCAL | {"optimizer_state": "average",
                 "weigh": lambda steps, losses: 1 / np.where(losses, losses, 1)},
    ),
    "a rule of one's own, three pending": (
        InverseLoss(**KEEP, delay=3),
        LOCAL | {"delay": 3, "weigh": lambda steps, losses: 1 / np.where(losses, losses, 1)},
    ),
    "a rule of one's own": (
        InverseLoss(**KEEP),
        LOCAL | {"weigh": lambda steps, losses: 1 / np.where(losses, losses, 1)},
    ),
}  # fmt: skip
COUNTS = {
    1: [(3,), (2,), (4,), (1,), (3,), (2,), (1,), (2,)],
    2: [(3, 1), (2, 2), (4, 0), (1, 3), (0, 2), (3, 1), (1, 1), (5, 2)],
    4: [(3, 1, 0, 2), (2, 2, 1, 1), (0, 1, 0, 4), (1, 3, 2, 2), (5, 0, 2, 1), (1, 1, 1, 1),
        (0, 0, 3, 0), (2, 1, 3, 2)],
}  # fmt: skip

# a rounded number may be a level off where a float32 is a bit off
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    None: (2e-5, 2e-6),
    "int8": (2e-3, 2e-3),
    "bfloat16": (2e-2, 2e-2),
}


EXCHANGES = ["device", "host"]
PARTLY = [
    "mean gradient",
    "mean gradient, one pending",
    "mean gradient, int8, three pending",
    "Local SGD",
    "Local SGD, bfloat16",
    "Local SGD, three pending",
    "DiLoCo",
    "DiLoCo, fragments, int8",
    "DiLoCo, int8, one pending",
    "a rule of one's own, moments averaged",
]
"""Rules that have every part of a rule between them, those that are sent and pending together."""
QUICK = {(name, EXCHANGES[at % 2], 4) for at, name in enumerate(PARTLY)}
QUICK |= {(name, at, world) for name in PARTLY[:1] for at in EXCHANGES for world in (1, 2)}
"""Each of them once, on alternating transports, and every number of devices with each."""


@pytest.mark.parametrize(
    ("name", "exchange", "world"),
    [row if row in QUICK else slow(*row) for row in product(TABLE, EXCHANGES, [1, 2, 4])],
)
def test_every_rule_on_every_transport(name, exchange, world):
    rule, by_hand = TABLE[name]
    if world == 1:  # there is nobody to exchange with
        by_hand = {k: v for k, v in by_hand.items() if k not in ("kind", "delay")}
    outer = by_hand.get("outer")
    want = exchanged.train(COUNTS[world], **by_hand | ({"outer": outer()} if outer else {}))
    config = elche.DDPConfig(exchange=exchange)
    with jax.numpy_dtype_promotion("strict"):
        got, metrics, _, train = averaged.train_on(rule, COUNTS[world], config=config)
    rtol, atol = TOLERANCE[by_hand.get("kind")]
    averaged.assert_history(got, want, rtol, atol)
    assert all(said["finite"] for said in metrics) and train.skipped == 0
    apart = by_hand.get("delay") or len(by_hand.get("parts", "1")) > 1
    if not (by_hand.get("local") and apart):  # replicas are alike
        for stacked in got:
            for leaf in LEAVES:
                assert all(row.tobytes() == stacked[leaf][0].tobytes() for row in stacked[leaf])
    moved = np.abs(got[-1]["w"] - got[0]["w"]).max()
    assert moved > 20 * atol, "the tolerance must be small beside what training moves"


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("compression", ["bfloat16", slow("int8")])
def test_an_outer_optimizer_gets_one_dtype(compression, exchange):
    """One that compares its gradient with the last one, which is of its parameters' dtype."""
    outer = optax.optimistic_gradient_descent(0.1)
    rule = elche.DiLoCo(outer, compression=compression)
    with jax.enable_x64(True):
        _, metrics, state, _ = averaged.train_on(
            rule, COUNTS[2], config=elche.DDPConfig(exchange=exchange), wide=True
        )
    assert all(said["finite"] for said in metrics)
    (trace,) = {leaf.dtype.name for leaf in jax.tree.leaves(state.averaging.outer) if leaf.ndim > 1}
    assert trace == "float64"


DIGITS_KEPT = [
    name for name, (_, by_hand) in TABLE.items() if not by_hand.keys() & {"kind", "weigh"}
]
"""Rules that round nothing to fewer bits, and whose weights are no losses, which are float32."""
WIDE = {("mean gradient, three pending", "device"), ("Local SGD, three pending", "host"),
        ("DiLoCo, fragments", "host")}  # fmt: skip
"""Gradients, local steps and an outer optimizer, with what is pending and with parts."""


@pytest.mark.parametrize(
    ("name", "exchange"),
    [row if row in WIDE else slow(*row) for row in product(DIGITS_KEPT, EXCHANGES)],
)
def test_float64_parameters_keep_their_digits(name, exchange):
    rule, by_hand = TABLE[name]
    outer = by_hand.get("outer")
    want = exchanged.train(COUNTS[2], **by_hand | ({"outer": outer()} if outer else {}))
    config = elche.DDPConfig(exchange=exchange)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got, metrics, state, _ = averaged.train_on(rule, COUNTS[2], config=config, wide=True)
    assert {leaf.dtype.name for leaf in state.params.values()} == {"float64"}
    averaged.assert_history(got, want, *TOLERANCE["float64"])
    assert {value.dtype.name for value in metrics[-1].values()} <= {"float32", "bool"}
