"""The tables of tests: how few of their rows meet every pair of values."""

from itertools import combinations, product

from hypothesis import given, strategies as st
from marks import pairs


def met(rows):
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.data())
def test_all_values_meet_that_meet_in_any_row(sizes, chosen):
    every = list(product(*map(range, sizes)))
    rows = chosen.draw(st.lists(st.sampled_from(every), unique=True))
    first = chosen.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
    found = pairs(rows, first)
    assert met(found) == met(rows) and set(first) <= set(found)
    assert found == [row for row in rows if row in found], "each once, in their order"


def test_a_few_rows_are_enough():
    assert len(pairs(product(range(5), range(4), range(3)))) < 30  # of 60; 20 are the fewest
