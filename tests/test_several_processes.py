"""What does not work over several processes is refused in words."""

import re

import jax
import numpy as np
import optax
import pytest

import elche_jax as elche

PARAMS = {"w": np.zeros(2, "float32")}
DATA = {"x": np.ones((8, 2), "float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"]) ** 2).mean()


TX = optax.sgd(0.1)
ENTRIES = {
    "advise": (
        lambda: elche.advise(loss_fn, TX, PARAMS, DATA, 4),
        "It measures devices alone, so call it in a process by itself on each host; in a job, "
        "train.report() tells the speeds.",
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_asks(name, monkeypatch):
    call, todo = ENTRIES[name]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = f"{name}: jax.process_count() must be 1, got 2. {todo}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_devices_can_still_be_named(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert elche.device_summary(jax.devices()[:1]).startswith("elche: 1 device")
