"""A hand-written GAN loop on four devices, one of them slower: two networks, two optimizers.

    python examples/04_gan.py [--short] [--steps 4000] [--seed 0] [--save out/gan.png]

No training step fits two networks that play against each other, so this example writes the
loop and its `jax.pmap` itself, and `elche.DDP` does the exchanges between the devices. The GAN
learns the 8 x 8 digits of scikit-learn, on four CPU devices.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits import PIXELS, Quality, compare, load, parser, save_grid
from flax import linen as nn

import elche_jax as elche

# Microbatches of each device in a step. The last device represents one of half the speed:
# with half the work it finishes with the others, and no device waits.
COUNTS = (2, 2, 2, 1)
MICROBATCH = 16  # examples
LATENT = 16  # random numbers from which a digit is generated
STEPS, SHORT_STEPS = 4000, 40
# With a margin: 8 runs, with 5 seeds and 2 releases of JAX, reached at least 0.916, 9 and 0.810.
WANTED = Quality(covariance=0.88, classes=8, confidence=0.77)


class Generator(nn.Module):
    """Generates digits from random numbers."""

    @nn.compact
    def __call__(self, latent: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(128)(latent))
        x = nn.relu(nn.Dense(128)(x))
        return jnp.tanh(nn.Dense(PIXELS)(x))


class Discriminator(nn.Module):
    """Returns a logit per image: how real it looks."""

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Dense(128)(image), 0.2)
        x = nn.leaky_relu(nn.Dense(128)(x), 0.2)
        return nn.Dense(1)(x)[:, 0]


generate, discriminate = jax.jit(Generator().apply), Discriminator().apply


def discriminator_loss(params: Any, generator: Any, batch: Any) -> jax.Array:
    """Cross-entropy of classifying images as real or fake; the mean over a microbatch."""
    real = discriminate(params, batch["image"])
    fake = discriminate(params, generate(generator, batch["latent"]))
    return (nn.softplus(-real) + nn.softplus(fake)).mean()


def generator_loss(params: Any, discriminator: Any, batch: Any) -> jax.Array:
    """Cross-entropy of being taken for real; the mean over a microbatch."""
    fake = generate(params, batch["latent"])
    return nn.softplus(-discriminate(discriminator, fake)).mean()


class Player(NamedTuple):
    """A network and the state of its optimizer, stacked: one copy on each device."""

    params: Any
    opt_state: Any


def optimizer(steps: int) -> optax.GradientTransformation:
    """Adam with low momentum, as the opponent changes too; the decay lets both settle."""
    return optax.adam(optax.cosine_decay_schedule(1e-3, steps), b1=0.5, b2=0.9)


def new_player(ddp: elche.DDP, network: nn.Module, inputs: int, tx: Any, seed: int) -> Player:
    """Creates a network on every device, each from its own key; all then copy the first one's."""
    keys = jax.random.split(jax.random.key(seed), ddp.world_size)
    init = jax.pmap(network.init, ddp.axis_name, in_axes=(0, None), devices=ddp.devices)
    params = ddp.sync_params(init(keys, np.zeros((1, inputs), "float32")))
    return Player(params, ddp.replicate(tx.init(elche.unreplicate(params))))


def mean_gradient(
    loss_fn: Callable[..., jax.Array], params: Any, other: Any, batch: Any, count: Any
) -> Any:
    """Mean loss and gradient over the first `count` microbatches of this device.

    The count is a value, not a shape: one program serves all devices, and the device with
    fewer microbatches really computes less.
    """

    def add(i: Any, total: Any) -> Any:
        microbatch = jax.tree.map(lambda leaf: leaf[i], batch)
        loss_and_grads = jax.value_and_grad(loss_fn)(params, other, microbatch)
        return jax.tree.map(jnp.add, total, loss_and_grads)

    zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    total = jax.lax.fori_loop(0, count, add, zeros)
    return jax.tree.map(lambda leaf: leaf / count, total)


def make_update(ddp: elche.DDP, loss_fn: Callable[..., jax.Array], tx: Any) -> Callable[..., Any]:
    """One player's half of a step: gradients on every device, one exchange, one update."""
    gradient = jax.pmap(partial(mean_gradient, loss_fn), ddp.axis_name, devices=ddp.devices)

    @partial(jax.pmap, axis_name=ddp.axis_name, devices=ddp.devices, donate_argnums=1)
    def apply(grads: Any, player: Player) -> Player:
        updates, opt_state = tx.update(grads, player.opt_state, player.params)
        return Player(optax.apply_updates(player.params, updates), opt_state)

    def update(player: Player, other: Player, batch: Any) -> tuple[Player, jax.Array]:
        means = gradient(player.params, other.params, batch, np.array(COUNTS))
        # Weighted by the devices' numbers of examples, this is the mean over all examples.
        loss, grads = ddp.weighted_all_reduce_gradients(means, COUNTS)
        return apply(grads, player), loss

    return update


def draw(digits: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns one step's microbatches for all devices; those beyond a device's count are unused."""
    shape = (len(COUNTS), max(COUNTS), MICROBATCH)
    latent = rng.normal(size=(*shape, LATENT)).astype("float32")
    return {"image": digits[rng.integers(len(digits), size=shape)], "latent": latent}


def main() -> int:
    """Trains, prints the quality, saves the picture; returns 1 if it is too low."""
    options = parser(__doc__.splitlines()[0], STEPS, SHORT_STEPS).parse_args()
    steps = SHORT_STEPS if options.short else options.steps
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", len(COUNTS))

    digits, judge = load()
    rng = np.random.default_rng(options.seed)
    latent = rng.normal(size=(1000, LATENT)).astype("float32")  # for the samples that are judged
    ddp, tx = elche.DDP(), optimizer(steps)
    generator = new_player(ddp, Generator(), LATENT, tx, 2 * options.seed)
    discriminator = new_player(ddp, Discriminator(), PIXELS, tx, 2 * options.seed + 1)
    update_generator = make_update(ddp, generator_loss, tx)
    update_discriminator = make_update(ddp, discriminator_loss, tx)

    for step in range(1, steps + 1):
        batch = draw(digits, rng)
        discriminator, d_loss = update_discriminator(discriminator, generator, batch)
        generator, g_loss = update_generator(generator, discriminator, batch)
        # CPU devices share their threads: with many programs in flight they block each other.
        jax.block_until_ready(g_loss)
        if step % max(1, steps // 10) == 0 or step == steps:
            samples = np.asarray(generate(elche.unreplicate(generator.params), latent))
            losses = f"discriminator {d_loss[0]:.3f}, generator {g_loss[0]:.3f}"
            print(f"step {step:4}: {losses}; {judge(samples)}", flush=True)

    elche.check_replicas((generator, discriminator))  # equal on all devices, bit for bit
    if options.save:
        save_grid(samples, options.save)
    return compare(judge, digits, samples, None if options.short else WANTED)


if __name__ == "__main__":
    sys.exit(main())
