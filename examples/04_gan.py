"""A hand-written GAN loop on devices of unequal speed, driven by a cadence.

    python examples/04_gan.py [--short] [--steps 4000] [--every-device] [--save out/gan.png]

No training step fits two networks that play against each other, so this example has a loop of
its own. `elche.DDP` maps its functions over the devices, times them and does the exchanges;
`elche.ElChe` decides how many microbatches each device computes. The GAN learns the 8 x 8 digits
of scikit-learn, on four CPU devices, the last of which is emulated to have half the speed. With
`--every-device` it trains on all devices of the machine instead: its GPUs and its CPU.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _digits import PIXELS, Quality, compare, load, parser, save_grid
from flax import linen as nn

import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

MS = (1.0, 1.0, 1.0, 2.0)  # milliseconds that a microbatch takes on each emulated device
# The slowest device computes two microbatches per step, and no more even if the exchange is slow:
# a GAN needs many small steps.
CADENCE = elche.ElChe(anchor=2, max_anchor=2)
MICROBATCH = 8  # examples
LATENT = 16  # random numbers from which a digit is generated
STEPS, SHORT_STEPS = 4000, 40
# With a margin: runs with 5 seeds reached at least 0.908, 10 and 0.805.
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
    """Return the mean cross-entropy over a microbatch of classifying images as real or fake."""
    real = discriminate(params, batch["image"])
    fake = discriminate(params, generate(generator, batch["latent"]))
    return (nn.softplus(-real) + nn.softplus(fake)).mean()


def generator_loss(params: Any, discriminator: Any, batch: Any) -> jax.Array:
    """Return the mean cross-entropy over a microbatch of fakes being taken for real."""
    fake = generate(params, batch["latent"])
    return nn.softplus(-discriminate(discriminator, fake)).mean()


class Player(NamedTuple):
    """A network and the state of its optimizer, stacked: one copy on each device."""

    params: Any
    opt_state: Any


def optimizer(steps: int) -> optax.GradientTransformation:
    """Return Adam with low momentum, as the opponent changes too; the decay lets both settle."""
    return optax.adam(optax.cosine_decay_schedule(1e-3, steps), b1=0.5, b2=0.9)


def new_player(ddp: elche.DDP, network: nn.Module, inputs: int, tx: Any, seed: int) -> Player:
    """Create a network on every device, each from its own key; all then copy the first one."""
    keys = jax.random.split(jax.random.key(seed), ddp.world_size)
    init = ddp.map(lambda key: network.init(key, jnp.zeros((1, inputs))))
    params = ddp.sync_params(init(keys))
    return Player(params, ddp.replicate(tx.init(elche.unreplicate(params))))


def draw(digits: jax.Array, rng: jax.Array) -> dict[str, jax.Array]:
    """Draw one microbatch, on the device."""
    rows, latent = jax.random.split(rng)
    return {
        "image": digits[jax.random.randint(rows, (MICROBATCH,), 0, len(digits))],
        "latent": jax.random.normal(latent, (MICROBATCH, LATENT)),
    }


class Work(NamedTuple):
    """The work of a device in a step; stacked, with one entry per device."""

    rank: Any
    count: Any
    step: Any


def works(counts: tuple[int, ...], step: int) -> Work:
    """Return the work of a step: the first `counts[d]` microbatches of each device `d`."""
    return Work(np.arange(len(counts)), np.array(counts), np.full(len(counts), step))


def make_gradient(
    loss_fn: Callable[..., jax.Array], emulate: EmulatedSpeeds | None, seed: int
) -> Callable[..., Any]:
    """Return a function for one device: the mean loss and gradient over its microbatches.

    The count is a value, not a shape: one program serves all counts, and the device with
    fewer microbatches really computes less.
    """

    def mean_gradient(params: Any, other: Any, digits: jax.Array, work: Work) -> Any:
        rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), work.step), work.rank)

        def add(i: Any, total: Any) -> Any:
            batch = draw(digits, jax.random.fold_in(rng, i))
            loss_and_grads = jax.value_and_grad(loss_fn)(params, other, batch)
            return jax.tree.map(jnp.add, total, loss_and_grads)

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        begun = 0.0 if emulate is None else emulate.begin(work.rank, work.step, True)
        first = jnp.asarray(begun, jnp.int32)  # 0, but only known once the emulated device begins
        total = jax.lax.fori_loop(first, work.count, add, zeros)
        waited = 0.0 if emulate is None else emulate.end(work.rank, work.count, total)
        return jax.tree.map(lambda leaf: leaf / work.count + waited, total)

    return mean_gradient


def make_update(
    ddp: elche.DDP,
    loss_fn: Callable[..., jax.Array],
    tx: Any,
    emulate: EmulatedSpeeds | None,
    seed: int,
) -> Callable[..., Any]:
    """Return one player's half of a step: gradients on all devices, one exchange, one update."""
    gradient = ddp.map(make_gradient(loss_fn, emulate, seed))

    def descend(grads: Any, player: Player) -> Player:
        updates, opt_state = tx.update(grads, player.opt_state, player.params)
        return Player(optax.apply_updates(player.params, updates), opt_state)

    apply = ddp.map(descend, donate_argnums=1)

    def update(player: Player, other: Player, digits: Any, plan: Any, step: int) -> Any:
        work = works(plan.counts, step)
        with ddp.timed(plan.counts) as clock:
            means = clock.worked(gradient(player.params, other.params, digits, work))
            # Weighted by the devices' numbers of examples, this is the mean over all examples.
            loss, grads = ddp.weighted_all_reduce_gradients(means, plan.counts)
            player = clock.synced(apply(grads, player))
        return player, loss, CADENCE.update(plan, clock.report)

    return update


def emulated() -> tuple[list[jax.Device], EmulatedSpeeds]:
    """Return CPU devices, and the emulation that slows them down."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", len(MS))
    return jax.devices(), EmulatedSpeeds(MS)


def every() -> list[jax.Device]:
    """Return the devices of the default platform, such as GPUs, and the CPU."""
    devices = jax.devices()
    return devices if devices[0].platform == "cpu" else [*devices, *jax.devices("cpu")]


def main() -> int:
    """Train, print the quality, save the picture; return 1 if the quality is too low."""
    command = parser(__doc__.splitlines()[0], STEPS, SHORT_STEPS)
    text = "train on every device of the machine, of whatever kind"
    command.add_argument("--every-device", action="store_true", help=text)
    options = command.parse_args()
    steps = SHORT_STEPS if options.short else options.steps
    devices, emulate = (every(), None) if options.every_device else emulated()
    if len(devices) < 2:
        command.error(f"argument --every-device: must find two devices or more, got {devices}")
    ddp = elche.DDP(devices)
    print(elche.device_summary(devices))

    digits, judge = load()
    rng = np.random.default_rng(options.seed)
    latent = rng.normal(size=(1000, LATENT)).astype("float32")  # for the samples that are judged
    resident, tx = ddp.replicate(digits), optimizer(steps)
    seeds = 2 * options.seed, 2 * options.seed + 1
    generator = new_player(ddp, Generator(), LATENT, tx, seeds[0])
    discriminator = new_player(ddp, Discriminator(), PIXELS, tx, seeds[1])
    update_generator = make_update(ddp, generator_loss, tx, emulate, seeds[0])
    update_discriminator = make_update(ddp, discriminator_loss, tx, emulate, seeds[1])

    g_plan = d_plan = CADENCE.init(ddp.world_size)
    for step in range(1, steps + 1):
        discriminator, d_loss, d_plan = update_discriminator(
            discriminator, generator, resident, d_plan, step
        )
        generator, g_loss, g_plan = update_generator(
            generator, discriminator, resident, g_plan, step
        )
        if step % max(1, steps // 10) == 0 or step == steps:
            # Devices of different kinds round differently; with one kind this changes nothing.
            generator, discriminator = ddp.sync_params((generator, discriminator))
            samples = np.asarray(generate(elche.unreplicate(generator.params), latent))
            losses = f"discriminator {d_loss[0]:.3f}, generator {g_loss[0]:.3f}"
            print(f"step {step:4}: {losses}; {judge(samples)}; {d_plan.counts}", flush=True)

    elche.check_replicas((generator, discriminator))  # equal on all devices, bit for bit
    if options.save:
        save_grid(samples, options.save)
    return compare(judge, digits, samples, None if options.short else WANTED)


if __name__ == "__main__":
    sys.exit(main())
