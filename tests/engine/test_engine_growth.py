"""What grows with the number of arrays in a program, and what does not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.engine.mapped import Mapped

DATA = {"x": np.ones((16, 4), np.float32)}


@pytest.fixture(autouse=True)
def compiled_as_for_users():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def loss_fn(params, batch, rng):
    return jnp.mean(sum(jnp.tanh(batch["x"] * p) for p in params) ** 2)


def ends(monkeypatch, arrays, stage="optimized", world=2, **options):
    """The program that ends a window, as text."""
    texts = []
    lower = Mapped.lower

    def record(self, *args):
        lowered = lower(self, *args)
        texts.append((lowered.compile() if stage == "optimized" else lowered).as_text())
        return lowered

    with monkeypatch.context() as patch:
        patch.setattr(Mapped, "lower", record)
        devices = jax.devices()[:world]
        train = elche.build_train_step(loss_fn, optax.adam(1e-3), devices=devices, **options)
        state = train.init([np.ones(4, np.float32)] * arrays)
        with train.windows(DATA, batch_size=2, epochs=1) as windows:
            train(state, next(windows))
    (text,) = (text for text in texts if world == 1 or "all-reduce(" in text)
    return text


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"config": elche.DDPConfig(max_grad_norm=1.0)}, id="gradients"),
        slow({"averaging": elche.ParameterAveraging(optimizer_state="average")}, id="averaging"),
    ],
)
def test_arrays_of_a_shape_share_their_kernels(monkeypatch, options):
    """A kernel is compiled once for all arrays that are treated alike, and kernels are most
    of what a first window waits for."""
    few, many = (ends(monkeypatch, arrays, **options) for arrays in (4, 9))
    assert len(kernels(many)) <= len(kernels(few)) + 6  # two to five for each array without it


def test_on_one_device_arrays_of_a_shape_are_updated_by_one_kernel(monkeypatch):
    few, many = (ends(monkeypatch, arrays, world=1) for arrays in (4, 9))
    assert len(kernels(many)) <= len(kernels(few)) + 6
    assert few.count(" sqrt(") == many.count(" sqrt(") == 1  # by hand it is one for each array


def test_on_one_device_moments_are_neither_taken_out_nor_stacked(monkeypatch):
    few, many = (ends(monkeypatch, arrays, "as lowered", world=1) for arrays in (4, 9))
    # a parameter is taken out for the loss, and its gradient is put into the buffer of all
    assert many.count("stablehlo.reshape") - few.count("stablehlo.reshape") <= 2 * 5


def kernels(text):
    """The kernels of an optimized program that are not alike."""
    texts = [part for part in re.split(r"\n(?=%|ENTRY)", text) if part.startswith("%fused")]
    return {without_names(re.sub(r", metadata=\{[^}]*\}", "", text)) for text in texts}


def without_names(kernel):
    names: dict[str, str] = {}
    return re.sub(r"%?[\w-]+\.[\w.]+", lambda m: names.setdefault(m[0], str(len(names))), kernel)
