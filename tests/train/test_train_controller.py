"""What a training step records is all that its plans follow from."""

import jax
import numpy as np
import optax
from marks import table

import elche_jax as elche
from elche_jax.cadence import Controller
from elche_jax.lab import EmulatedSpeeds

DATA = {"x": np.random.default_rng(0).normal(size=(512, 3)).astype("float32")}
RULES = {
    "gradient": {},
    "local": {"averaging": elche.ParameterAveraging(), "guard": elche.LevelGuard(1e-4)},
    "late": {"averaging": elche.ParameterAveraging(optimizer_state="keep", delay=1)},
}


def loss_fn(params, batch, rng):
    return (batch["x"] @ params["w"]) ** 2


CADENCES = {"ElChe": elche.ElChe(anchor=2), "AdaComm": elche.AdaComm(anchor=2)}


@table(name=CADENCES, rule=RULES)
def test_records_give_the_plans_again(name, rule):
    """A controller that is shown the records of a run ends where that of the run did."""
    cadence, options = CADENCES[name], RULES[rule]
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:3], cadence=cadence,
        emulate=EmulatedSpeeds([2.0, 2.0, 6.0]), **options,
    )  # fmt: skip
    state = train.init({"w": np.ones(3, "float32")})
    for window in train.windows(DATA, 4, epochs=2):
        state, _ = train(state, window)
    controller = Controller(cadence, options.get("guard", elche.TrendGuard()))
    again = controller.init(3)
    for record in train.records:
        assert record.counts == train.counts_history[record.window]
        again = controller.observe(again, record)
    assert again.schedule == train.cadence_state
    assert list(again.divergence) == train.divergence
    assert bool(train.divergence) == (rule != "gradient")
    firsts = [sum(r.counts) for r in train.records if r.epoch == 1]
    begun = [record.first for record in train.records if record.epoch == 1]
    assert begun == [sum(firsts[:at]) for at in range(len(firsts))]


def test_the_end_of_an_epoch_leaves_a_share_of_a_window():
    train = elche.build_train_step(
        loss_fn, optax.sgd(1e-3), devices=jax.devices()[:3], cadence=elche.FixedTotal(5)
    )
    state = train.init({"w": np.ones(3, "float32")})
    for window in train.windows({"x": DATA["x"][:48]}, 4, epochs=2):
        state, _ = train(state, window)
    assert [record.share for record in train.records] == [1.0, 1.0, 0.4] * 2
