"""Hints, right and wrong, for devices whose times a report shows without rounding."""

from hypothesis import strategies as st


@st.composite
def hints_and_ms(draw):
    """A hint in either form, and what a microbatch really takes on each device."""
    # whole numbers: a count times a time, and that over the count, are exact
    ms = draw(st.lists(st.integers(1, 1000), min_size=2, max_size=8))
    speeds = st.lists(st.floats(1e-3, 1e3), min_size=len(ms), max_size=len(ms))
    pair = st.tuples(st.integers(0, len(ms) - 1), st.floats(1.0, 1e3))
    return draw(st.one_of(speeds, pair)), ms
