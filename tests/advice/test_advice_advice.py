"""`Advice`: its figures, its words, and the line to paste into a script."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, strategies as st

import elche_jax as elche
from elche_jax.advice import Speeds
from elche_jax.advice.advice import make_advice
from elche_jax.advice.predict import Forecast
from elche_jax.cadence import ElChe

MS = st.floats(0.5, 40)
few_windows = mock.patch("elche_jax.advice.predict.SETTLE", 20)
"""For what holds however many windows a cadence is given to settle."""


def advice_of(solo, together=None, sync_ms=1.0, step_ms=None, total=None, epoch=None):
    speeds = Speeds(tuple(solo), tuple(solo if together is None else together), sync_ms, step_ms)
    names = [f"d{rank}" for rank in range(len(solo))]
    return make_advice(names, Forecast(speeds, 8, epoch), ElChe(anchor=4), total)


def test_four_unequal_devices():
    advice = advice_of((5, 5, 10, 20), sync_ms=1.0)
    assert advice.elche.counts == advice.fixed_total.counts == (16, 16, 8, 4)
    assert advice.elche.examples_per_s == pytest.approx(44 * 8 / 0.081)
    assert advice.elche.limit_share == pytest.approx(80 / 81)
    assert advice.limit_examples_per_s == pytest.approx(4400)
    assert advice.plain.examples_per_s == pytest.approx(4 * 8 / 0.021)
    assert [device.examples_per_s for device in advice.devices] == [1600, 1600, 800, 400]
    assert advice.additive == pytest.approx(1)
    # without device 3: windows of four microbatches of 10 ms, 8 + 8 + 4
    without = 20 * 8 / 0.041
    assert advice.devices[3].gain == pytest.approx(44 * 8 / 0.081 / without - 1)
    assert [device.verdict for device in advice.devices] == [
        *2 * ["adds 57 %"], "adds 22 %", "adds 11 %",
    ]  # fmt: skip
    assert advice.best == advice.elche
    text = str(advice)
    assert "4,346         98.8%  16 16 8 4" in text
    assert "2.85 times plain pmap, 2.72 times the fastest device alone." in text
    assert "made of 44 microbatches, with plain pmap of 4" in text
    assert "Leave" not in text and "share something" not in text
    assert text.endswith("cadence=elche.ElChe(anchor=4, speed_hint=[16, 16, 8, 4])")
    assert max(map(len, text.splitlines())) <= 100


def test_a_device_that_costs_more_than_it_gives():
    advice = advice_of((5.0, 80.0), sync_ms=100.0)
    assert advice.best.ranks == (0,)
    assert advice.devices[1].gain < -0.02
    assert advice.devices[1].verdict.startswith("costs ")
    text = str(advice)
    assert "Leave device 1 out: it costs more (exchange, speed of the others) than it gives" in text
    assert "the best devices" in text
    assert text.endswith("cadence=elche.EveryBatch()")


@pytest.mark.parametrize(("sync_ms", "said"), [(50.0, "2.00 times as fast:"), (490.0, None)])
def test_a_slow_link(sync_ms, said):
    advice = advice_of((1.0, 2.0), sync_ms=500.0)
    speeds = Speeds((1.0, 2.0), (1.0, 2.0), sync_ms)
    local = Forecast(speeds, 8).plan("DiLoCo, int8", ElChe(anchor=4))
    text = str(replace(advice, local_steps=local))
    assert "The link is slow: exchanges take 56% of the windows of ElChe." in text
    assert "DiLoCo, int8 " in text
    line = (
        "averaging=elche.DiLoCo(outer=optax.sgd(learning_rate=0.7, momentum=0.9, nesterov=True), "
        'compression="int8")'
    )
    if said is None:  # nor is it much better with fewer bytes: the fast device alone is
        assert "DiLoCo with" not in text and "Leave device 1 out" in text
        assert text.endswith("cadence=elche.EveryBatch()")
        return
    assert said in text and line in text and "Leave" not in text
    counts = [*local.counts]
    assert text.endswith(f"cadence=elche.ElChe(anchor={local.anchor}, speed_hint={counts})")


def test_devices_that_share_their_cores():
    advice = advice_of((5.0, 5.0, 5.0), (15.0, 15.0, 15.0), sync_ms=3.0)
    assert advice.additive == pytest.approx(1 / 3)
    assert len(advice.best.ranks) == 1
    text = str(advice)
    assert "Together the devices reach 33% of the sum of their speeds alone" in text
    assert "Leave devices 1 2 out: they cost more" in text


def test_what_a_measurement_cannot_tell_is_no_difference():
    """One core, two devices: no gain, no loss but the exchange's."""
    advice = advice_of((5.0, 5.0), (10.0, 10.0), sync_ms=0.4)
    assert -0.02 < advice.devices[0].gain < 0
    assert advice.devices[0].verdict == "adds nothing"
    assert advice.best == advice.elche


def test_one_device():
    advice = advice_of((5.0,), sync_ms=0.0)
    assert advice.elche.examples_per_s == 1600
    assert (advice.devices[0].gain, advice.devices[0].verdict) == (None, "the only one")
    text = str(advice)
    assert "One device: nothing to exchange, nothing to share out." in text
    assert "plain pmap" in text and "FixedTotal" not in text and "learning rate" not in text
    assert text.endswith("cadence=elche.EveryBatch()")


def test_one_device_whose_optimizer_is_dear():
    """One step per microbatch is what plain pmap does; fewer are for whoever wants them."""
    advice = advice_of((5.0,), sync_ms=0.0, step_ms=(15.0,), total=16)
    assert advice.plain.examples_per_s == 400
    assert (advice.fixed_total.name, advice.fixed_total.counts) == ("FixedTotal(16)", (16,))
    assert advice.fixed_total.examples_per_s == pytest.approx(16 * 8 / 0.095)
    assert (advice.elche.name, advice.elche.counts) == ("FixedTotal(30)", (30,))
    assert advice.devices[0].examples_per_s == advice.elche.examples_per_s
    text = str(advice)
    assert "An optimizer step costs 15.00 ms, with the host's part in it.\n" in text
    assert "An update is made of 30 microbatches, with plain pmap of 1: look at" in text
    assert text.endswith("cadence=elche.FixedTotal(30)")
    # the window of ElChe is that of FixedTotal, which stands there once
    assert str(advice_of((5.0,), sync_ms=0.0, step_ms=(15.0,))).count("FixedTotal(30)") == 2


def test_a_dear_optimizer_does_not_make_a_slow_device_worth_it():
    """The fast one alone takes a step as rarely as both would."""
    advice = advice_of((1.0, 60.0), sync_ms=20.0, step_ms=(20.0, 20.0))
    assert advice.devices[0].examples_per_s == pytest.approx(200 * 8 / 0.220)
    assert 0 < advice.devices[1].gain < 0.05
    advice = advice_of((1.0, 60.0), sync_ms=5000.0, step_ms=(20.0, 20.0))
    assert (advice.best.ranks, advice.best.counts) == ((0,), (200,))
    assert str(advice).endswith("cadence=elche.FixedTotal(200)")


@few_windows
def test_windows_end_with_the_epoch():
    advice = advice_of((5, 5, 10, 20), epoch=20, total=263_431)
    assert sum(advice.elche.counts) == sum(advice.fixed_total.counts) == 20
    assert advice.elche.examples_per_s == pytest.approx(1e3 * 160 / advice.elche.window_ms)
    assert "A window is a whole epoch, which has no more than 20 microbatches.\n" in str(advice)
    assert advice.to_dict()["epoch"] == 20
    for epoch in (45, None):  # its windows have 44
        assert "whole epoch" not in str(advice_of((5, 5, 10, 20), epoch=epoch))
    assert "has no more than 1 microbatch.\n" in str(advice_of((5.0,), sync_ms=0.0, epoch=1))
    one = advice_of((5.0,), sync_ms=0.0, step_ms=(15.0,), epoch=7)
    assert (one.cadence, "whole epoch" in str(one)) == ("elche.FixedTotal(7)", True)


def test_a_total_of_ones_own():
    advice = advice_of((5.0, 10.0), total=3)
    assert (advice.fixed_total.name, advice.fixed_total.counts) == ("FixedTotal(3)", (2, 1))


@given(solo=st.lists(MS, min_size=2, max_size=5), sync_ms=st.floats(0, 30))
@few_windows
def test_the_line_to_paste_begins_with_the_counts_of_the_plan(solo, sync_ms):
    advice = advice_of(solo, sync_ms=sync_ms)
    cadence = eval(advice.cadence, {"elche": elche})
    assert cadence.init(len(advice.best.ranks)).counts == advice.best.counts


def test_to_dict_goes_through_json():
    advice = advice_of((5.0, 80.0), sync_ms=100.0)
    values = json.loads(json.dumps(advice.to_dict()))
    assert values["devices"][1] == {
        "name": "d1", "solo_ms": 80.0, "step_ms": 0.0, "together_ms": 80.0, "examples_per_s": 100.0,
        "gain": advice.devices[1].gain, "verdict": advice.devices[1].verdict,
    }  # fmt: skip
    assert values["elche"]["counts"] == list(advice.elche.counts)
    assert values["best"]["ranks"] == [0]
    assert values["cadence"] == advice.cadence
