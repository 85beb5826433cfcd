"""Training on devices of two clients in one process, against one device and NumPy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from marks import slow
from models import Script, assert_close, host

import elche_jax as elche
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.laned import LanedArray, LeadArray

BATCH = 4
COUNTS = [(2, 3, 1), (1, 1, 1), (0, 4, 2), (3, 0, 1), (2, 1, 2)]
SIZE = BATCH * sum(map(sum, COUNTS))
SPOILED = {0: 1, 1: 2, 2: 3}
"""For each rank a window in which it works."""


def data(size=SIZE):
    x = np.random.default_rng(0).normal(size=(size, 4)).astype("float32")
    return {"x": x, "y": np.sin(x).sum(axis=1)}


def weights(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32") * 0.3


PARAMS = {"a": weights(4, 5), "b": weights(5)}


def loss_fn(params, batch, rng):
    """Per-example losses, with dropout."""
    hidden = jnp.tanh(batch["x"] @ params["a"]) * jax.random.bernoulli(rng, 0.8, (5,))
    error = hidden @ params["b"] - batch["y"]
    return error**2, {"off": jnp.abs(error)}


def plain_loss(params, batch, rng):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


ADAM = optax.adam(1e-2)
PLATEAU = optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
"""It asks for the loss."""


def build(devices, counts, loss, tx, **options):
    return elche.build_train_step(
        loss, tx, devices=devices, cadence=elche.Replay(counts),
        has_aux=loss is loss_fn, **options,
    )  # fmt: skip


shared = cache(build)


def run(
    devices, counts=COUNTS, *, again=False, loss=loss_fn, tx=ADAM, params=PARAMS, model_state=None,
    rows=None, placement="stream", shuffle=True, each=None, **options,
):  # fmt: skip
    """Trains one window per row of counts; gives state, metrics and the training step.

    That step is made for this run, or with `again` once for all runs with the same options.
    """
    train = (shared if again else build)(tuple(devices), tuple(counts), loss, tx, **options)
    state, said = train.init(params, model_state=model_state, rng=3), []
    windows = train.windows(
        rows or data(), BATCH, seed=2, epochs=1, placement=placement, shuffle=shuffle
    )
    with windows:
        for window in windows:
            assert window.counts == tuple(counts[window.index])
            state, metrics = train(state, window)
            said.append(jax.device_get(metrics))
            if each is not None:
                state = each(window, state) or state
    assert len(said) == len(counts)
    return state, said, train


@cache
def reference():
    """The same microbatches on one device, for all orders of the devices and both placements."""
    return one_device(again=True)


def one_device(**options):
    """The same microbatches on one device."""
    return run(jax.devices("cpu")[:1], [(sum(row),) for row in COUNTS], **options)


def assert_trained(got, want, rtol=1e-5, atol=1e-6):
    """The state of several devices is that of one, on each of them."""
    state, said, _ = got
    other, others, _ = want
    elche.check_replicas(state)
    assert_close(host(state), host(other), rtol, atol)
    for metrics, expected in zip(said, others, strict=True):
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=atol, err_msg=name)


def all_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# -- plain training


ORDERS = [
    ((0, 1, 2), "stream"),
    ((0, 1, 2), "resident"),
    slow((1, 2, 0), "resident"),
    slow((1, 0, 2), "stream"),
    slow((0, 2, 1), "resident"),
    slow((2, 0, 1), "stream"),
]


@pytest.mark.parametrize(("order", "placement"), ORDERS)
def test_two_kinds_train_as_one_device(order, placement, mixed):
    got = run([mixed[at] for at in order], again=True, placement=placement)
    assert_trained(got, reference())
    moved = np.abs(host(got[0].params)["a"] - PARAMS["a"]).max()
    assert moved > 1e-2, "the tolerance must be small beside what training moves"


LATE = elche.MeanGradient(delay=1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
IDLE = [*COUNTS, (0, 3, 0)]
"""Last a window in which the lane that leads has no work."""


@pytest.mark.parametrize("averaging", [slow(None), LATE])
def test_a_window_of_several_calls_is_the_same(averaging, mixed):
    train = shared(tuple(mixed), tuple(IDLE), plain_loss, MOMENTUM, averaging=averaging)
    ends = []
    for window_bytes, most in ((2**28, 1), (BATCH * 5 * 4, 4)):
        state, calls = train.init(PARAMS), []
        with train.windows(
            data(SIZE + 3 * BATCH),
            BATCH,
            placement="stream",
            window_bytes=window_bytes,
            shuffle=False,
        ) as windows:
            for window in windows:
                calls.append(len(window.calls))
                state, _ = train(state, window)
        assert max(calls) == most
        ends.append(host(state.params))
    assert_close(*ends, rtol=1e-6)


@pytest.mark.slow  # test_each_kind_has_its_own_parts has such a microbatch
def test_microbatches_that_are_not_full_count_with_their_examples(mixed):
    """The last one has two examples of four."""
    rows = jax.tree.map(lambda leaf: leaf[:-2], data())
    ends = []
    for devices, counts in ((mixed, COUNTS), (mixed[:1], [(sum(row),) for row in COUNTS])):
        train = elche.build_train_step(
            loss_fn, optax.sgd(0.1), devices=devices, cadence=elche.Replay(counts), has_aux=True
        )
        state = train.init(PARAMS, rng=3)
        with train.windows(rows, BATCH, drop_last=False, shuffle=False) as windows:
            for window in windows:
                state, metrics = train(state, window)
        assert int(state.examples[1 if len(devices) > 1 else 0]) == len(rows["y"])
        ends.append((host(state.params), float(metrics["loss"])))
    assert_close(*ends, rtol=1e-5)


@pytest.mark.slow  # test_frozen_parameters_stay_where_they_are has such an optimizer
def test_the_optimizer_sees_the_loss(mixed):
    """What `update` gets beside gradients is the same, too."""
    assert_trained(run(mixed, tx=PLATEAU), one_device(tx=PLATEAU))


# -- what a state consists of


def test_the_lead_alone_has_the_optimizers_state(mixed):
    state, _, train = run(mixed, again=True)
    fresh = train.init(PARAMS, rng=3)
    for kept in (state, fresh):
        held = jax.tree.leaves(kept.opt_state)
        others = jax.tree.leaves(kept.replace(opt_state=None))
        assert all(isinstance(leaf, LanedArray) for leaf in others)
        assert all(leaf.devices() == set(mixed) for leaf in others)
        assert all(leaf.shape[0] == 3 for leaf in (*held, *others))
    held = jax.tree.leaves(state.opt_state)
    assert all(isinstance(leaf, LeadArray) for leaf in held)
    assert all(leaf.devices() == {train.fleet.lead.devices[0]} for leaf in held)


@pytest.mark.slow  # test_every_rule_over_lanes has rules whose devices keep their own
def test_local_optimizers_are_the_devices_own(mixed):
    averaging = elche.ParameterAveraging(optimizer_state="keep")
    state, _, train = run(mixed, averaging=averaging)
    assert all(leaf.devices() == set(mixed) for leaf in jax.tree.leaves(state))
    moments = np.asarray(state.opt_state[0].mu["a"])
    assert not any((moments[i] == moments[j]).all() for i, j in ((0, 1), (0, 2), (1, 2)))
    elche.check_replicas(train.common(state))


# -- options


def norm_loss(params, model_state, batch, rng):
    """Statistics of the data, whatever the parameters."""
    x, old = batch["x"], model_state
    new = {
        "norm": {
            "mean": 0.9 * old["norm"]["mean"] + 0.1 * x.mean(axis=0),
            "var": 0.9 * old["norm"]["var"] + 0.1 * x.var(axis=0),
        },
        "slow": 0.5 * old["slow"] + 0.5 * x.mean(),
        "peak": jnp.maximum(old["peak"], x.max()),
        "last": x[0, 0],
        "seen": old["seen"] + 1,
    }
    return (x @ params["a"] @ params["b"] - batch["y"]) ** 2, new


STATISTICS = {
    "norm": {"mean": np.zeros(4, "float32"), "var": np.ones(4, "float32")},
    "slow": np.float32(0),
    "peak": np.float32(-np.inf),
    "last": np.float32(0),
    "seen": np.int32(0),
}
MERGE = {
    "norm": {"mean": "pooled", "var": "pooled"},
    "slow": "mean", "peak": "max", "last": "first", "seen": "max",
}  # fmt: skip


def statistics_by_numpy(counts):
    """The merged model state after every window, float64."""
    x, at = data()["x"].astype(np.float64), 0
    now = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), STATISTICS)
    for row in counts:
        ends = []
        for count in row:
            own = now
            for _ in range(count):
                part = x[at * BATCH : (at + 1) * BATCH]
                at += 1
                own = {
                    "norm": {
                        "mean": 0.9 * own["norm"]["mean"] + 0.1 * part.mean(axis=0),
                        "var": 0.9 * own["norm"]["var"] + 0.1 * part.var(axis=0),
                    },
                    "slow": 0.5 * own["slow"] + 0.5 * part.mean(),
                    "peak": max(own["peak"], part.max()),
                    "last": part[0, 0],
                    "seen": own["seen"] + 1,
                }
            ends.append(own)
        worked = [(end, count) for end, count in zip(ends, row, strict=True) if count]
        ends, share = [end for end, _ in worked], [count for _, count in worked]

        def mean(of, ends=ends, share=share):
            return np.average([of(end) for end in ends], axis=0, weights=share)

        center = mean(lambda end: end["norm"]["mean"])
        now = {
            "norm": {
                "mean": center,
                "var": mean(
                    lambda end, c=center: end["norm"]["var"] + (end["norm"]["mean"] - c) ** 2
                ),
            },
            "slow": mean(lambda end: end["slow"]),
            "peak": max(end["peak"] for end in ends),
            "last": ends[0]["last"],
            "seen": max(end["seen"] for end in ends),
        }
    return now


@pytest.mark.parametrize("order", [(1, 0, 2), slow((0, 1, 2))])
def test_model_state_is_merged_by_its_rules(order, mixed):
    state, _, _ = run(
        [mixed[at] for at in order], loss=norm_loss, model_state=STATISTICS, merge=MERGE,
        shuffle=False,
    )  # fmt: skip
    elche.check_replicas(state)
    assert_close(host(state.model_state), statistics_by_numpy(COUNTS), rtol=1e-5, atol=1e-6)


def spoiled(rank, value):
    """Data with one wrong microbatch on a device, and the window of it."""
    window = SPOILED[rank]
    number = sum(map(sum, COUNTS[:window])) + sum(COUNTS[window][:rank])
    rows = data()
    rows["x"][number * BATCH + 1] = value
    return rows, window


def trained(path, leaf):
    return "kept" not in path


KEPT = {
    "params": PARAMS | {"kept": weights(3)}, "trainable": trained, "nonfinite": "skip",
    "verify_every": 1, "again": True,
}  # fmt: skip
"""With a parameter that stays as it is, and every window verified."""


@pytest.mark.parametrize("rank", [slow(0), 1, slow(2)])
@pytest.mark.parametrize("averaging", [None, slow(LATE)])
def test_a_window_that_is_not_finite_changes_no_device(rank, averaging, mixed):
    rows, bad = spoiled(rank, np.nan)
    seen, late = [None], 0 if averaging is None else 1

    def each(window, state):
        seen.append((all_bytes(state.params), all_bytes(state.opt_state)))
        elche.check_replicas(state.params)

    _, said, train = run(
        mixed, rows=rows, each=each, shuffle=False, averaging=averaging, **KEPT
    )  # fmt: skip
    finite = [bool(metrics["finite"]) for metrics in said]
    assert finite == [window != bad + late for window in range(len(COUNTS))]
    assert seen[bad + late + 1] == seen[bad + late] and train.skipped == 1
    assert all(seen[at + 1] != seen[at] for at, good in enumerate(finite) if good and at > late)


@pytest.mark.parametrize("rank", [slow(0), slow(1), 2])
def test_the_error_names_window_and_device(rank, mixed):
    rows, bad = spoiled(rank, np.nan)
    with pytest.raises(elche.NonFiniteError) as caught:
        run(mixed, again=True, rows=rows, shuffle=False)
    assert caught.value.window == bad and list(caught.value.microbatches) == [rank]


def test_a_dynamic_scale_is_lowered_on_all_devices(mixed):
    """A gradient times 2**100 is too large for float32 in one window."""
    rows, bad = spoiled(1, 1e20)
    scale, scales, before = DynamicScale(scale=jnp.float32(2.0**100), growth_interval=2), [], []

    def linear(params, batch, rng):
        return batch["x"] @ params["a"] @ params["b"]

    def each(window, state):
        before.append(all_bytes(state.params))
        scales.append(np.asarray(state.loss_scale.scale).tolist())

    state, said, train = run(
        mixed, loss=linear, rows=rows, each=each, shuffle=False, loss_scale=scale,
        tx=optax.sgd(0.1),
    )  # fmt: skip
    want, power, good = [], 100, 0
    for window in range(len(COUNTS)):
        if window == bad:
            power, good = power - 1, 0
        else:  # it grows with the third good window
            power, good = (power + 1, 0) if good == 2 else (power, good + 1)
        want.append([2.0**power] * 3)
    assert scales == want and train.skipped == 1
    assert before[bad] == before[bad - 1] and before[bad + 1] != before[bad]
    assert [bool(metrics["finite"]) for metrics in said].index(False) == bad
    elche.check_replicas(state)


def test_frozen_parameters_stay_where_they_are(mixed):
    """The very arrays, and nothing of them is exchanged; the optimizer sees the loss, too."""
    params = PARAMS | {"ids": np.array([4, 2, 0, 1, 3]), "shift": weights(5)}

    def loss(p, batch, rng):
        hidden = (jnp.tanh(batch["x"] @ p["a"]) + p["shift"])[:, p["ids"]]
        return (hidden @ p["b"] - batch["y"]) ** 2

    options = {
        "loss": loss, "params": params, "shuffle": False, "tx": PLATEAU,
        "trainable": {"a": True, "b": True, "ids": False, "shift": False},
    }  # fmt: skip
    arrays = []

    def each(window, state):
        arrays.append([state.params[name].arrays for name in ("ids", "shift")])

    got = run(mixed, each=each, **options)
    assert_trained(got, one_device(**options))
    assert host(got[0].opt_state)[1].scale < 1, "it has seen that the loss did not fall"
    for kept in arrays[1:]:
        for now, first in zip(kept, arrays[0], strict=True):
            assert all(x is y for x, y in zip(now, first, strict=True))
    for name in ("ids", "shift"):
        rows = np.asarray(got[0].params[name])
        assert all(row.tobytes() == params[name].astype(rows.dtype).tobytes() for row in rows)
    sent, saved = got[2].report().exchange_bytes, got[2].report().frozen_bytes
    trained = 4 * (PARAMS["a"].size + PARAMS["b"].size)
    assert trained <= sent < trained + 64 and saved == 4 * 10


def test_each_device_clips_its_mean_gradient(mixed):
    def loss(params, batch, rng):
        return jnp.mean(batch["x"] @ params["w"])

    limit, rate, w, at = 0.8, 0.5, np.zeros(4), 0
    x, clipped = data()["x"].astype(np.float64), 0
    for row in COUNTS:
        total = np.zeros(4)
        for count in row:
            if count:
                own = x[at * BATCH : (at + count) * BATCH].mean(axis=0)
                norm = np.linalg.norm(own)
                clipped += norm > limit
                total += count * own * min(1.0, limit / norm)
                at += count
        w = w - rate * total / sum(row)
    worked = sum(count > 0 for row in COUNTS for count in row)
    assert 2 < clipped < worked - 2
    state, _, _ = run(
        mixed, loss=loss, tx=optax.sgd(rate), params={"w": np.zeros(4, "float32")},
        max_grad_norm=limit, shuffle=False,
    )  # fmt: skip
    elche.check_replicas(state)
    np.testing.assert_allclose(host(state.params)["w"], w, rtol=1e-5, atol=1e-7)


@pytest.mark.slow  # test_train_numerics and test_every_rule_over_lanes have 16 bits
def test_bfloat16(mixed):
    """Kinds round differently within a microbatch, but replicas are alike."""
    options = {"compute_dtype": "bfloat16", "tx": optax.sgd(0.1)}
    got, want = run(mixed, **options), one_device(**options)
    assert_trained(got, want, rtol=1e-2, atol=1e-3)
    assert host(got[0].params)["a"].dtype == np.float32
    exact = one_device(tx=optax.sgd(0.1))
    assert not np.array_equal(host(exact[0].params)["a"], host(got[0].params)["a"])


@pytest.mark.slow  # test_contract_exact_mean has a key there; lanes only hand it on
def test_keys_in_an_optimizer(mixed):
    tx = optax.chain(optax.sgd(0.1), optax.add_noise(1e-2, 0.5, jax.random.key(5)))
    got, want = run(mixed, tx=tx), one_device(tx=tx)
    keys = [jax.random.key_data(elche.unreplicate(s[0].opt_state[1].rng_key)) for s in (got, want)]
    np.testing.assert_array_equal(*keys)
    assert isinstance(got[0].opt_state[1].rng_key, LeadArray)
    assert_close(host(got[0].params), host(want[0].params), rtol=1e-5, atol=1e-6)
    still = one_device(tx=optax.sgd(0.1))
    assert np.abs(host(still[0].params)["a"] - host(got[0].params)["a"]).max() > 1e-3


# -- replicas


def changed(leaf, rank):
    """A leaf with one element of one device's copy one bit off."""
    rows = [np.array(shard.data) for shard in leaf.addressable_shards]
    rows[rank].reshape(-1).view(np.uint8)[0] ^= 1
    parts = [
        [jax.device_put(rows[r], leaf.addressable_shards[r].device) for r in ranks]
        for ranks in leaf.ranks
    ]
    parts = [lanes_of([next(iter(s.devices())) for s in p]).stack(p) for p in parts]
    return LanedArray(parts, leaf.ranks)


@pytest.mark.parametrize("rank", [1, slow(2)])
def test_one_element_that_differs_is_found(rank, mixed):
    state, _, _ = run(mixed, again=True)
    elche.check_replicas(state)
    other = state.replace(params=state.params | {"b": changed(state.params["b"], rank)})
    with pytest.raises(
        elche.ReplicaMismatch,
        match=rf"^check_replicas: all replicas must be bitwise equal, but leaf \.params\['b'\] on "
        rf"{mixed[rank]} differs from {mixed[0]} in 1 of 5 elements\.$",
    ):
        elche.check_replicas(other)


@pytest.mark.slow  # without one: test_every_window_is_verified
def test_every_window_is_verified_with_one_pending(mixed):
    run(mixed, verify_every=1, averaging=LATE)


def test_every_window_is_verified(mixed):
    def each(window, state):
        if window.index == 1:
            kept = changed(state.params["kept"], 1)
            return state.replace(params=state.params | {"kept": kept})

    with pytest.raises(
        elche.ReplicaMismatch,
        match=rf"^train: after window [23]: all replicas must be bitwise equal, but leaf "
        rf"\.params\['kept'\] on {mixed[1]} differs from {mixed[0]}\.$",
    ):
        run(mixed, each=each, averaging=None, **KEPT)


def test_parameters_that_differ_are_the_leads_again(mixed):
    """Every window replaces what it trains by what the lead has computed."""

    def each(window, state):
        if window.index == 1:
            return state.replace(params=state.params | {"b": changed(state.params["b"], 1)})

    state, _, _ = run(mixed, again=True, each=each)
    elche.check_replicas(state)


# -- counts


@pytest.mark.parametrize("averaging", [None, slow(LATE)])
def test_no_compile_while_counts_change(averaging, mixed):
    rng = np.random.default_rng(0)
    rows = [(9, 9, 9)] + [tuple(int(c) for c in rng.integers(0, 9, 3)) for _ in range(51)]
    rows[20:23] = [(0, 5, 0), (0, 3, 0), (4, 0, 4)]  # the other lane leads
    assert len(set(rows)) > 45 and all(map(any, rows))
    train = elche.build_train_step(
        plain_loss, optax.adam(1e-3), devices=mixed, cadence=Script(rows), averaging=averaging
    )
    state, compiles = train.init(PARAMS), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
    )
    try:
        with train.windows(data(2048), 1, epochs=None) as windows:
            for number, window in enumerate(windows):
                state, metrics = train(state, window)
                if number == 1:
                    jax.block_until_ready((state, metrics))
                    train._cache.wait()  # what another lane needs to lead is compiled meanwhile
                    misses = train._cache.stats.misses
                    assert compiles and misses
                    compiles.clear()
                if number == 51:
                    break
            jax.block_until_ready((state, metrics))
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiles == [] and train.report().compile_misses == misses
    assert train.counts_history[: len(rows)] == rows


def test_the_default_is_elche_with_two_kinds(mixed, twins):
    def cadence(devices, **options):
        return elche.build_train_step(plain_loss, optax.sgd(0.1), devices=devices, **options)

    for devices in (mixed, mixed[:2]):
        train = cadence(devices)
        assert isinstance(train._scheduler.cadence, elche.ElChe)
        assert isinstance(train.cadence_state.cadence, type(elche.ElChe().init(2)))
    for devices in (jax.devices("cpu")[:3], twins[:2]):
        assert isinstance(cadence(devices)._scheduler.cadence, elche.EveryBatch)
    # lanes of one kind are no kinds
    assert isinstance(
        cadence(jax.devices("cpu")[:3], lanes=((0, 2), (1,)))._scheduler.cadence, elche.EveryBatch
    )


SPEEDS = {"cpu": 1, "twin": 3}


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (lambda hint: {"cadence": elche.ElChe(anchor=4, speed_hint=hint)}, (4, 12, 4)),
        (lambda hint: {"cadence": elche.Balanced(10, speed_hint=hint)}, (2, 6, 2)),
        (lambda hint: {"config": elche.DDPConfig(anchor=4, speed_hint=hint)}, (4, 12, 4)),
    ],
)  # fmt: skip
def test_a_hint_by_kind(options, counts, mixed):
    for hint in (SPEEDS, [1, 3, 1]):
        train = elche.build_train_step(plain_loss, optax.sgd(0.1), devices=mixed, **options(hint))
        assert train.counts == counts


def test_a_hint_by_kind_holds_from_the_first_window_on(mixed):
    cadence = elche.ElChe(anchor=4, speed_hint=SPEEDS)
    train = elche.build_train_step(plain_loss, optax.sgd(0.1), devices=mixed, cadence=cadence)
    train.init(PARAMS)
    with train.windows(data(), 1) as windows:
        assert next(windows).counts == (4, 12, 4)


@pytest.mark.slow  # test_speeds_are_those_of_the_same_kinds takes one up
def test_a_cadence_state_is_taken_up(mixed):
    def build(**hint):
        return elche.build_train_step(
            plain_loss, optax.sgd(0.1), devices=mixed, cadence=elche.ElChe(anchor=2, **hint)
        )

    train = build(speed_hint=SPEEDS)
    state = train.init(PARAMS)
    for window in train.windows(data(400), BATCH):
        state, _ = train(state, window)
    assert len(train.records) > 3 and all(rate > 0 for rate in train.throughput)
    again = build(speed_hint=SPEEDS)
    again.cadence_state = train.cadence_state.to_dict()
    assert again.counts == train.counts and again.cadence_state == train.cadence_state
