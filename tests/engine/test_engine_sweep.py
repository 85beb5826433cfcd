"""Functions of microbatches over data on all devices: sums, outputs, checks, programs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow

import elche_jax as elche
from elche_jax.data.order import Cursor, Reading
from elche_jax.data.reader import open_epoch
from elche_jax.data.source import ArraySource
from elche_jax.data.split import piece_lengths, split_window
from elche_jax.engine.compile_cache import CompileCache
from elche_jax.engine.fetch import Rows
from elche_jax.engine.lane import lanes_of
from elche_jax.engine.place import Placer
from elche_jax.engine.replicas import replicate
from elche_jax.engine.runner import Call
from elche_jax.engine.shapes import shapes_of
from elche_jax.engine.sweep import (
    Apply,
    BatchFn,
    Score,
    SweepRunner,
    Variables,
    inspect_metrics,
    inspect_outputs,
)
from elche_jax.lab import EmulatedSpeeds, ExtraWork
from elche_jax.train.spec import microbatch_shapes

BATCH = 4


class Setup:
    """A program on some devices, and calls over the numbers 1, 2, 3, ..."""

    def __init__(self, make, world_size, examples, resident=False, variables=None):
        self.devices = jax.devices()[:world_size]
        self.x = np.arange(1.0, examples + 1, dtype="float32")
        self.source = ArraySource({"x": self.x})
        self.reader = open_epoch(self.source, Reading(BATCH, drop_last=False), Cursor())
        self.placer = Placer(lanes_of(self.devices))
        self.data = replicate(self.source.tree, self.devices) if resident else None
        self.variables = replicate(variables or Variables({"w": np.float32(2)}, None), self.devices)
        self.cache = CompileCache()
        self.runner = SweepRunner(
            make, lanes_of(self.devices), self.cache, shapes_of(self.variables)
        )

    def calls(self, counts, capacity, first=0):
        for number, ranges in enumerate(split_window(counts, capacity)):
            place = self.reader, first, ranges, capacity
            call_args = self.placer.call_args(
                ranges, first, number == 0, self.reader.partial, (0, 0)
            )
            if self.data is None:
                spec = microbatch_shapes(self.source, BATCH)
                payload, placed = self.placer.pieces(*place, spec, call_args)
            else:
                index, placed = self.placer.index(*place, call_args)
                payload = Rows(self.data, index)
            yield Call(payload, placed, ranges)

    def run(self, counts, capacity, first=0):
        """Results and tokens of a window's calls, on the host."""
        calls = list(self.calls(counts, capacity, first))
        return [jax.device_get(self.runner.run(self.variables, call)) for call in calls]


def score(fn, shapes, hook=None):
    return Score(BatchFn(fn), shapes, hook)


def apply(fn, hook=None):
    return Apply(BatchFn(fn), hook)


def doubled(params, batch):
    return {"x": params["w"] * batch["x"]}


# -- how the function is called


def test_arguments_of_the_function():
    def fn(*args):
        return args

    variables, batch = Variables("params", "state"), {"x": 1}
    assert BatchFn(fn)(Variables("params", None), batch, "mask") == ("params", batch)
    assert BatchFn(fn, has_model_state=True)(variables, batch, "m") == ("params", "state", batch)
    masked = BatchFn(fn, mask_key="valid")(variables, batch, "mask")
    assert masked == ("params", {"x": 1, "valid": "mask"})
    assert batch == {"x": 1}, "the data stay as they are"


# -- sums


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("world_size", [slow(1), 3])
def test_every_device_sums_its_own_microbatches(world_size, resident):
    setup = Setup(score(doubled, (("x", ()),)), world_size, 38, resident)
    for counts in ((3, 7, 0), (0, 4, 6), (10, 0, 0), (2, 2, 5)):
        counts = counts[:world_size]
        if not any(counts):
            continue
        sums = [results["x"] for results, _ in setup.run(counts, 3)]
        total, weight = np.sum([part[0] for part in sums], 0), np.sum([part[1] for part in sums], 0)
        ends = np.cumsum([0, *counts]) * BATCH
        shares = [setup.x[a:b] for a, b in itertools.pairwise(ends)]
        np.testing.assert_array_equal(total, [2 * share.sum() for share in shares])
        np.testing.assert_array_equal(weight, [len(share) for share in shares])


def test_the_smaller_microbatch_is_found_at_its_place_in_the_epoch():
    setup = Setup(score(doubled, (("x", ()),)), 2, 4 * BATCH + 1)
    ((results, _),) = setup.run((1, 2), 3, first=2)
    total, weight = results["x"]
    np.testing.assert_array_equal(total, [2 * setup.x[8:12].sum(), 2 * setup.x[12:].sum()])
    np.testing.assert_array_equal(weight, [4, 5])


NAN, INF = np.nan, np.inf
VALUES = np.array([1.0, 2.0, 4.0, 8.0], "float32")


ADDED = [
    (VALUES, 4, 15, 4),
    (VALUES, 3, 7, 3),
    (np.float32(5), 4, 20, 4),
    (np.float32(5), 3, 15, 3),  # the mean over the valid ones
    (5.0, 3, 15, 3),  # a number of Python's
    (np.array([True, False, True, True]), 3, 2, 3),
    (np.array([1, -2, 3, 4], "int8"), 4, 6, 4),
    (np.stack([VALUES, 10 * VALUES], axis=1), 2, [3, 30], 2),
    (np.ones((4, 2, 3), "bfloat16"), 3, np.full((2, 3), 3), 3),
    (np.zeros((4, 0)), 3, [], 3),
    # what is not valid is not looked at
    (np.array([1, 2, NAN, INF], "float32"), 2, 3, 2),
    (np.array([1, 2, NAN, 1], "float32"), 4, NAN, 4),
    (elche.Weighted(np.float32(5), np.float32(0.5)), 4, 2.5, 0.5),
    (elche.Weighted(7, 3), 4, 21, 3),
    (elche.Weighted(np.float32(NAN), np.float32(0)), 4, 0, 0),
    (elche.Weighted(np.float32(INF), np.float32(0)), 4, 0, 0),
    (elche.Weighted(np.float32(5), np.float32(-1)), 4, NAN, NAN),
    (elche.Weighted(np.float32(5), np.float32(NAN)), 4, NAN, NAN),
    (elche.Weighted(VALUES, np.array([3, 0, 2, 5])), 4, 51, 10),
    (elche.Weighted(VALUES, np.array([3, 0, 2, 5])), 3, 11, 5),
    (elche.Weighted(VALUES, np.array([True, False, True, False])), 4, 5, 2),
    (elche.Weighted(np.array([1, NAN, INF, 2.0]), np.array([1, 0, 0, 1.0])), 4, 3, 2),
    (elche.Weighted(VALUES, np.array([1, 1, 1, -1.0])), 4, NAN, NAN),
    (elche.Weighted(VALUES, np.array([1, 1, 1, -1.0])), 3, 7, 3),
    (elche.Weighted(VALUES, np.array([1, 1, NAN, NAN])), 2, 3, 2),
]
"""A value, so many examples of it that are valid, their total, and their weight."""


def test_what_a_microbatch_adds():
    """All values as metrics of one function."""
    named = {f"m{number}": row for number, row in enumerate(ADDED)}

    def fn(params, batch):
        return {name: jax.tree.map(jnp.asarray, value) for name, (value, *_) in named.items()}

    _, shapes = inspect_metrics(BatchFn(fn, mask_key="mask"), *SHAPES, ragged=True)
    assert dict(shapes) == {name: np.shape(total) for name, (*_, total, _) in named.items()}
    for valid in (2, 3, 4):
        ((results, _),) = Setup(score(fn, shapes), 1, valid).run((1,), 1)
        for name, (value, examples, total, weight) in named.items():
            if examples == valid:
                got, said = results[name][0][0], repr((value, examples))
                np.testing.assert_array_equal(got, np.asarray(total, "float32"), said)
                np.testing.assert_array_equal(results[name][1][0], np.float32(weight), said)


# -- outputs


def outputs(params, batch):
    x = batch["x"]
    return {
        "numbers": (params["w"] * x, x > 5, x.astype(jnp.int32), x.astype(jnp.bfloat16)),
        "axes": [x[:, None] * jnp.arange(1.0, 3.0), jnp.zeros((len(x), 3, 0), jnp.int8)],
        "nothing": (),
    }


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_the_digits_of_the_count_name_the_pieces(world_size, resident):
    capacity = 7
    setup = Setup(apply(outputs), world_size, 12 * BATCH, resident)
    for count in range(capacity + 1):
        counts = (count, 5)[:world_size] if count else (0, 5)[-world_size:]
        (call,) = setup.calls(counts, capacity)
        ((pieces, _),) = setup.run(counts, capacity)
        assert [piece["numbers"][0].shape[1] for piece in pieces] == list(piece_lengths(capacity))
        for rank, share in enumerate(call.ranges):
            starts, rows = share.pieces(), setup.x[share.start * BATCH :][: share.count * BATCH]
            found = [
                jax.tree.map(lambda leaf, rank=rank: leaf[rank], piece)
                for length, piece in zip(piece_lengths(capacity), pieces, strict=True)
                if length in starts
            ]
            assert len(found) == share.count.bit_count()
            if not found:
                continue
            for name, want in jax.device_get(outputs({"w": 2.0}, {"x": rows})).items():
                for leaf, *got in zip(want, *(piece[name] for piece in found), strict=True):
                    joined = np.concatenate(got)
                    assert joined.dtype == leaf.dtype
                    shape = (share.count, BATCH, *leaf.shape[1:])
                    np.testing.assert_array_equal(joined, leaf.reshape(shape))


def test_outputs_without_elements_have_a_token_too():
    setup = Setup(apply(lambda params, batch: jnp.zeros((BATCH, 0))), 2, 12)
    ((pieces, token),) = setup.run((2, 1), 3)
    assert [piece.shape for piece in pieces] == [(2, 2, BATCH, 0), (2, 1, BATCH, 0)]
    np.testing.assert_array_equal(token, [0, 0])


# -- emulation


class Recorded:
    """A schedule that notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, window, rank, microbatch):
        self.asked.append((window, rank, microbatch))
        return 0.0

    def of(self, rank):
        return [number for _, asked, number in self.asked if asked == rank]


PROGRAMS = {
    "score": lambda hook: score(doubled, (("x", ()),), hook),
    "apply": lambda hook: apply(outputs, hook),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_microbatch_is_waited_for_once_in_a_window_of_several_calls(kind, world_size):
    schedule = Recorded()
    setup = Setup(PROGRAMS[kind](EmulatedSpeeds(schedule)), world_size, 60)
    for counts in ((5, 3), (1, 8)):
        schedule.asked.clear()
        counts = counts[:world_size]
        for _, token in setup.run(counts, 3):
            np.testing.assert_array_equal(token, np.zeros(world_size))
        for rank, count in enumerate(counts):
            assert schedule.of(rank) == list(range(count))


@pytest.mark.parametrize("hook", [EmulatedSpeeds([0.0, 0.0]), ExtraWork((3, 1))])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_emulation_changes_no_bit(kind, hook):
    def bits(hook):
        found = Setup(PROGRAMS[kind](hook), 2, 23).run((2, 4), 7)
        return [leaf.tobytes() for leaf in jax.tree.leaves(found)]

    assert bits(hook) == bits(None)


# -- checks, with shapes only

SHAPES = (
    Variables({"w": jax.ShapeDtypeStruct((), "float32")}, None),
    {"x": jax.ShapeDtypeStruct((BATCH,), "float32")},
)


def inspected(value, ragged=False, mask_key=None):
    fn = BatchFn(lambda params, batch: value, mask_key=mask_key)
    return inspect_metrics(fn, *SHAPES, ragged)[1]


def test_metrics_are_named_with_the_shapes_of_their_means():
    values = {
        "vector": VALUES,
        "a scalar": np.float32(1),
        "classes": np.ones((4, 3, 2)),
        "tokens": elche.Weighted(VALUES, VALUES > 1),
        "mean": elche.Weighted(1.0, 2),
    }
    shapes = (("a scalar", ()), ("classes", (3, 2)), ("mean", ()), ("tokens", ()), ("vector", ()))
    assert inspected(values) == shapes
    assert inspected(values, ragged=True, mask_key="mask") == shapes


ONE = r"metric 'm' must be a scalar, an array of one entry per example \(4\), or Weighted of "


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (VALUES, r"must return a dict of metrics, name to value, got an array of shape \(4,\) and"),
        (None, r"must return a dict of metrics, name to value, got a NoneType\.$"),
        ((1.0, {}), r"must return a dict of metrics, name to value, got a tuple of 2\.$"),
        ({}, r"must return a dict of metrics, name to value, got an empty one\.$"),
        (
            {"m": np.ones(3, "float32")},
            ONE + r"scalars or of vectors, got an array of shape \(3,\) and dtype float32\.$",
        ),
        ({"m": np.ones((1, 4))}, ONE + r".* got an array of shape \(1, 4\) and"),
        ({"m": {"a": VALUES}}, ONE + r".* got a dict\.$"),
        ({"m": None}, ONE + r".* got a NoneType\.$"),
        ({1: VALUES}, r"names of metrics must be strings, got 1 \(int\)\.$"),
        ({"m": elche.Weighted((1.0, 2.0), 1.0)}, ONE + r".* got a tuple of 2 and an array of sha"),
        (
            {"m": elche.Weighted(np.ones((4, 2)), np.ones((4, 2)))},
            ONE + r".* got an array of shape \(4, 2\) .* and an array of shape \(4, 2\) ",
        ),
        (
            {"m": elche.Weighted(VALUES, 2.0)},
            r"metric 'm' must have a weight of the shape of its value \(\(4,\)\), got \(\)\.$",
        ),
        (
            {"m": elche.Weighted(1.0, VALUES)},
            r"metric 'm' must have a weight of the shape of its value \(\(\)\), got \(4,\)\.$",
        ),
        (
            {"m": VALUES * 1j},
            r"metric 'm' must be of real numbers or bools, got an array .* dtype complex64\.$",
        ),
        (
            {"m": elche.Weighted(VALUES, VALUES * 1j)},
            r"metric 'm' must be of real .* dtype float32 and an array .* dtype complex64\.$",
        ),
        (
            {"m": elche.Weighted(np.float32(1), jnp.bfloat16(3))},
            r"the weight of metric 'm' must be an integer, a bool or a float of at least 32 bits, "
            r"as bfloat16 rounds counts, got an array of shape \(\) and dtype bfloat16\. Sum mas",
        ),
    ],
)
def test_what_is_no_metric(value, message):
    with pytest.raises(TypeError, match=r"^metric_fn: " + message):
        inspected(jax.tree.map(jnp.asarray, value))


@pytest.mark.parametrize("value", [np.float32(1), elche.Weighted(1.0, 4.0)])
def test_a_mean_cannot_leave_examples_out(value):
    with pytest.raises(
        ValueError,
        match=r"^metric_fn: metric 'm' must have one entry per example \(4\), as the last "
        r"microbatch of these data may have fewer, got a scalar\. Or pass mask_key, and return "
        r"Weighted\(mean over the valid ones, their number\)\.$",
    ):
        inspected({"m": value}, ragged=True)
    assert inspected({"m": value}, ragged=True, mask_key="mask") == (("m", ()),)


def test_outputs_are_known_by_their_shapes():
    found = inspect_outputs(BatchFn(outputs), *SHAPES).outputs
    assert [leaf.shape for leaf in found["axes"]] == [(BATCH, 2), (BATCH, 3, 0)]
    dtypes = [leaf.dtype for leaf in found["numbers"]]
    assert dtypes == [np.float32, np.bool_, np.int32, jnp.bfloat16] and found["nothing"] == ()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            np.ones(3, "float32"),
            r"every output of apply_fn must have one entry per example \(4\) on its first axis, "
            r"got an array of shape \(3,\) and dtype float32 for leaf output\.$",
        ),
        ({"a": VALUES, "b": (1.0,)}, r".* got an array of shape \(\) .* for leaf \['b'\]\[0\]\.$"),
        (
            {"a": VALUES, "b": jax.random.split(jax.random.key(0), 4)},
            r"every output of apply_fn must be of numbers or bools, got an array of shape \(4,\) "
            r"and dtype key<fry> for leaf \['b'\]\. Return jax\.random\.key_data of it\.$",
        ),
        ({"a": None}, r"apply_fn must return arrays, got a dict\.$"),
        (None, r"apply_fn must return arrays, got a NoneType\.$"),
    ],
)
def test_what_is_no_output(value, message):
    fn = BatchFn(lambda params, batch: value)
    with pytest.raises(TypeError, match=r"^predict: " + message):
        inspect_outputs(fn, *SHAPES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: VALUES, "a": VALUES}, r"dicts in what it returns must have keys of one type, as JAX "),
        ({"a": VALUES, "b": "x"}, r"must return only arrays and numbers, got 'x' \(str\)\."),
    ],
)
def test_what_jax_cannot_take(value, message):
    fn = BatchFn(lambda params, batch: value)
    with pytest.raises(TypeError, match=r"^apply_fn: " + message):
        inspect_outputs(fn, *SHAPES)
    with pytest.raises(TypeError, match=r"^metric_fn: " + message):
        inspect_metrics(fn, *SHAPES, False)


# -- programs


def test_programs_are_compiled_once_for_each_capacity_and_ahead_where_asked_to():
    setup = Setup(score(doubled, (("x", ()),)), 2, 80)
    (small,), (large,) = setup.calls((1, 0), 1), setup.calls((4, 3), 7)
    assert not setup.runner.ready(small.payload)
    setup.run((1, 0), 1)
    setup.run((0, 1), 1)
    assert setup.runner.ready(small.payload) and not setup.runner.ready(large.payload)
    shapes = shapes_of(large.payload)
    setup.runner.prepare(shapes)
    setup.cache.wait()
    assert setup.runner.ready(large.payload)
    setup.run((4, 3), 7)
    stats = setup.cache.stats
    assert (stats.misses, stats.ahead, stats.hits) == (1, 1, 2)


def test_two_functions_of_like_shapes_do_not_share_a_program():
    setup = Setup(score(doubled, (("x", ()),)), 1, 8)
    program = Score(BatchFn(lambda params, batch: {"x": batch["x"]}), (("x", ()),))
    other = SweepRunner(program, setup.runner.fleet, setup.cache, shapes_of(setup.variables))
    (call,) = setup.calls((2,), 3)
    assert setup.runner.run(setup.variables, call)[0]["x"][0] == 72
    assert other.run(setup.variables, call)[0]["x"][0] == 36
    assert setup.cache.stats.misses == 2
