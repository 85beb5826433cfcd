"""Ways to sum a tree of gradients over devices, compared with one plain `jax.lax.psum`.

    python benchmarks/exchange.py [--repeats 9] [--megabytes 100] [--devices 4] [--out FILE]

Three trees have the same number of bytes: one array, a transformer's mix of matrices and
vectors, and many arrays of one size. Every figure is the median, over repeats, of the ratio to a
plain psum in the same repeat; below 1 is faster.
"""

import setup_devices  # noqa: I001,F401  (first: it sets the devices)

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from measure import Result, interleave, options_of, ratios, result, show

import elche_jax as elche
from elche_jax.engine.axis import DeviceAxis
from elche_jax.engine.exchange import packed_psum
from elche_jax.engine.wire import encode

AXIS = "devices"
MIB = 2**20


def one_array(numbers: int) -> list[tuple[int, ...]]:
    return [(numbers,)]


def transformer(numbers: int) -> list[tuple[int, ...]]:
    """Return the shapes of layers: four square matrices, a feed-forward of two, norms, biases."""
    width, layers = 512, 0
    layer = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)] + [(width,)] * 9
    size = sum(int(np.prod(shape)) for shape in layer)
    layers = numbers // size
    rest = (numbers - layers * size) // width
    return layer * layers + [(rest, width)]


def many_equal(numbers: int) -> list[tuple[int, ...]]:
    return [(256, 128)] * (numbers // 32768)


def flat(tree, buckets: int):
    """Copy the leaves into buffers, sum these, and copy the results back, as buckets do."""
    leaves = jax.tree.leaves(tree)
    each = -(-sum(leaf.size for leaf in leaves) // buckets)
    groups, size = [[]], 0
    for leaf in leaves:
        if size >= each:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.size
    buffers = [jnp.concatenate([leaf.reshape(-1) for leaf in group]) for group in groups]
    out = []
    for buffer, group in zip(jax.lax.psum(buffers, AXIS), groups, strict=True):
        at = 0
        for leaf in group:
            out.append(buffer[at : at + leaf.size].reshape(leaf.shape))
            at += leaf.size
    return out


def bfloat16_sum(tree: list, world: int) -> list:
    sent, _ = encode(tree, [], True, "bfloat16")
    return DeviceAxis(world).decoded_sum(sent, None)


def ways(world: int, megabytes: float) -> dict[str, Callable]:
    buckets = max(1, round(megabytes / 25))
    return {
        "ours": lambda tree: packed_psum(tree, AXIS),
        "ours, bfloat16 on the wire": lambda tree: bfloat16_sum(tree, world),
        "one flat buffer": lambda tree: flat(tree, 1),
        f"{buckets} flat buckets": lambda tree: flat(tree, buckets),
    }


class Timed:
    """A mapped function that donates its argument; a call runs it once and times it."""

    def __init__(self, fn: Callable, shapes, devices):
        self._fn = jax.pmap(fn, axis_name=AXIS, devices=devices, donate_argnums=0)
        rng = np.random.default_rng(0)
        tree = [rng.standard_normal(shape, np.float32) * 1e-3 for shape in shapes]
        self._tree = elche.replicate(tree, devices)
        self()

    def __call__(self) -> float:
        """Return the milliseconds of one call."""
        begun = time.perf_counter()
        self._tree = jax.block_until_ready(self._fn(self._tree))
        return 1e3 * (time.perf_counter() - begun)


def measure(megabytes: float, world: int, repeats: int) -> list[Result]:
    devices, results = jax.devices()[:world], []
    numbers = int(megabytes * MIB) // 4
    for trees in (one_array, transformer, many_equal):
        shapes = trees(numbers)
        plain = {
            "plain": Timed(lambda tree: jax.lax.psum(tree, AXIS), one_array(numbers), devices),
            "plain, the tree": Timed(lambda tree: jax.lax.psum(tree, AXIS), shapes, devices),
        }
        timed = {name: Timed(fn, shapes, devices) for name, fn in ways(world, megabytes).items()}
        found = interleave({**plain, **timed}, repeats)
        name = f"{trees.__name__} ({len(shapes)})"
        results.append(result(name[:4], f"{name}: plain psum, one array", found["plain"], "ms"))
        for way in ("plain, the tree", *timed):
            bounds = {"most": 1.0} if way == "ours" and trees is transformer else {}
            share = ratios(found[way], found["plain"])
            results.append(result(name[:4], f"{name}: {way}", share, **bounds))
        share = ratios(found["ours"], found["plain, the tree"])
        results.append(result(name[:4], f"{name}: ours over plain, the tree", share, most=1.05))
    return results


def main() -> None:
    parser = options_of(__doc__, "benchmarks/out/exchange.json", 9)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--devices", type=int, default=4)
    args = parser.parse_args()
    show(measure(args.megabytes, args.devices, args.repeats), args.out)


if __name__ == "__main__":
    main()
