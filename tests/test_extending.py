"""A cadence, a guard and an averaging rule of one's own, by public names alone."""

from dataclasses import dataclass, replace
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.cadence import State

X = np.random.default_rng(0).normal(size=(4096, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 0.5], "float32")}
PARAMS = {"w": np.zeros(3, "float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def trained(windows, exchange="device", **options):
    """Trains so many windows on two devices; gives the step and the counts."""
    train = elche.build_train_step(
        loss_fn, optax.sgd(0.05), devices=jax.devices()[:2],
        config=elche.DDPConfig(exchange=exchange), **options,
    )  # fmt: skip
    state, counts = train.init(PARAMS), []
    with train.windows(DATA, 8, epochs=None) as all_windows:
        for window in all_windows:
            state, _ = train(state, window)
            counts.append(window.counts)
            if len(counts) == windows:
                break
    return train, train.average(state), counts


@dataclass(frozen=True)
class LongerState(State):
    """State of `Longer`; `hold` is for how many reports the counts stay."""

    counts: tuple[int, ...]
    hold: int = 0


@dataclass(frozen=True)
class Longer(elche.Cadence[LongerState]):
    """A microbatch more per window on every device, until a guard says to go down."""

    most: int = 6

    def init(self, world_size):
        return LongerState((1,) * world_size)

    def update(self, state, report, verdict=elche.STABLE):
        if verdict.action == "nudge_down":  # and of windows planned before there are two more
            return replace(state, counts=(1,) * len(state.counts), hold=2)
        if state.hold:
            return replace(state, hold=state.hold - 1)
        return replace(state, counts=tuple(min(self.most, n + 1) for n in report.counts))


@dataclass(frozen=True)
class EveryTenth:
    """A guard that shortens the windows after every tenth one."""

    def verdict(self, history):
        return elche.nudge_down(0.5) if history[-1].window % 10 == 9 else elche.STABLE


@dataclass(frozen=True)
class InverseLoss(elche.ParameterAveraging):
    """Devices count by the inverse of their loss."""

    def weigh(self, work):
        return 1 / work.xp.maximum(work.loss, 1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"averaging": elche.ParameterAveraging(), "guard": elche.NoGuard()}]
)
def test_a_cadence(options):
    """Every report makes the next plan longer; plans made in the meantime stay as they are."""
    train, _, counts = trained(16, cadence=Longer(), **options)
    sizes = [n for n, _ in counts]
    assert sizes[0] == 1 and max(sizes) == 6 and all(a == b for a, b in counts)
    assert all(b - a in (0, 1) for a, b in pairwise(sizes))
    assert train.cadence_state.cadence == LongerState((6, 6))


def test_a_guard():
    _, _, counts = trained(
        20, cadence=Longer(), averaging=elche.ParameterAveraging(), guard=EveryTenth()
    )
    sizes = [n for n, _ in counts]
    assert max(sizes[:10]) == 6 and min(sizes[10:14]) == 1 and max(sizes[14:]) > 1


@pytest.mark.parametrize("exchange", ["device", slow("host")])
def test_an_averaging_rule(exchange):
    """That it weighs as it says is shown with all other rules, in the table of them."""
    train, params, _ = trained(40, exchange, averaging=InverseLoss(), cadence=elche.FixedTotal(6))
    np.testing.assert_allclose(params["w"], [1, -2, 0.5], atol=0.05)
    shares = np.array([seen.share for seen in train.divergence])
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)
    assert np.ptp(shares[:, 0]) > 0.01  # equal counts would have equal shares
