"""Seconds until the first window is over, compared with a hand-written step's first call.

    python benchmarks/first_window.py [--repeats 3] [--case 200] [--out FILE]

Every start is a separate process, plain and ours in turn. `n`: a perceptron of `n` arrays, half of
them vectors, Adam, four devices, against `jax.pmap`. `transformer`: Flax linen, 150 arrays. `one`:
200 arrays on one device, against `jax.jit`. `again`: 200 arrays, a second start that reads JAX's
persistent compilation cache. `local`: 100 arrays, local steps whose parameters and moments are
averaged, four devices, against a scan and `pmean` in `jax.pmap`; `host`: the same with an exchange
on the host, which compiles for each device. The clock starts when data and parameters are ready, at
the first call (ours: at `windows`), and stops when the loss is ready.
"""

import tempfile
from functools import partial
from pathlib import Path

from measure import Result, in_a_process, interleave, ratios, result, run_cases

ARRAYS = (100, 200, 400, 800)
CASES = (*map(str, ARRAYS), "transformer", "one", "again", "local", "host")
BATCH = 8
STEPS = 2
"""Local steps of a hand-written window."""
MOST = 1.2
"""Required: at most this many times a plain step's first call."""
MOST_AGAIN = 2.0
"""Required of a second start: at most this many seconds more than a plain one."""


def perceptron(arrays: int, width: int = 16):
    """Return parameters, loss and data of a perceptron with the given number of arrays."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    params = {
        f"layer{i:03d}": {
            "w": (rng.normal(size=(width, width)) / width**0.5).astype("float32"),
            "b": np.zeros(width, "float32"),
        }
        for i in range(arrays // 2)
    }

    def loss_fn(params, batch, rng):
        x = batch["x"]
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x - batch["y"]) ** 2).mean()

    data = rng.normal(size=(2, 8 * BATCH, width)).astype("float32")
    return params, loss_fn, {"x": data[0], "y": data[1]}


def transformer(layers: int = 9, width: int = 64, length: int = 16, words: int = 128):
    """Return parameters, loss and data of a Flax linen decoder: 16 arrays per layer, plus 6."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            mask = nn.make_causal_mask(x[..., 0])
            y = nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            x = x + y
            y = nn.Dense(4 * width)(nn.LayerNorm()(x))
            return x + nn.Dense(width)(nn.gelu(y))

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            places = nn.Embed(length, width)(jnp.arange(length))
            x = nn.Embed(words, width)(tokens) + places
            for _ in range(layers):
                x = Block()(x)
            return nn.Dense(words)(nn.LayerNorm()(x))

    model = Decoder()

    def loss_fn(params, batch, rng):
        logits = model.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    tokens = np.random.default_rng(0).integers(0, words, (8 * BATCH, length + 1)).astype("int32")
    params = model.init(jax.random.key(0), tokens[:1, :-1])
    return params, loss_fn, {"x": tokens[:, :-1], "y": tokens[:, 1:]}


def start(way: str, model: str, world: int, rule: str) -> float:
    """Return the seconds of a first window or a plain step's first call, in a fresh process."""
    import time

    import jax
    import numpy as np
    import optax
    import setup_devices  # noqa: F401  (before the backend starts)

    import elche_jax as elche

    params, loss_fn, data = transformer() if model == "transformer" else perceptron(int(model))
    optimizer, devices = optax.adam(1e-3), jax.devices()[:world]
    if way == "ours":
        train = elche.build_train_step(
            loss_fn, optimizer, devices=devices,
            averaging=None if rule == "gradient" else elche.ParameterAveraging(),
            exchange=elche.HostExchange() if rule == "host" else None,
        )  # fmt: skip
        state = train.init(params)
        begun = time.perf_counter()
        with train.windows(data, batch_size=BATCH, epochs=1) as windows:
            _, metrics = train(state, next(windows))
            jax.block_until_ready(metrics)
            return time.perf_counter() - begun

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        if world > 1:
            loss, grads = jax.lax.pmean((loss, grads), "devices")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def window(params, opt_state, batches):
        def local(carry, batch):
            loss, grads = jax.value_and_grad(loss_fn)(carry[0], batch, None)
            updates, opt_state = optimizer.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(local, (params, opt_state), batches)
        adam, *rest = opt_state
        params, mu, nu, loss = jax.lax.pmean((params, adam.mu, adam.nu, losses.mean()), "devices")
        return params, (adam._replace(mu=mu, nu=nu), *rest), loss

    rows = jax.tree.map(lambda a: a[: world * BATCH], data)
    if world > 1:
        shape = (world, BATCH) if rule == "gradient" else (world, STEPS, BATCH // STEPS)
        rows = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), rows)
        plain = step if rule == "gradient" else window
        plain = jax.pmap(plain, axis_name="devices", devices=devices, donate_argnums=(0, 1))
        copies = jax.tree.map(
            lambda a: np.stack([np.asarray(a)] * world), (params, optimizer.init(params))
        )
    else:
        plain = jax.jit(step, donate_argnums=(0, 1))
        copies = jax.tree.map(jax.numpy.array, (params, optimizer.init(params)))
    begun = time.perf_counter()
    jax.block_until_ready(plain(*copies, rows))
    return time.perf_counter() - begun


def cached_in(folder: str | None) -> dict[str, str]:
    """Return the environment variables that make a process cache programs in a folder, if any."""
    if folder is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def measure(case: str, repeats: int) -> list[Result]:
    """Return the seconds of both, and how they compare with the requirement."""
    rule = case if case in ("local", "host") else "gradient"
    model = {"one": "200", "again": "200", "local": "100", "host": "100"}.get(case, case)
    world = 1 if case == "one" else 4
    plain = "plain jit" if world == 1 else "plain pmap"
    with tempfile.TemporaryDirectory() as folder:
        caches = {way: str(Path(folder, way)) if case == "again" else None for way in WAYS}
        starts = {
            way: partial(
                in_a_process, "first_window", "start", way, model, world, rule, **cached_in(cache)
            )
            for way, cache in caches.items()
        }
        if case == "again":
            for start_once in starts.values():
                start_once()
        found = interleave(starts, repeats)
    rows = [
        result(case[:5], f"{model}: {plain}, first call", found["plain"], "s"),
        result(case[:5], f"{model}: elche_jax, first window", found["ours"], "s"),
    ]
    if case == "again":
        more = tuple(a - b for a, b in zip(found["ours"], found["plain"], strict=True))
        return [*rows, result("again", "200: second start, more", more, "s", most=MOST_AGAIN)]
    share, most = ratios(found["ours"], found["plain"]), MOST if rule == "gradient" else None
    return [*rows, result(case[:5], f"{model}: over {plain}", share, most=most)]


WAYS = ("plain", "ours")


if __name__ == "__main__":
    run_cases(__doc__, "benchmarks/out/first_window.json", 3, CASES, measure)
