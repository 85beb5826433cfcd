"""The examples of manual control: they run, and what they do by hand is exact."""

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path

import children
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow
from matplotlib.image import imread

import elche_jax as elche

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUMBER = r"(-?[\d.]+|-?nan|-?inf)"


@pytest.fixture
def run():
    """Runs an example; warnings are errors."""

    def run(name, *args):
        return children.run(sys.executable, "-W", "error", EXAMPLES / name, *args)

    return run


@pytest.fixture
def load(monkeypatch):
    """Imports an example by its path."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", EXAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("name", "first", "args"),
    [
        slow("04_gan.py", "discriminator", ()),
        slow("05_gan_critic_steps.py", "critic", ("--seed", "1")),
    ],
)
def test_short_runs(run, tmp_path, name, first, args):
    picture = tmp_path / "made" / "digits.png"
    done = run(name, "--short", "--save", str(picture), *args)
    assert (done.returncode, done.stderr) == (0, "")
    losses = re.findall(rf"{first} {NUMBER}, generator {NUMBER};", done.stdout)
    assert len(losses) == 10
    assert all(math.isfinite(float(loss)) for both in losses for loss in both)
    for column in zip(*losses, strict=True):
        assert len(set(column)) > 5, "the losses must move"
    qualities = re.findall(
        r"covariance ([\d.]+), classes (\d+)/10, confidence ([\d.]+)", done.stdout
    )
    assert len(qualities) == 10 + 3
    real, generated, noise = (tuple(map(float, quality)) for quality in qualities[-3:])
    assert qualities[-4] == qualities[-2], "the last samples are those that are judged"
    # what the judge is worth: real digits are better than what 40 steps and no steps make
    assert all(best >= other for best, other in zip(real, generated, strict=True))
    assert real[2] > noise[2] + 0.1
    pixels = imread(picture)[..., 0].reshape(10, 40, 20, 40)
    frames = [pixels[:, :4], pixels[:, -4:], pixels[..., :4], pixels[..., -4:]]
    assert all((frame == 1).all() for frame in frames), "paper around every digit"
    assert pixels.std() > 0.1
    counts = re.findall(r"; \((\d+), (\d+), (\d+), (\d+)\)$", done.stdout, re.MULTILINE)
    assert len(counts) == (10 if first == "discriminator" else 0)
    steps = re.findall(r"(\d+) critic steps, (\d+) generator steps", done.stdout)
    assert (steps[-1:] == [("120", "40")]) == (first == "critic")


@pytest.mark.parametrize(
    ("name", "args", "line"),
    [
        slow("04_gan.py", (), "step    2: discriminator"),
        slow(
            "05_gan_critic_steps.py", ("--critic-steps", "1"), "2 critic steps, 2 generator steps"
        ),
    ],
)
def test_digits_that_are_not_good_enough_are_an_error(run, name, args, line):
    done = run(name, "--steps", "2", *args)
    assert done.returncode == 1
    message = r"generated digits must reach covariance .*, got covariance .*\n"
    assert re.fullmatch(message, done.stderr)
    assert line in done.stdout


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("04_gan.py", ["--steps", "0"], "--steps: must be an integer from 1 to 1000000000, got"),
        ("04_gan.py", ["--seed", "-1"], "--seed: must be an integer from 0 to 1000000000, got"),
        ("04_gan.py", ["--short", "--steps", "9"], "--steps: not allowed with argument --short"),
        ("04_gan.py", ["--every-device"], "--every-device: must find two devices or more, got ["),
        ("04_gan.py", ["--save", "x.jpg"], "--save: must be a file that ends in .png, got 'x.jpg'"),
        (
            "04_gan.py", ["--save", f"{__file__}/x.png"],
            "--save: must be in a folder that can be made",
        ),
        (
            "05_gan_critic_steps.py", ["--critic-steps", "two"],
            "--critic-steps: must be an integer from 1 to 100, got 'two'",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(load, monkeypatch, capsys, name, args, message):
    monkeypatch.setattr(sys, "argv", [name, *args])
    cpus = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda: cpus[:1])
    with pytest.raises(SystemExit) as ended:
        load(name).main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.splitlines()[-1].startswith(f"{name}: error: argument {message}")


@pytest.mark.parametrize("name", ["04_gan.py", "05_gan_critic_steps.py"])
def test_noise_is_not_good_enough(load, capsys, name):
    """What an example says of the digits it has made, of digits that it has not."""
    gan = load(name)
    digits, judge = gan.load()
    noise = np.random.default_rng(0).normal(size=(1000, digits.shape[1]))
    assert gan.compare(judge, digits, noise, None) == 0
    assert gan.compare(judge, digits, digits, gan.WANTED) == 0
    assert capsys.readouterr().err == ""
    assert gan.compare(judge, digits, noise, gan.WANTED) == 1
    message = r"generated digits must reach covariance .*, got covariance .*\n"
    assert re.fullmatch(message, capsys.readouterr().err)


def one_device_update(gan, loss_fn, tx, player, other, digits, rng, counts):
    """The update by the examples of all devices at once."""
    draw = jax.jit(gan.draw)
    drawn = [
        draw(digits, jax.random.fold_in(jax.random.fold_in(rng, rank), i))
        for rank, count in enumerate(counts)
        for i in range(count)
    ]
    batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)
    assert len(batch["image"]) == sum(counts) * gan.MICROBATCH
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(player.params, other.params, batch)
    updates, opt_state = jax.jit(tx.update)(grads, player.opt_state, player.params)
    return gan.Player(optax.apply_updates(player.params, updates), opt_state), loss


def devices_of(kinds, request):
    cpus = jax.devices("cpu")
    return cpus[:4] if kinds == 1 else [cpus[0], *request.getfixturevalue("twins")[:1], cpus[1]]


@pytest.mark.slow  # test_engine_ddp shows that the parts are exact
@pytest.mark.parametrize(("tx", "kinds"), [("sgd", 1), ("adam", 1), ("adam", 2)])
def test_the_gan_on_unequal_devices_is_the_gan_on_one(load, request, tx, kinds):
    gan, ddp = load("04_gan.py"), elche.DDP(devices_of(kinds, request))
    tx = optax.sgd(0.1, momentum=0.5) if tx == "sgd" else gan.optimizer(steps=10)
    digits = gan.load()[0]
    resident, plan = ddp.replicate(digits), gan.CADENCE.init(ddp.world_size)
    g = gan.new_player(ddp, gan.Generator(), gan.LATENT, tx, seed=0)
    d = gan.new_player(ddp, gan.Discriminator(), gan.PIXELS, tx, seed=1)
    want_g, want_d = jax.device_get(elche.unreplicate((g, d)))
    update_g = gan.make_update(ddp, gan.generator_loss, tx, None, seed=2)
    update_d = gan.make_update(ddp, gan.discriminator_loss, tx, None, seed=3)
    for step in range(3):
        counts = ((4, 4, 1, 2), (1, 7, 3, 1), (2, 2, 2, 2))[step][: ddp.world_size]
        planned = dataclasses.replace(plan, counts=counts)
        g_rng, d_rng = (jax.random.fold_in(jax.random.key(seed), step) for seed in (2, 3))
        d, d_loss, after = update_d(d, g, resident, planned, step)
        g, g_loss, _ = update_g(g, d, resident, planned, step)
        assert after.calibrated == (step > 0), "the first window compiles"
        want_d, want_d_loss = one_device_update(
            gan, gan.discriminator_loss, tx, want_d, want_g, digits, d_rng, counts
        )
        want_g, want_g_loss = one_device_update(
            gan, gan.generator_loss, tx, want_g, want_d, digits, g_rng, counts
        )
        np.testing.assert_allclose((d_loss[0], g_loss[0]), (want_d_loss, want_g_loss), rtol=1e-4)
    got, want = elche.unreplicate((g.params, d.params)), (want_g.params, want_d.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    for leaf in jax.tree.leaves((g, d) if kinds == 1 else ddp.sync_params((g, d))):
        copies = {np.asarray(copy).tobytes() for copy in leaf}
        assert len(copies) == 1, "replicas must be equal"
    assert not np.array_equal(got[1]["params"]["Dense_0"]["bias"], np.zeros(128))


@pytest.mark.slow  # test_engine_ddp shows what makes them so
def test_players_begin_alike_by_the_first_devices_seed(load, devices4):
    gan, ddp = load("04_gan.py"), elche.DDP(devices4)
    player = gan.new_player(ddp, gan.Generator(), gan.LATENT, optax.sgd(0.1), seed=3)
    first = jax.random.split(jax.random.key(3), 4)[0]
    want = gan.Generator().init(first, np.zeros((1, gan.LATENT), "float32"))
    for rank in range(4):
        jax.tree.map(
            lambda a, b, r=rank: np.testing.assert_allclose(a[r], b, rtol=1e-5, atol=1e-6),
            player.params,
            want,
        )


@pytest.mark.slow  # test_engine_ddp shows that weighted means are exact
@pytest.mark.parametrize("who", ["critic", "generator"])
def test_one_update_of_the_critic_is_by_the_mean_of_all_examples(load, who):
    """On four emulated devices (`vmap`) as by all their microbatches at once."""
    gan = load("05_gan_critic_steps.py")
    digits, tx = jnp.asarray(gan.load()[0]), optax.sgd(1.0)
    networks = {"generator": (gan.GENERATOR, gan.LATENT), "critic": (gan.CRITIC, gan.PIXELS)}
    players = {
        name: jax.device_get(elche.unreplicate(gan.new_player(network, inputs, tx, seed=0)))
        for name, (network, inputs) in networks.items()
    }
    other = players["generator" if who == "critic" else "critic"]
    loss_fn = getattr(gan, f"{who}_loss")
    rngs, counts = jax.random.split(jax.random.key(0), 4), np.array(gan.COUNTS)

    def update(count, rng):
        return gan.update(loss_fn, tx, players[who], other, digits, count, rng)

    player, loss = jax.jit(jax.vmap(update, axis_name=gan.AXIS))(counts, rngs)
    draw = jax.jit(gan.draw)
    drawn = [
        draw(digits, jax.random.fold_in(rng, i))
        for rng, count in zip(rngs, counts, strict=True)
        for i in range(count)
    ]
    everything = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *drawn)
    gradient = jax.jit(jax.value_and_grad(loss_fn))
    want_loss, grads = gradient(players[who].params, other.params, everything)
    np.testing.assert_allclose(loss, [want_loss] * 4, rtol=1e-4)
    want = jax.tree.map(jnp.subtract, players[who].params, grads)
    for rank in range(4):
        got = jax.tree.map(lambda leaf, r=rank: leaf[r], player.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert player.steps.tolist() == [1] * 4
