"""The order of the examples: a permutation that (seed, epoch) alone decide."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.data.order import Cursor, Reading, epoch_order

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)


def philox_words(seed, epoch, count):
    """Philox4x64-10 (Salmon et al. 2011) in Python integers, counting from 1."""
    mask = 2**64 - 1
    words = []
    for counter in range(1, count // 4 + 2):
        x, key = [counter, 0, 0, 0], [seed, epoch]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [
                (second >> 64) ^ x[1] ^ key[0],
                second & mask,
                (first >> 64) ^ x[3] ^ key[1],
                first & mask,
            ]
            key = [
                (key[0] + 0x9E3779B97F4A7C15) & mask,
                (key[1] + 0xBB67AE8584CAA73B) & mask,
            ]
        words += x
    return words[:count]


@settings(deadline=None)
@given(size=st.integers(0, 400), seed=SEEDS, epoch=EPOCHS)
def test_order_is_a_permutation(size, seed, epoch):
    order = epoch_order(size, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(size))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(0, 60), seed=SEEDS, epoch=EPOCHS)
def test_order_ranks_the_words_of_philox(size, seed, epoch):
    words = philox_words(seed, epoch, size)
    expected = sorted(range(size), key=words.__getitem__)
    assert epoch_order(size, seed, epoch).tolist() == expected


def test_order_never_changes():
    # A run is replayed and resumed by (seed, epoch): other values here would make
    # every checkpoint in the world read other data.
    assert epoch_order(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(10, 2**64 - 1, 7).tolist() == [3, 0, 7, 4, 6, 9, 8, 1, 5, 2]


def test_order_depends_on_seed_and_epoch_each():
    call_args = {tuple(epoch_order(64, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(call_args) == 4
    assert tuple(epoch_order(64, 1, 1)) in call_args


def test_order_takes_the_integers_of_numpy():
    order = epoch_order(np.int32(20), np.int64(5), np.int64(3))
    assert order.tolist() == epoch_order(20, 5, 3).tolist()


@pytest.mark.parametrize("name, value, kind, message", [
    ("size", -1, ValueError, r"size must be at least 0, got -1\."),
    ("seed", -1, ValueError, r"seed must be at least 0, got -1\."),
    ("seed", 2**64, ValueError, rf"seed must be at most {2**64 - 1}, got {2**64}\."),
    ("epoch", 2**64, ValueError, rf"epoch must be at most {2**64 - 1}, got {2**64}\."),
    ("epoch", 1.0, TypeError, r"epoch must be an integer, got 1\.0 \(float\)\."),
])  # fmt: skip
def test_order_rejects_what_is_no_key(name, value, kind, message):
    with pytest.raises(kind, match=f"^epoch_order: {message}$"):
        epoch_order(**{"size": 4, "seed": 0, "epoch": 0, name: value})


def test_all_permutations_are_about_equally_frequent():
    seen = Counter(tuple(epoch_order(4, 5, epoch).tolist()) for epoch in range(2400))
    assert len(seen) == 24
    # 100 each expected, standard deviation 10
    assert 60 <= min(seen.values()) <= max(seen.values()) <= 140


@given(epoch=st.integers(0, 2**60), microbatch=st.integers(0, 2**60))
def test_cursor_goes_through_json(epoch, microbatch):
    cursor = Cursor(epoch, microbatch, window=3)
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor


def test_cursor_keeps_plain_numbers():
    cursor = Cursor(np.int64(1), np.array(2), np.uint8(3))
    assert cursor == Cursor(1, 2, 3)
    assert json.dumps(cursor.to_dict()) == '{"epoch": 1, "microbatch": 2, "window": 3}'


def test_cursor_moves():
    cursor = Cursor().advance(5).advance(2)
    assert cursor == Cursor(epoch=0, microbatch=7, window=2)
    assert cursor.next_epoch() == Cursor(epoch=1, microbatch=0, window=2)


@pytest.mark.parametrize("name", ["epoch", "microbatch", "window"])
def test_cursor_rejects_what_is_no_place(name):
    with pytest.raises(ValueError, match=rf"^Cursor: {name} must be at least 0, got -1\.$"):
        Cursor(**{name: -1})
    with pytest.raises(
        TypeError, match=rf"^Cursor: {name} must be an integer, got 1\.0 \(float\)\.$"
    ):
        Cursor(**{name: 1.0})


@pytest.mark.parametrize(
    "fields", [{}, {"epoch": 0, "microbatch": 0}, {**Cursor().to_dict(), "step": 1}]
)
def test_cursor_rejects_other_fields(fields):
    with pytest.raises(
        ValueError,
        match=r"^Cursor.from_dict: fields must have the keys "
        r"\['epoch', 'microbatch', 'window'\], got \[.*\]\.$",
    ):
        Cursor.from_dict(fields)


def test_cursor_from_dict_needs_a_dict():
    rule = r"^Cursor\.from_dict: fields must be a dict of `to_dict`, got NoneType\.$"
    with pytest.raises(TypeError, match=rule):
        Cursor.from_dict(None)


READ = Reading(batch_size=4, examples=96, shuffle=True, seed=7)


@pytest.mark.parametrize(
    "reading", [READ, Reading(4), Reading(4, 96), Reading(1, 1, True, 2**64 - 1)]
)
def test_a_cursor_knows_how_the_data_were_read(reading):
    cursor = Cursor(1, 2, 3, reading)
    back = Cursor.from_dict(json.loads(json.dumps(cursor.to_dict())))
    assert back == cursor and back.reading == reading
    assert back.advance(5).next_epoch().reading == reading
    assert Cursor.from_dict(Cursor(1, 2, 3, first=5).to_dict()).first == 5
    assert Cursor(1, 2, 3, first=5).advance(5).next_epoch().first is None
    assert repr(cursor) == "Cursor(epoch=1, microbatch=2, window=3)"


def test_cursors_of_before_know_nothing_of_it():
    old = Cursor.from_dict({"epoch": 1, "microbatch": 2, "window": 3})
    assert old.reading is None and old == Cursor(1, 2, 3, READ)
    assert Cursor.from_dict({**old.to_dict(), "reading": None}).reading is None
    assert "reading" not in old.to_dict()


@pytest.mark.parametrize(
    ("now", "want"),
    [
        (READ, None),
        (Reading(8, 96, True, 7), ("batch_size", 4, 8)),
        (Reading(4, 95, True, 7), ("examples", 96, 95)),
        (Reading(4, 96, True, 0), ("seed", 7, 0)),
        (Reading(4, 96), ("shuffle", True, False)),
        (Reading(4, 96, True, 7, drop_last=False), ("drop_last", True, False)),
        (Reading(8), ("batch_size", 4, 8)),
        (Reading(4), ("examples", 96, None)),
    ],
)
def test_the_first_difference_of_two_readings(now, want):
    assert READ.difference(now) == want


@pytest.mark.parametrize("reading", [{}, {"batch_size": 4}, {**vars(READ), "more": 1}, 3])
def test_a_reading_of_other_fields(reading):
    with pytest.raises(
        ValueError, match=r"^Cursor.from_dict: fields\['reading'\] must be a dict with the keys \["
    ):
        Cursor.from_dict({**Cursor().to_dict(), "reading": reading})
