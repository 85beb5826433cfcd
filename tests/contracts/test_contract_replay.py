"""C7: the same counts and the same seed give the same bits, stop and resume included."""

import jax
import numpy as np
import optax
import pytest
from marks import slow
from models import (
    Cnn,
    Script,
    assert_bitwise,
    digits,
    host,
    norm_loss,
    run,
    scalar_loss,
    variables,
)

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds, constant, jitter


def build(cadence, devices, **options):
    return elche.build_train_step(
        norm_loss(Cnn(dropout=0.3, norm=True)),
        optax.adam(1e-3),
        devices=devices,
        cadence=cadence,
        has_aux=True,
        **options,
    )


def start(train):
    found = variables(Cnn(dropout=0.3, norm=True))
    return train.init(found["params"], model_state={"batch_stats": found["batch_stats"]}, rng=11)


def some():
    """75 microbatches."""
    return {name: leaf[:600] for name, leaf in digits().items()}


@pytest.mark.parametrize("placement", ["stream", slow("resident")])
def test_a_recorded_run_replayed_gives_the_same_bits(devices4, placement):
    speeds = EmulatedSpeeds(jitter(constant([0.5, 1.0, 2.0, 4.0]), share=0.8, seed=1))
    live = build(elche.ElChe(anchor=2), devices4, emulate=speeds)
    state, used = run(live, start(live), some(), 8, epochs=2, seed=4, placement=placement)
    recorded = live.counts_history
    assert recorded == [window.counts for window in used]
    assert len(set(recorded)) > 2, "the counts must have changed for this to mean much"

    again = build(elche.Replay(recorded), devices4)
    replayed, _ = run(again, start(again), some(), 8, epochs=2, seed=4)
    assert_bitwise(host(replayed), host(state))


def test_stop_and_resume_is_the_uninterrupted_run(devices4):
    rows = [(3, 1, 2, 1), (1, 4, 1, 1), (2, 2, 2, 2)]
    whole = build(Script(rows), devices4)
    want, windows = run(whole, start(whole), some(), 8, epochs=2, seed=9)
    assert len(windows) > 20

    second = build(Script(rows), devices4)  # another one goes on; each run begins anew
    start(second)  # tells the shapes
    for stop in (1, 13, len(windows) - 1):
        state, used = run(whole, start(whole), some(), 8, stop, epochs=2, seed=9)
        saved, cursor = host(state), used[-1].cursor.to_dict()
        state, rest = run(
            second, elche.replicate(saved, devices4), some(), 8, epochs=2, seed=9,
            cursor=elche.Cursor.from_dict(cursor),
        )  # fmt: skip
        assert len(rest) == len(windows) - stop
        assert_bitwise(host(state), host(want))


def test_a_replay_that_the_data_outlasts_says_at_which_window(devices4):
    train = elche.build_train_step(
        lambda params, batch, rng: params["w"] * batch["image"].mean(), optax.sgd(0.1),
        devices=devices4, cadence=elche.Replay([(1, 1, 1, 1)] * 3),
    )  # fmt: skip
    state, seen = train.init({"w": np.ones((), "float32")}), []
    with pytest.raises(ValueError, match=r"Replay: .* 3 windows.* window 3"):
        for window in train.windows(digits(), 8):
            state, _ = train(state, window)
            seen.append(window.index)
    assert seen == [0, 1, 2]


def test_replay_with_zeros_and_on_one_device():
    def trained(rows):
        train = elche.build_train_step(
            scalar_loss(model), optax.adam(1e-3), devices=jax.devices()[: len(rows[0])],
            cadence=elche.Replay(rows),
        )  # fmt: skip
        state, _ = run(train, train.init(variables(model)["params"]), digits(), 8, windows=3)
        return jax.tree.leaves(host(state.params))

    model = Cnn()
    a, b = trained([(4,), (1,), (3,)]), trained([(4, 0), (1, 0), (3, 0)])
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
