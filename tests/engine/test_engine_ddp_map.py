"""Functions of one's own over the devices of a `DDP`, of one kind and of several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import elche_jax as elche

CPUS = jax.devices("cpu")


@pytest.fixture(params=["one kind", "1+1", "2+1"])
def ddp(request):
    if request.param == "one kind":
        return elche.DDP(CPUS[:3])
    twins = request.getfixturevalue("twins")
    return elche.DDP([CPUS[0], twins[0], *([CPUS[1]] if request.param == "2+1" else [])])


def on_their_devices(ddp, leaf):
    return [leaf.addressable_data(d).devices() for d in range(ddp.world_size)] == [
        {device} for device in ddp.devices
    ]


def test_every_device_computes_its_own(ddp):
    size = ddp.world_size
    fn = ddp.map(lambda p, x, rank: {"y": p["w"] * x + rank, "none": None, "one": 1})
    x = np.arange(2.0 * size, dtype="float32").reshape(size, 2)
    out = fn(ddp.replicate({"w": np.float32(3)}), x, np.arange(size))
    np.testing.assert_array_equal(out["y"], 3 * x + np.arange(size)[:, None])
    assert out["none"] is None and np.asarray(out["one"]).tolist() == [1] * size
    assert on_their_devices(ddp, out["y"])
    again = fn({"w": out["y"]}, out["y"], np.arange(size))  # its own results are arguments
    np.testing.assert_allclose(again["y"], (3 * x + np.arange(size)[:, None]) ** 2
                               + np.arange(size)[:, None])  # fmt: skip


def test_arguments_may_be_on_the_host_or_on_any_device(ddp):
    size = ddp.world_size
    fn = ddp.map(lambda key, x: (jax.random.normal(key), x + 1))
    keys = jax.random.split(jax.random.key(0), size)
    for x in (np.arange(size), jnp.arange(size)):
        drawn, more = fn(keys, x)
        want = [float(jax.random.normal(key)) for key in keys]
        np.testing.assert_allclose(drawn, want, rtol=1e-5)
        assert np.asarray(more).tolist() == list(range(1, size + 1))
        assert on_their_devices(ddp, drawn) and on_their_devices(ddp, more)
    # those of the host alone do not run on JAX's default device
    assert on_their_devices(ddp, ddp.map(lambda x: x + 1)(np.arange(size)))


def test_donated_arguments_are_given_up(ddp):
    fn = ddp.map(lambda x, y: x + y, donate_argnums=[0])
    x, y = (ddp.replicate(np.full(4, value, "float32")) for value in (1, 2))
    out = fn(x, y)
    assert np.asarray(out).tolist() == [[3.0] * 4] * ddp.world_size
    assert x.is_deleted() and not y.is_deleted()


def test_what_was_given_up_is_refused_by_all(ddp):
    """To a program of JAX's that has run before it would be the end of the process."""
    there = ddp.replicate({"w": np.ones(2, "float32")})
    doubled = ddp.map(lambda tree: jax.tree.map(lambda x: 2 * x, tree))
    calls = {
        "map": doubled, "all_reduce_gradients": ddp.all_reduce_gradients,
        "weighted_all_reduce_gradients": lambda tree: ddp.weighted_all_reduce_gradients(
            tree, [1] * ddp.world_size
        ),
        "sync_params": ddp.sync_params,
    }  # fmt: skip
    for call in calls.values():
        call(there)
    gone = ddp.replicate({"w": np.ones(2, "float32")})
    ddp.map(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(gone)
    for name, call in calls.items():
        with pytest.raises(
            ValueError,
            match=rf"^DDP\.{name}: every leaf must still be there, but the buffer of leaf .*\['w'\]"
            r" was donated to an earlier call\. Use what that call returned, or pass it a copy",
        ):
            call(gone)


def test_what_may_be_reused_is_passed_once(ddp):
    both = ddp.map(lambda x, y: (x + y["a"], x - y["a"]), donate_argnums=[0, 1])
    x = ddp.replicate(np.float32(2))
    with pytest.raises(
        ValueError,
        match=r"^DDP\.map: every leaf of donate_argnums must be an array of its own, got leaf "
        r"\[0\], which is passed twice\. Copy it: leaf\.copy\(\)\.$",
    ):
        both(x, {"a": x})
    host = np.full(ddp.world_size, 3, "float32")  # is copied to the devices
    for own, want in ((host, [6, 0]), (x, [5, -1])):
        assert [int(out[0]) for out in both(own, {"a": host})] == want


def test_what_may_be_reused_is_passed(ddp):
    double = ddp.map(lambda x: 2 * x, donate_argnums=[0, 1])
    with pytest.raises(
        ValueError,
        match=r"^DDP\.map: donate_argnums must be positions of fn's arguments, of which 1 were "
        r"passed, got \(0, 1\)\.$",
    ):
        double(ddp.replicate(np.float32(2)))


def test_means_under_a_guard_against_implicit_transfers(ddp):
    ones = np.ones((ddp.world_size, 3), "f")
    counts, grads = range(1, ddp.world_size + 1), ddp.replicate({"w": ones[0]})
    with jax.transfer_guard_host_to_device("disallow"):
        means = ddp.all_reduce_gradients(grads), ddp.weighted_all_reduce_gradients(grads, counts)
    for mean in means:
        np.testing.assert_array_equal(np.asarray(mean["w"]), ones)


def test_devices_of_one_kind_share_an_axis():
    ddp = elche.DDP(CPUS[:3])
    out = ddp.map(lambda x: jax.lax.psum(x, ddp.axis_name))(np.arange(3.0))
    assert out.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "fn", [lambda x: jax.lax.psum(x, "devices"), lambda x: x * jax.lax.axis_index("devices")]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_devices_of_several_kinds_share_none(fn, ranks, twins):
    """Not even those of a lane that has several."""
    ddp = elche.DDP([*CPUS[:ranks], twins[0]])
    message = (
        r"DDP\.map: fn: must use no named axis, as devices of several kinds have none in common, "
        r"got 'devices'\. Exchange outside of it, with DDP\.weighted_all_reduce_gradients, and pass"
    )
    with pytest.raises(ValueError, match=message):
        ddp.map(fn)(np.ones(ddp.world_size, "float32"))


def test_what_the_function_raises_is_raised(ddp):
    def fails(x):
        return undefined + x  # noqa: F821  # pyright: ignore

    with pytest.raises(NameError, match="undefined"):
        ddp.map(fails)(np.ones(ddp.world_size))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda ddp: ddp.map(3), TypeError, r"DDP\.map: fn must be a function, got a int"),
        (
            lambda ddp: ddp.map(abs, donate_argnums=-1), ValueError,
            r"DDP\.map: donate_argnums\[0\] must be at least 0, got -1",
        ),
        (
            lambda ddp: ddp.map(abs, donate_argnums="x"), TypeError,
            r"DDP\.map: donate_argnums must be a sequence of integers, got 'x'",
        ),
        (
            lambda ddp: ddp.map(lambda: 1)(), ValueError,
            r"DDP\.map: the mapped function must get at least one array, got none",
        ),
        (
            lambda ddp: ddp.map(lambda x: x)((1, 2)), ValueError,
            r"DDP\.map: every leaf must be stacked, with one entry per device \(\d\), but "
            r"leaf \[0\]\[0\] is a int\. Make it with replicate, or as an np\.array of one per",
        ),
        (
            lambda ddp: ddp.map(lambda x: x)(np.ones(7)), ValueError,
            r"DDP\.map: every leaf must be stacked, .* leaf \[0\] is an array of shape \(7,\)",
        ),
    ],
)  # fmt: skip
def test_errors(ddp, call, error, message):
    with pytest.raises(error, match=message):
        call(ddp)
