"""Cutting a window: nothing lost, nothing twice, no padding."""

import pytest
from hypothesis import given, settings, strategies as st

from elche_jax.data.split import Range, capacity_for, piece_lengths, split_window

CAPACITIES = st.integers(1, 6).map(lambda k: 2**k - 1)
COUNTS = st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any)


@pytest.mark.parametrize(
    ("count", "capacity"),
    [(0, 1), (1, 1), (2, 3), (3, 3), (4, 7), (7, 7), (8, 15), (255, 255), (256, 511)],
)
def test_capacity_for(count, capacity):
    assert capacity_for(count) == capacity


@given(st.integers(1, 10**6))
def test_capacity_is_the_smallest_that_holds_the_count(count):
    capacity = capacity_for(count)
    assert capacity & (capacity + 1) == 0  # 2**k - 1
    assert capacity >= count > capacity // 2


@given(CAPACITIES)
def test_pieces_of_a_program_fill_its_capacity(capacity):
    lengths = piece_lengths(capacity)
    assert sum(lengths) == capacity
    assert list(lengths) == sorted(set(lengths), reverse=True)
    assert all(length & (length - 1) == 0 for length in lengths)


@given(start=st.integers(0, 1000), count=st.integers(0, 1000))
def test_pieces_of_a_range_reassemble_it(start, count):
    pieces = Range(start, count).pieces()
    places = [at + i for length, at in pieces.items() for i in range(length)]
    assert places == list(range(start, start + count))
    assert list(pieces) == sorted(pieces, reverse=True)
    assert set(pieces) <= set(piece_lengths(capacity_for(count)))


@settings(deadline=None)
@given(counts=COUNTS, capacity=CAPACITIES)
def test_ranges_partition_the_window(counts, capacity):
    chunks = split_window(counts, capacity)
    first = 0
    for rank, count in enumerate(counts):
        places = [
            place
            for ranges in chunks
            for place in range(ranges[rank].start, ranges[rank].start + ranges[rank].count)
        ]
        assert places == list(range(first, first + count))
        first += count


@settings(deadline=None)
@given(counts=COUNTS, capacity=CAPACITIES)
def test_calls_are_few_fit_and_share_the_work_evenly(counts, capacity):
    chunks = split_window(counts, capacity)
    assert len(chunks) == -(-max(counts) // capacity)
    for rank, count in enumerate(counts):
        got = [ranges[rank].count for ranges in chunks]
        assert max(got) <= capacity
        assert max(got) - min(got) <= 1
        assert sum(got) == count
    assert all(sum(share.count for share in ranges) > 0 for ranges in chunks)


def test_a_window_without_work_has_no_chunks():
    assert split_window((0, 0), 7) == []
