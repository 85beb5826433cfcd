"""Stacked arrays over several lanes, what moves them, and collectives by hand over them."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.engine.devices import device_summary, fleet_of, names_of, summary_of
from elche_jax.engine.lane import Lane, Lanes, kinds_of, lanes_of
from elche_jax.engine.laned import LanedArray, LateArray, LeadArray

ROWS = np.random.default_rng(0).normal(size=(3, 2, 4)).astype("float32")
ROWS[0, 0, 0], ROWS[1, 0, 0] = -0.0, np.nan


@pytest.fixture
def lanes(mixed):
    return lanes_of(mixed)


def made(kind, lanes):
    """An array of a kind, and what it must be like."""
    if kind is LanedArray:
        return lanes.put(ROWS), ROWS
    row = jax.device_put(ROWS[1:2], lanes.devices[1])
    return LeadArray(row, 3), np.repeat(ROWS[1:2], 3, axis=0)


kinds = pytest.mark.parametrize("kind", [LanedArray, LeadArray])


# -- the arrays


@kinds
def test_shape_and_type(kind, lanes):
    array, want = made(kind, lanes)
    assert (array.shape, array.dtype, array.ndim) == (want.shape, want.dtype, want.ndim)
    assert (array.size, array.nbytes, len(array)) == (want.size, want.nbytes, 3)
    assert array.is_fully_replicated is False
    assert repr(array) == f"{kind.__name__}(shape=(3, 2, 4), dtype=float32)"


@kinds
def test_values_on_the_host(kind, lanes):
    array, want = made(kind, lanes)
    assert np.asarray(array).tobytes() == want.tobytes()
    assert np.asarray(array).dtype == want.dtype
    assert np.array(array, dtype="float64").dtype == np.float64
    np.testing.assert_array_equal(np.array(array, dtype="float64"), want.astype("float64"))
    assert str(array.tolist()) == str(want.tolist())
    with pytest.raises(
        ValueError,
        match=r"^an array over several devices can only be copied to the host\.$",
    ):
        np.array(array, copy=False)


@kinds
def test_indexing(kind, lanes):
    array, want = made(kind, lanes)
    for rank in (0, 1, 2, -1, -3, np.int64(2)):
        row = array[rank]
        assert isinstance(row, jax.Array) and row.shape == (2, 4)
        assert np.asarray(row).tobytes() == want[rank].tobytes()
    for index in (
        slice(1, 3),
        (0, 1),
        (slice(None), 0),
        ...,
        [2, 0],
        np.array([True, False, True]),
    ):
        np.testing.assert_array_equal(array[index], want[index])
    for rank in (3, -4):
        with pytest.raises(IndexError):
            array[rank]
    assert [np.asarray(row).tobytes() for row in array] == [row.tobytes() for row in want]


def test_an_entry_is_on_its_device(lanes, mixed):
    array = lanes.put(ROWS)
    assert [next(iter(array[rank].devices())) for rank in range(3)] == mixed
    assert [shard.device for shard in array.addressable_shards] == mixed
    assert array.devices() == set(mixed)
    for rank, shard in enumerate(array.addressable_shards):
        assert np.asarray(shard.data).tobytes() == ROWS[rank : rank + 1].tobytes()
        assert ROWS[shard.index].tobytes() == ROWS[rank : rank + 1].tobytes()
    with pytest.raises(IndexError, match=r"^rank 3 is not one of 3$"):
        array.addressable_data(3)


def test_the_lead_has_the_only_entry(lanes, mixed):
    array, _ = made(LeadArray, lanes)
    assert array.devices() == {mixed[1]} and len(array.arrays) == 1
    assert all(array.addressable_data(rank) is array.row for rank in range(3))


@kinds
def test_functions_of_pytrees_take_them(kind, lanes):
    array, want = made(kind, lanes)
    tree = {"w": array, "n": None}
    assert jax.tree.leaves(tree) == [array]
    assert jax.tree.map(lambda leaf: leaf.shape, tree) == {"w": (3, 2, 4), "n": None}
    got = jax.device_get(tree)["w"]
    assert isinstance(got, np.ndarray) and got.tobytes() == want.tobytes()
    assert jax.block_until_ready(tree)["w"] is array and array.is_ready()
    shape = jax.eval_shape(lambda tree: tree["w"].sum(axis=0), tree)
    assert (shape.shape, shape.dtype) == ((2, 4), np.float32)
    assert np.shape(array) == (3, 2, 4)


@kinds
def test_a_program_rejects_them(kind, lanes):
    array, _ = made(kind, lanes)
    for use in (
        jnp.sum,
        jax.jit(lambda leaf: leaf),
        lambda leaf: leaf + 1,
        lambda leaf: jnp.add(leaf, 1),
        jax.grad(jnp.sum),
    ):
        with pytest.raises(TypeError):
            use(array)


@kinds
def test_a_copy_is_its_own(kind, lanes):
    array, want = made(kind, lanes)
    copy = array.copy()
    assert type(copy) is kind and not array.is_deleted()
    assert copy.devices() == array.devices()
    array.delete()
    assert array.is_deleted() and not copy.is_deleted()
    assert np.asarray(copy).tobytes() == want.tobytes()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(array)


def test_a_part_that_is_gone_is_gone(lanes):
    array = lanes.put(ROWS)
    array.parts[1].delete()
    assert array.is_deleted()


@kinds
def test_map_keeps_the_kind(kind, lanes):
    array, want = made(kind, lanes)
    twice = array.map(lambda part: 2 * part)
    assert type(twice) is kind and twice.devices() == array.devices()
    np.testing.assert_array_equal(twice, 2 * want)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "uint32"])
def test_any_dtype(dtype, lanes):
    rows = (np.arange(6).reshape(3, 2) % 2).astype(jnp.dtype(dtype))
    array = lanes.put(rows)
    assert array.dtype == rows.dtype and np.asarray(array).tobytes() == rows.tobytes()


# -- lanes


def test_lanes_are_clients(mixed, twins):
    cpus = jax.devices("cpu")
    lanes = lanes_of(mixed)
    assert isinstance(lanes, Lanes) and lanes.world_size == 3 and not lanes.alone
    assert lanes.lanes == (Lane((cpus[0], cpus[1]), (0, 2)), Lane((twins[0],), (1,)))
    assert lanes.ranks == ((0, 2), (1,)) and lanes.in_lanes() == lanes.lanes
    assert lanes.lead is lanes.lanes[0]
    assert lanes_of(twins[:2]) == Lane(tuple(twins[:2]), (0, 1))
    assert lanes_of(cpus[:3], ["a", "b", "a"]).ranks == ((0, 2), (1,))
    # a name cannot put kinds together
    assert lanes_of(mixed, ["a"] * 3).ranks == ((0, 2), (1,))


def test_split_and_join(lanes, mixed):
    tree = {"w": lanes.put(ROWS), "n": None}
    cpus, twin = lanes.split(tree)
    assert cpus["n"] is None and cpus["w"].devices() == {mixed[0], mixed[2]}
    assert cpus["w"] is tree["w"].parts[0] and twin["w"] is tree["w"].parts[1]
    np.testing.assert_array_equal(cpus["w"], ROWS[[0, 2]])
    np.testing.assert_array_equal(twin["w"], ROWS[[1]])
    joined = lanes.join([cpus, twin])
    assert joined["n"] is None and np.asarray(joined["w"]).tobytes() == ROWS.tobytes()


def test_split_takes_what_is_on_the_host_and_shapes(lanes):
    host, shapes = lanes.split(ROWS), lanes.split(jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype))
    np.testing.assert_array_equal(host[0], ROWS[[0, 2]])
    np.testing.assert_array_equal(host[1], ROWS[[1]])
    assert [shape.shape for shape in shapes] == [(2, 2, 4), (1, 2, 4)]
    assert {shape.dtype for shape in shapes} == {ROWS.dtype}


def test_split_takes_arrays_of_other_lanes():
    cpus = jax.devices("cpu")[:3]
    apart, together = lanes_of(cpus, [0, 1, 1]), lanes_of(cpus)
    for array in (together.put(ROWS), apart.put(ROWS)):
        for parts in (lanes_of(cpus, [0, 1, 0]).split(array), apart.split(array)):
            sizes = [len(part) for part in parts]
            assert sizes in ([2, 1], [1, 2])
        one = lanes_of(cpus, [0, 1, 0]).split(array)
        np.testing.assert_array_equal(one[0], ROWS[[0, 2]])
        np.testing.assert_array_equal(one[1], ROWS[[1]])


def test_stack_takes_each_devices_entry(lanes, mixed):
    entries = [jax.device_put(ROWS[r : r + 1], d) for r, d in enumerate(mixed)]
    array = lanes.stack(entries)
    assert np.asarray(array).tobytes() == ROWS.tobytes()
    assert [shard.device for shard in array.addressable_shards] == mixed


def test_a_function_runs_in_every_lane(lanes, mixed):
    mapped = lanes.mapped(lambda x, y: ({"sum": x + y, "top": x.max()}, None))
    x, y = np.nan_to_num(ROWS), np.float32([1, 2, 3])[:, None, None]
    want = {"sum": x + y, "top": x.max(axis=(1, 2))}
    for call in (mapped, mapped.finish(mapped.lower(lanes.put(x), lanes.put(y)))):
        got, none = call(lanes.put(x), lanes.put(y))
        assert none is None and got["sum"].devices() == set(mixed)
        for name, value in want.items():
            np.testing.assert_array_equal(got[name], value)


# -- names


def test_kinds_of_one_name_are_told_apart_by_their_client(mixed, twins):
    assert kinds_of(mixed) == ("cpu", "twin", "cpu")
    assert kinds_of(twins[:2]) == ("cpu", "cpu")
    assert kinds_of(jax.devices("cpu")[:1]) == ("cpu",)


def test_names_tell_the_kind_where_there_are_several(mixed, twins):
    first, twin, second = mixed
    assert names_of(mixed) == [f"{first} (cpu)", f"{twin} (twin)", f"{second} (cpu)"]
    assert names_of([first, second]) == [str(first), str(second)]
    assert len(set(names_of([first, twin]))) == 2


def test_summaries(mixed):
    cpus = jax.devices("cpu")
    assert device_summary(mixed) == "elche: 3 devices (2 kinds) | cpu x2 | twin"
    assert device_summary(mixed[1::-1]) == "elche: 2 devices (2 kinds) | twin | cpu"
    apart = fleet_of("here", cpus[:3], ((0, 1), (2,)))
    assert summary_of(apart) == "elche: 3 devices (1 kind, 2 lanes) | cpu x2 | cpu"
    apart = fleet_of("here", mixed, ((0,), (1,), (2,)))
    assert summary_of(apart) == "elche: 3 devices (2 kinds, 3 lanes) | cpu | twin | cpu"
    assert summary_of(fleet_of("here", mixed)) == device_summary(mixed)


# -- replicas and collectives


def test_replicas_are_equal_and_unreplicated(mixed):
    tree = {"w": ROWS[0], "n": np.int32(3), "key": jax.random.key(1)}
    stacked = elche.replicate(tree, mixed)
    elche.check_replicas(stacked)
    one = elche.unreplicate(stacked)
    assert np.asarray(one["w"]).tobytes() == ROWS[0].tobytes() and int(one["n"]) == 3
    np.testing.assert_array_equal(jax.random.key_data(one["key"]), jax.random.key_data(tree["key"]))
    assert one["w"].devices() == {mixed[0]}
    other = stacked | {"w": elche.DDP(mixed).fleet.put(ROWS)}
    with pytest.raises(
        elche.ReplicaMismatch,
        match=rf"leaf \['w'\] on {mixed[1]} differs from {mixed[0]} in 8 of 8 elements\.$",
    ):
        elche.check_replicas(other)


@pytest.fixture
def ddp(mixed):
    return elche.DDP(mixed)


def test_ddp_replicates(ddp, mixed):
    tree = ddp.replicate({"w": np.arange(3.0, dtype="float32"), "none": None})
    assert ddp.world_size == 3 and list(ddp.devices) == mixed and tree["none"] is None
    assert tree["w"].tolist() == [[0.0, 1.0, 2.0]] * 3
    elche.check_replicas(tree)


@pytest.mark.parametrize("sync", ["sync_params", "sync_buffers"])
@pytest.mark.parametrize("order", [(0, 1, 2), slow((1, 0, 2))])
def test_sync_gives_everybody_what_rank_0_has(sync, order, mixed):
    ddp = elche.DDP([mixed[at] for at in order])
    tree = {
        "w": ddp.fleet.put(ROWS.astype(jnp.bfloat16)),
        "n": ddp.fleet.put(np.int32([1, 2, 3])),
        "none": None,
    }
    out = getattr(ddp, sync)(tree)
    elche.check_replicas({"w": out["w"], "n": out["n"]})
    assert out["n"].tolist() == [1, 1, 1] and out["none"] is None
    assert out["w"].dtype == jnp.bfloat16
    for row in np.asarray(out["w"]):
        assert row.tobytes() == ROWS[0].astype(jnp.bfloat16).tobytes()
    assert tree["n"].tolist() == [1, 2, 3] and not tree["w"].is_deleted()
    assert elche.DDP.sync_params(ddp, optax.sgd(0.1).init({})) == optax.sgd(0.1).init({})


def test_weighted_means_are_exact(ddp):
    rows = np.nan_to_num(ROWS)
    grads = {"w": ddp.fleet.put(rows), "frozen": None, "masked": optax.MaskedNode()}
    for counts in [(1, 1, 1), (5, 0, 2), (0, 7, 0), (3, 2, 9), (0.5, 0.25, 0.125)]:
        out = ddp.weighted_all_reduce_gradients(grads, counts)
        want = np.average(rows.astype("float64"), axis=0, weights=counts)
        np.testing.assert_allclose(out["w"], [want] * 3, rtol=1e-5, atol=1e-6)
        assert out["frozen"] is None and out["masked"] == optax.MaskedNode()
        elche.check_replicas(out["w"])


def test_means_are_exact(ddp):
    rows = np.nan_to_num(ROWS)
    small = rows[:, 0].astype("float16")
    out = ddp.all_reduce_gradients([ddp.fleet.put(rows), ddp.fleet.put(small)])
    np.testing.assert_allclose(out[0], [rows.astype("float64").mean(axis=0)] * 3, rtol=1e-5)
    assert out[1].dtype == np.float16
    np.testing.assert_allclose(out[1], [small.astype("float64").mean(axis=0)] * 3, atol=2e-3)


def test_a_device_without_work_may_hold_anything(ddp):
    for bad in range(3):
        rows, counts = np.float32([[1.0], [2.0], [4.0]]), [1.0, 1.0, 1.0]
        rows[bad], counts[bad] = np.nan, 0
        want = np.nanmean(rows)
        out = ddp.weighted_all_reduce_gradients(ddp.fleet.put(rows), counts)
        assert out.tolist() == [[want]] * 3


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray])
def test_arrays_that_are_elsewhere_are_taken_too(where, ddp, mixed):
    """As over devices of one kind: by their rows."""
    rows = np.float32([[1.0, -1.0], [4.0, 2.0], [7.0, 2.0]])
    out = ddp.all_reduce_gradients({"w": where(rows)})
    assert out["w"].tolist() == [[4.0, 1.0]] * 3 and out["w"].devices() == set(mixed)
    out = ddp.weighted_all_reduce_gradients({"w": where(rows)}, (1, 0, 2))
    assert out["w"].tolist() == [[5.0, 1.0]] * 3
    out = ddp.sync_params({"w": where(rows)})
    assert out["w"].tolist() == [[1.0, -1.0]] * 3 and out["w"].devices() == set(mixed)


def test_wrap_takes_replicas_as_they_are(mixed):
    rows = [{"w": np.full((2, 2), r, "float32"), "n": jnp.int32(r)} for r in range(3)]
    ddp, params = elche.DDP.wrap(rows, mixed)
    for rank, device in enumerate(mixed):
        shard = params["w"].addressable_data(rank)
        assert shard.devices() == {device} and float(shard[0, 0, 0]) == rank
    rows[0]["w"][:] = 9  # copied
    assert ddp.sync_params(params)["w"].tolist() == np.zeros((3, 2, 2)).tolist()


def test_what_is_wrong_is_named(ddp):
    with pytest.raises(TypeError, match=r"^DDP\.all_reduce_gradients: every leaf of grads"):
        ddp.all_reduce_gradients({"n": ddp.fleet.put(np.int32([1, 2, 3]))})
    with pytest.raises(ValueError, match=r"^DDP\.sync_params: every leaf must be stacked"):
        ddp.sync_params({"w": elche.DDP(ddp.devices[:2]).replicate(np.ones(2))})


# -- as arrays of NumPy


@kinds
def test_comparison_is_by_element(kind, lanes):
    array, want = made(kind, lanes)
    for other in (want, array.copy(), 1.0):
        number = np.asarray(other)
        np.testing.assert_array_equal(array == other, want == number)
        np.testing.assert_array_equal(array != other, want != number)
    assert (array == None) is False and (array != "x") is True  # noqa: E711  # what is tested
    shards = array.addressable_shards
    assert shards[0] == shards[0] != shards[1] and len(set(shards)) == 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


@kinds
def test_an_array_is_no_condition(kind, lanes):
    with pytest.raises(ValueError, match="truth value of an array with more than one element"):
        bool(made(kind, lanes)[0])


@kinds
def test_pickled_whatever_was_read_before(kind, lanes):
    array, want = made(kind, lanes)
    for _ in range(2):
        loaded = pickle.loads(pickle.dumps(array))  # on the host
        assert isinstance(loaded, np.ndarray) and loaded.tobytes() == want.tobytes()
        assert len(array.addressable_shards) == 3
    assert (
        type(copy.copy(array)) is kind and np.asarray(copy.copy(array)).tobytes() == want.tobytes()
    )


def test_an_entry_that_is_read_later_is_like_the_others(lanes):
    """Copies are made once an entry is read, not for where it lies."""
    lead, rest = lanes.lanes
    source, asked = lead.put(ROWS[[0, 2]]), []

    def copies(row):
        asked.append(row)
        return rest.copies(row)

    late = LateArray(source, rest.devices, copies)
    whole = LanedArray([source, late], lanes.ranks)
    assert whole.shape == ROWS.shape and whole.dtype == ROWS.dtype and whole.is_ready() is not None
    assert (
        whole.devices() == set(lanes.devices)
        and repr(late) == "LateArray(shape=(1, 2, 4), dtype=float32)"
    )
    assert [shard.device for shard in whole.addressable_shards] == list(lanes.devices)
    assert whole.copy().shape == ROWS.shape and not asked
    want = ROWS[[0, 0, 2]]
    assert np.asarray(whole).tobytes() == want.tobytes() and len(asked) == 1
    assert np.asarray(whole.copy()).tobytes() == want.tobytes()
    assert pickle.loads(pickle.dumps(whole)).tobytes() == want.tobytes()
