"""Times of windows over several lanes."""

import jax
import numpy as np
import optax
from test_train_lanes import BATCH, PARAMS, data, plain_loss
from waits import comes_about

import elche_jax as elche
from elche_jax.engine.lanes.window import LanesWindow
from elche_jax.engine.runner import Launch


def test_the_leads_time_ends_before_it_waits_for_another_lane(monkeypatch):
    """Else its wait is counted as its work, and takes work away from it again and again."""
    launched, waited, launch, send = [], [], Launch.__call__, LanesWindow._send

    def noted(self, token, ranks=None):
        launch(self, token, ranks)
        launched.append((self.number, ranks))

    def late(self, lane, made):
        if lane.ranks == (1,):  # its contribution is on the way until the lead is done
            waited.append(comes_about(lambda: (self.launch.number, (0,)) in launched, 5.0))
        send(self, lane, made)

    monkeypatch.setattr(Launch, "__call__", noted)
    monkeypatch.setattr(LanesWindow, "_send", late)
    train = elche.build_train_step(
        plain_loss, optax.sgd(0.1), devices=jax.devices("cpu")[:2], lanes=((0,), (1,)),
        cadence=elche.Replay([(1, 1)] * 6), averaging=elche.MeanGradient(delay=1),
    )  # fmt: skip
    state = train.init(PARAMS)
    rows = {name: leaf[: 12 * BATCH] for name, leaf in data().items()}
    for window in train.windows(rows, BATCH):
        state, metrics = train(state, window)
    assert waited == [True] * 6 and np.isfinite(metrics["loss"])
