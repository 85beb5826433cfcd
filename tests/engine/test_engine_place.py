"""Data on the devices: the right rows on each, and nothing but them on the way."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from marks import slow

from elche_jax.data.order import Reading, epoch_order
from elche_jax.data.reader import IndexedReader, Partial
from elche_jax.data.source import ArraySource, IterableSource, MapSource
from elche_jax.data.split import Range, split_window
from elche_jax.engine import place
from elche_jax.engine.fetch import CallArgs, Pieces
from elche_jax.engine.lane import Lane, lanes_of
from elche_jax.engine.mapped import Mapped
from elche_jax.engine.place import Placer, choose_placement

BATCH = 2
SIZE = 200
ARRAYS = {
    "x": np.random.default_rng(0).normal(size=(SIZE, 3)),  # float64: arrives as float32
    "n": np.arange(SIZE, dtype=np.int32),
}
ORDER = epoch_order(SIZE, 1, 0)
SPEC = {
    "x": jax.ShapeDtypeStruct((BATCH, 3), np.float32),
    "n": jax.ShapeDtypeStruct((BATCH,), np.int32),
}


def a_reader():
    return IndexedReader(ArraySource(ARRAYS), Reading(BATCH, shuffle=True, seed=1), epoch=0)


def a_placer(devices):
    return Placer(lanes_of(devices))


def pieces_of(placer, reader, first, ranges, capacity, spec):
    """The pieces of a call; its arguments come with them."""
    call_args = placer.call_args(ranges, first, True, None, (0, 0))
    payload, placed = placer.pieces(reader, first, ranges, capacity, spec, call_args)
    np.testing.assert_array_equal(np.asarray(placed.numbers), call_args)
    return payload.pieces


def microbatch(number):
    """Microbatch `number` of the epoch, from the arrays themselves."""
    rows = ORDER[number * BATCH : (number + 1) * BATCH]
    return {"x": ARRAYS["x"][rows].astype(np.float32), "n": ARRAYS["n"][rows]}


def fetch_all(pieces, counts, devices):
    """What `Pieces.fetch` gives on every device for every place, one call."""
    capacity = Pieces(pieces).capacity(stacked=True)

    def fetch(payload, count):
        every = jax.vmap(lambda i: payload.fetch(i, count))(np.arange(capacity))
        return every, None

    key = (capacity, tuple(devices))
    placed = a_placer(devices).rows(np.array(counts, np.int32))
    if key not in fetch_all.programs:
        program = Mapped(fetch, devices, donate=()).compile(Pieces(pieces), placed)
        fetch_all.programs[key] = program
    out, _ = fetch_all.programs[key](Pieces(pieces), placed)
    return jax.tree.map(np.asarray, out)


fetch_all.programs = {}


def assert_microbatches(got, rank, numbers):
    for place_of, number in enumerate(numbers):
        want = microbatch(number)
        for name in ("x", "n"):
            np.testing.assert_array_equal(got[name][rank, place_of], want[name])


@pytest.mark.parametrize("world_size", [slow(1), slow(2), 3])
@pytest.mark.parametrize("capacity", [1, 3, slow(7), slow(15)])
def test_fetch_gives_every_microbatch_of_every_count(world_size, capacity):
    devices = jax.devices()[:world_size]
    placer, reader = a_placer(devices), a_reader()
    for count in range(capacity + 1):
        # other counts beside it, so that every mix of real and blank pieces occurs
        counts = [count, capacity - count, capacity][:world_size]
        if not any(counts):
            continue
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        ranges = [Range(*share) for share in zip(starts, counts, strict=True)]
        pieces = pieces_of(placer, reader, 5, ranges, capacity, SPEC)
        got = fetch_all(pieces, counts, devices)
        for rank, share in enumerate(ranges):
            first = 5 + share.start
            assert_microbatches(got, rank, range(first, first + share.count))


@settings(deadline=None, max_examples=40)
@given(
    counts=st.tuples(*[st.integers(0, 20)] * 3).filter(any),
    k=st.integers(1, 4),
    first=st.integers(0, 30),
)
def test_chunks_of_a_window_reassemble_it(counts, k, first):
    devices, capacity = jax.devices()[:3], 2**k - 1
    placer, reader = a_placer(devices), a_reader()
    done, first_of = [0, 0, 0], np.cumsum([0, *counts]).tolist()
    for ranges in split_window(counts, capacity):
        pieces = pieces_of(placer, reader, first, ranges, capacity, SPEC)
        got = fetch_all(pieces, [share.count for share in ranges], devices)
        for rank, share in enumerate(ranges):
            begin = first + first_of[rank] + done[rank]
            assert_microbatches(got, rank, range(begin, begin + share.count))
            done[rank] += share.count
    assert done == list(counts)


@pytest.mark.parametrize(("keys", "puts"), [([0], 0), ([0, 0, 0], 1), ([0, 1, 0], 2)])
def test_small_pieces_of_all_devices_are_placed_at_once_in_each_lane(keys, puts, monkeypatch):
    world_size, reader, whole = len(keys), a_reader(), []
    ranges = [Range(5 * rank, 5) for rank in range(world_size)]
    put = Lane.put

    def pieces():
        whole.clear()
        placer = Placer(lanes_of(jax.devices()[:world_size], keys))
        found = pieces_of(placer, reader, 2, ranges, 7, SPEC)
        return jax.tree.map(lambda leaf: (leaf.dtype, np.asarray(leaf)), found), [*whole]

    def noted(lane, rows):
        whole.append(len(jax.tree.leaves(rows)))
        return put(lane, rows)

    monkeypatch.setattr(Lane, "put", noted)
    together, arrays = pieces()
    assert arrays == puts * [1 + 2 * len(SPEC)]  # the arguments, and two pieces
    monkeypatch.setattr(place, "TOGETHER", 0)  # as if they were large
    apart, arrays = pieces()
    assert arrays == puts * [1]
    jax.tree.map(np.testing.assert_array_equal, together, apart)
    for rank in range(world_size):
        rows = jax.tree.map(lambda leaf: leaf[1], apart[0], is_leaf=lambda x: isinstance(x, tuple))
        assert_microbatches(rows, rank, range(5 * rank + 2, 5 * rank + 6))


def test_examples_of_a_dataset_are_read_device_by_device():
    """They may come from a file, or be drawn one after the other."""
    read = []

    class Noting:
        def __len__(self):
            return SIZE

        def __getitem__(self, number):
            read.append(number)
            return {name: rows[number] for name, rows in ARRAYS.items()}

    reader = IndexedReader(MapSource(Noting()), Reading(BATCH, shuffle=False), epoch=0)
    pieces_of(a_placer(jax.devices()[:2]), reader, 0, [Range(0, 3), Range(3, 3)], 3, SPEC)
    assert read == [*range(6 * BATCH)]


def test_pieces_lie_on_their_devices_with_their_shapes():
    devices = jax.devices()[:2]
    ranges = [Range(0, 5), Range(5, 2)]
    pieces = pieces_of(a_placer(devices), a_reader(), 0, ranges, 7, SPEC)
    assert [piece["x"].shape for piece in pieces] == [
        (2, 4, BATCH, 3), (2, 2, BATCH, 3), (2, 1, BATCH, 3)
    ]  # fmt: skip
    for piece in pieces:
        assert piece["x"].dtype == np.float32
        assert [shard.device for shard in piece["x"].addressable_shards] == devices
    # blanks are zeros: 2 has no piece of length 4, 5 none of length 2
    assert not np.asarray(pieces[0]["x"])[1].any()
    assert not np.asarray(pieces[1]["x"])[0].any()


@pytest.mark.parametrize("counts", [(7, 7), (5, 2), (1, 0), (0, 6)])
def test_only_real_microbatches_cross(monkeypatch, counts):
    devices = jax.devices()[:2]
    placer, reader = a_placer(devices), a_reader()
    ranges = [Range(0, counts[0]), Range(counts[0], counts[1])]
    pieces_of(placer, reader, 0, ranges, 7, SPEC)  # the blanks cross once
    crossed = []

    def device_put(arrays, targets):
        crossed.extend(array.nbytes for array in jax.tree.leaves(arrays))
        return real(arrays, targets)

    real = jax.device_put
    monkeypatch.setattr(place.jax, "device_put", device_put)
    pieces_of(placer, reader, 50, ranges, 7, SPEC)
    one = BATCH * (3 * 8 + 4)  # the host's float64 is cut to float32 on the way
    assert sum(crossed) == sum(counts) * one + len(devices) * CallArgs.WIDTH * 4


class Odd:
    """Examples that look like the first one, but for numbers 4 and 5."""

    def __init__(self, odd):
        self.odd = odd

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.odd if i in (4, 5) else {"x": np.zeros(3, np.float32), "n": np.int32(i)}


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            {"x": np.zeros(3, np.float32), "m": np.int32(0)},
            r"data: every microbatch must have the structure of the first one "
            r"\(PyTreeDef\({'n': \*, 'x': \*}\)\), but microbatch 4 has "
            r"PyTreeDef\({'m': \*, 'x': \*}\)\.",
        ),
        (
            {"x": np.zeros(4, np.float32), "n": np.int32(0)},
            r"data: every microbatch must have the shapes and dtypes of the "
            r"first one \(\(1, 3\), float32\), but microbatch 4 has \(1, 4\), float32\. "
            r"Pad them, or call windows for each shape\.",
        ),
        (
            {"x": np.zeros(3, np.float32), "n": 0.5},
            r"data: every microbatch must have the shapes and dtypes of the "
            r"first one \(\(1,\), int32\), but microbatch 4 has \(1,\), float32\. Pad .*",
        ),
    ],
)
def test_a_microbatch_unlike_the_first_is_an_error(odd, message):
    devices = jax.devices()[:2]
    reader = IndexedReader(MapSource(Odd(odd)), Reading(1), epoch=0)
    spec = {
        "x": jax.ShapeDtypeStruct((1, 3), np.float32),
        "n": jax.ShapeDtypeStruct((1,), np.int32),
    }
    placer = a_placer(devices)
    pieces_of(placer, reader, 0, [Range(0, 2), Range(2, 1)], 3, spec)
    with pytest.raises(ValueError, match=f"^{message}$"):
        pieces_of(placer, reader, 3, [Range(0, 1), Range(1, 1)], 3, spec)


@pytest.mark.parametrize("backwards", [False, True])
def test_rows_go_to_the_devices_in_rank_order(backwards):
    devices = jax.devices()[:3][:: -1 if backwards else 1]
    placed = a_placer(devices).rows(np.array([[10], [11], [12]], np.int32))
    got = {shard.device: int(shard.data[0, 0]) for shard in placed.addressable_shards}
    assert got == dict(zip(devices, [10, 11, 12], strict=True))


@settings(deadline=None, max_examples=40)
@given(counts=st.lists(st.integers(0, 7), min_size=2, max_size=2), first=st.integers(0, 50))
def test_index_names_the_examples_of_every_microbatch(counts, first):
    devices = jax.devices()[:2]
    ranges = [Range(0, counts[0]), Range(counts[0], counts[1])]
    placer = a_placer(devices)
    call_args = placer.call_args(ranges, first, False, None, (0, 0))
    index, placed = placer.index(a_reader(), first, ranges, 7, call_args)
    index = np.asarray(index)
    np.testing.assert_array_equal(np.asarray(placed.numbers), call_args)
    assert index.shape == (2, 7, BATCH)
    assert index.dtype == np.int32
    for rank, share in enumerate(ranges):
        begin = (first + share.start) * BATCH
        want = ORDER[begin : begin + share.count * BATCH].reshape(-1, BATCH)
        np.testing.assert_array_equal(index[rank, : share.count], want)
        assert not index[rank, share.count :].any()


@pytest.mark.parametrize(
    ("partial", "expected"),
    [(None, [-1, 0]), (Partial(104, 3), [4, 3]), (Partial(90, 3), [-10, 3])],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_orders_say_what_each_device_does(partial, expected, fresh):
    devices = jax.devices()[:2]
    ranges = [Range(0, 4), Range(4, 1)]
    call_args = a_placer(devices).call_args(ranges, 100, fresh, partial, (5, 17))
    assert call_args.dtype == np.int32
    np.testing.assert_array_equal(
        call_args,
        [
            [4, 0, int(fresh), *expected, 5, 17, 0, 0, 4],
            [1, 4, int(fresh), *expected, 5, 17, 1, 0, 1],
        ],
    )


DATA = ArraySource(np.zeros(100, np.int8))  # 100 bytes


@pytest.mark.parametrize(
    ("placement", "free", "chosen"),
    [
        ("auto", 400, "resident"),  # a quarter of the free memory, just so
        ("auto", 399, "stream"),
        ("auto", None, "stream"),
        ("stream", 10**9, "stream"),
        ("resident", 0, "resident"),
        ("resident", None, "resident"),
    ],
)
def test_choose_placement(placement, free, chosen):
    assert choose_placement(placement, DATA, free) == chosen


@pytest.mark.parametrize("source", [MapSource([1]), IterableSource([1])])
def test_only_arrays_can_be_resident(source):
    assert choose_placement("auto", source, 10**9) == "stream"
    assert choose_placement("stream", source, 10**9) == "stream"
    with pytest.raises(
        ValueError,
        match=r"^data: placement='resident' needs data that is a pytree of arrays, got a "
        rf"{type(source).__name__}\. Use placement='stream'\.$",
    ):
        choose_placement("resident", source, 10**9)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31])
def test_numbers_of_resident_examples_fit_int32(size):
    # one byte, repeated: that many examples without their memory
    source = ArraySource(np.broadcast_to(np.zeros((), np.int8), (size,)))
    assert choose_placement("stream", source, 2**40) == "stream"
    if size < 2**31:
        assert choose_placement("auto", source, 2**40) == "resident"
        assert choose_placement("resident", source, 0) == "resident"
        return
    assert choose_placement("auto", source, 2**40) == "stream"
    message = (
        r"^data: the number of examples must be at most 2147483647 with placement='resident', got "
        r"2147483648\. Use placement='stream'\.$"
    )
    with pytest.raises(ValueError, match=message):
        choose_placement("resident", source, 0)


def test_another_placement_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"^data: placement must be one of 'auto', 'resident', 'stream', got 'gpu'\.$",
    ):
        choose_placement("gpu", DATA, None)
