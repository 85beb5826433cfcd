"""A job of several processes is refused in words, wherever others would be left out."""

import json
import socket
import sys
from contextlib import ExitStack

import children
import jax
import numpy as np
import optax
import pytest

import elche_jax as elche

PARAMS = {"w": np.zeros(2, "float32")}
DATA = {"x": np.ones((8, 2), "float32")}


def loss_fn(params, batch, rng):
    return ((batch["x"] @ params["w"]) ** 2).mean()


def apply_fn(params, batch):
    return batch["x"] @ params["w"]


TX = optax.sgd(0.1)
ENTRIES = {
    "Trainer": lambda: elche.Trainer(loss_fn, TX),
    "DDP": lambda: elche.DDP(),
    "DDP, wrap": lambda: elche.DDP.wrap([PARAMS, PARAMS]),
    "build_eval_step": lambda: elche.build_eval_step(lambda params, batch: {}),
    "predict": lambda: elche.predict(apply_fn, PARAMS, DATA, 4),
    "advise": lambda: elche.advise(loss_fn, TX, PARAMS, DATA, 4),
    "Checkpointer": lambda: elche.Checkpointer(None, elche.Checkpoints("/dev/null/no")),
}


def refused(name):
    """What an entry says."""
    try:
        ENTRIES[name]()
    except ValueError as error:
        return str(error)
    return "nothing"


def told(name):
    """What it must say."""
    where = name.partition(",")[0]
    return (
        f"{where}: jax.process_count() must be 1, got 2. Over several processes only "
        "build_train_step works so far."
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_asks(name, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert refused(name) == told(name)


def test_devices_can_still_be_named(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert elche.device_summary(jax.devices()[:1]).startswith("elche: 1 device")


def test_two_processes_are_refused():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        arguments = sys.executable, __file__, port
        both = [stack.enter_context(children.started(*arguments, rank)) for rank in range(2)]
        for child in both:
            out, err = child.communicate()
            assert child.returncode == 0, err
            assert json.loads(out) == {name: told(name) for name in ENTRIES}


def main():
    """One of the two processes."""
    port, rank = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
    print(json.dumps({name: refused(name) for name in ENTRIES}))


if __name__ == "__main__":
    main()
