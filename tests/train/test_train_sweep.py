"""Evaluation and inference: bad input is named, errors surface, threads end."""

import gc
import signal
import sys
import traceback
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow, table
from small import threads
from sweeping import Batches, MapStyle, examples

import elche_jax as elche
from elche_jax.cadence import Controller, WindowPlan
from elche_jax.engine.lane import Lane
from elche_jax.engine.runner import Launch
from elche_jax.engine.timing import Ends, WindowTimes
from elche_jax.lab import EmulatedSpeeds
from elche_jax.train.evaluate import _kept_sweep, _same, _same_function
from elche_jax.train.finite import FinitePolicy, FiniteWatch
from elche_jax.train.in_flight import InFlight
from elche_jax.train.live_scheduler import LiveScheduler
from elche_jax.train.options import Options
from elche_jax.train.pipeline import Pipeline
from elche_jax.train.sweep import SweepPipeline

DEVICES = jax.devices()
DATA = examples(20)


class Evaluated:
    """The mean of `fn` of a microbatch, by an evaluation."""

    where = "build_eval_step"

    def __init__(self, fn, world=2, cadence=None, **options):
        options = {"devices": DEVICES[:world], "cadence": cadence} | options
        self.step = elche.build_eval_step(lambda params, batch: {"m": fn(batch)}, **options)
        self.sweep = self.step._sweep

    def __call__(self, data=DATA, batch_size=4, **options):
        return self.step(None, data, batch_size, **options)["m"]


class Predicted:
    """The same, by inference."""

    where = "predict"

    def __init__(self, fn, world=2, cadence=None, **options):
        self.fn = lambda params, batch: fn(batch)
        self.options = {"devices": DEVICES[:world], "cadence": cadence, "emulate": None} | options
        keys = [_same(self.options[name]) for name in ("cadence", "emulate")]
        self.sweep = _kept_sweep(_same_function(self.fn), tuple(self.options["devices"]), *keys)

    def __call__(self, data=DATA, batch_size=4, **options):
        outputs = elche.predict(self.fn, None, data, batch_size, **self.options, **options)
        return outputs.mean(dtype=np.float64)


both = pytest.mark.parametrize("kind", [Evaluated, Predicted])
WHO = [(Evaluated, 2), (Predicted, 1), (Predicted, 2)]
"""Kinds and worlds; the loop of both kinds is that of `Sweep`."""
who = pytest.mark.parametrize(("kind", "world"), [*WHO[:2], slow(*WHO[2])])


def x_of(batch):
    return batch["x"]


def assert_usable(call):
    """As if nothing had been."""
    assert call() == pytest.approx(DATA["x"].mean(dtype=np.float64), rel=1e-6)
    assert threads() == []


# -- bad input


class Told(elche.Cadence):
    """A cadence of the user's own, which gives what it was told to."""

    def __init__(self, counts):
        self.counts = counts

    def init(self, world_size):
        return self

    def update(self, state, report, verdict=elche.STABLE):
        return state


def built(where, **options):
    """Builds an evaluation, or predicts: where the parts are looked at."""
    options = {"devices": DEVICES[:2]} | options
    if where == "predict":
        return elche.predict(lambda params, batch: batch["x"], None, DATA, 4, **options)
    return elche.build_eval_step(lambda params, batch: batch, **options)


@pytest.mark.parametrize("where", ["build_eval_step", "predict"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"cadence": 8},
            TypeError,
            r"cadence must be an elche_jax\.Cadence such as ElChe\(\), got 8\.$",
        ),
        (
            {"cadence": elche.EveryBatch},
            TypeError,
            r"cadence must be an .*Cadence .* got <class",
        ),
        (
            {"cadence": elche.AdaComm()},
            ValueError,
            r"cadence must not follow the loss, as there is none, got AdaComm\. Leave it out\.$",
        ),
        ({"emulate": [1, 2]}, TypeError, r"emulate must be an emulation of .*lab, got \[1, 2\]\.$"),
        ({"emulate": EmulatedSpeeds}, TypeError, r"emulate must be an emulation of .* got <class"),
        ({"devices": []}, ValueError, r"devices must hold at least one device, got none\.$"),
        ({"devices": DEVICES[:1] * 2}, ValueError, r"no device may appear twice in devices, got"),
        ({"devices": ["cpu"]}, TypeError, r"devices must be jax\.Device objects .* got str\.$"),
        ({"devices": 2}, TypeError, r"devices must be a sequence of jax\.Device .* got int\."),
    ],
)
def test_parts_that_do_not_fit(where, options, error, message):
    with pytest.raises(error, match=rf"^{where}: {message}"):
        built(where, **options)


@pytest.mark.parametrize("where", ["build_eval_step", "predict"])
def test_parts_that_do_not_fit_the_devices(where):
    with pytest.raises(ValueError, match=r"^EmulatedSpeeds: schedule .* \(2\), got 3\."):
        built(where, emulate=EmulatedSpeeds([1, 2, 3]))


def test_what_is_not_callable():
    with pytest.raises(
        TypeError, match=r"^build_eval_step: metric_fn must be callable, got int\.$"
    ):
        elche.build_eval_step(3)
    with pytest.raises(TypeError, match=r"^predict: apply_fn must be callable, got dict\.$"):
        elche.predict({}, None, DATA, 4)


@both
@pytest.mark.parametrize(
    ("data", "batch_size", "options", "error", "message"),
    [
        (DATA, 4, {"window_bytes": 0}, ValueError, r"{}: window_bytes must be at least 1, got 0\."),
        (DATA, 4, {"window_bytes": 1.5}, TypeError, r"{}: window_bytes must be an integer, got"),
        (
            DATA, 4, {"window_bytes": 31, "placement": "stream"}, ValueError,
            r"data: window_bytes must hold at least one microbatch \(32 bytes\), got 31\.",
        ),
        (DATA, 4, {"mask_key": 3}, TypeError, r"{}: mask_key must be a string, got int\.$"),
        (DATA, 4, {"mask_key": "x"}, ValueError, r"data: mask_key must be a .* own, got 'x',"),
        (
            DATA["x"], 4, {"mask_key": "mask"}, TypeError,
            r"data: mask_key needs microbatches that are dicts, got an array of shape \(4,\) ",
        ),
        (DATA, 4, {"placement": "disk"}, ValueError, r"data: placement must be one of 'auto', "),
        (
            MapStyle(DATA), 4, {"placement": "resident"}, ValueError,
            r"data: placement='resident' needs data that is a pytree .* got a MapSource\.",
        ),
        (DATA, None, {}, TypeError, r"data: batch_size must be an integer, got None"),
        (DATA, 0, {}, ValueError, r"data: batch_size must be at least 1, got 0\.$"),
        (
            Batches(DATA, 4), 3, {}, ValueError,
            r"data: batch_size must be that of the iterator's microbatches \(4\), got 3\.",
        ),
        (5, 4, {}, TypeError, r"data must be a pytree of arrays, .* got int\.$"),
        ([DATA] * 2, 4, {}, TypeError, r"list indices must (.|\n)*\ndata: A list is a pytree; to"),
        (examples(0), 4, {}, ValueError, r"data must hold at least one example, got 0\.$"),
        (
            iter(()), None, {}, ValueError,
            r"data must hold at least one microbatch, but the iterator is empty\.$",
        ),
    ],
)  # fmt: skip
def test_arguments_out_of_range(kind, data, batch_size, options, error, message):
    """Found before anything is compiled or started."""
    call = kind(x_of)
    with pytest.raises(error, match="^" + message.replace("{}", kind.where)):
        call(data, batch_size, **options)
    assert call.sweep.report().compile_misses == 0 and threads() == []


@pytest.mark.parametrize("data", [DATA, Batches(DATA, 4), Batches(DATA, 3)])
def test_a_scalar_for_data_that_may_not_fill_the_last_microbatch(data):
    """An iterable may end with a smaller one, nobody knows before."""
    call = Evaluated(lambda batch: batch["x"].mean())
    batch_size = 3 if data is DATA else None
    for _ in range(2):  # and after a call that was fine
        with pytest.raises(ValueError, match=r"^metric_fn: metric 'm' must have one entry per ex"):
            call(data, batch_size)
        assert_usable(call)


def test_what_is_no_result():
    with pytest.raises(TypeError, match=r"^metric_fn: metric 'm' must be a scalar, an array of"):
        Evaluated(lambda batch: batch["x"][:2])()
    with pytest.raises(TypeError, match=r"^predict: every output of apply_fn must have one entry"):
        Predicted(lambda batch: batch["x"].sum())()


@both
@pytest.mark.parametrize(
    ("cadence", "message"),
    [
        (Told((0, 0)), r"Told: counts must have one entry per device \(2\), none below 0 and not"),
        (Told((1, -1)), r"Told: counts must have .* got \(1, -1\) for window 0"),
        (elche.Replay([(1, 2)]), r"Replay"),
    ],
)
def test_counts_that_are_none(kind, cadence, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(x_of, cadence=cadence)()
    assert threads() == []


# -- times


@pytest.mark.parametrize(
    ("kind", "platform", "busy"),
    [
        # the faster one's next window begins with the slower one's
        (SweepPipeline, "cpu", (2.0, 6.0)),
        (SweepPipeline, "gpu", (6.0, 6.0)),  # here it begins at once, and has taken so long
        (Pipeline, "cpu", (6.0, 6.0)),
    ],
)
def test_when_a_device_begins_its_next_window(kind, platform, busy, monkeypatch):
    """Two windows dispatched at 0 ms; the devices end them at 2 and 6, and at 8 and 12 ms."""
    devices = tuple(Mock(platform=platform, process_index=0) for _ in range(2))
    feed = SimpleNamespace(fleet=Lane(devices, (0, 1)))
    scheduler, measured = LiveScheduler(Controller(elche.EveryBatch()), 2, hint=False), []
    monkeypatch.setattr(scheduler, "observe", lambda record, at, run: measured.append(record))
    monkeypatch.setattr("elche_jax.train.pipeline.ENDS", Ends())
    watch = FiniteWatch(FinitePolicy("ignore"), devices)
    run = kind(feed, scheduler, elche.Cursor(), watch, None, None, Options())
    for number, ends in enumerate([(0.002, 0.006), (0.008, 0.012)]):
        plan = WindowPlan(number, 0, (1, 1), 2)
        run._flights[number] = InFlight(plan, 0.0, Launch(None, number, 0.0, plan.counts))
        run.on_complete(WindowTimes(number, 0.0, ends, ends))
    assert [record.busy_ms for record in measured] == [
        pytest.approx((2.0, 6.0)),
        pytest.approx(busy),
    ]


# -- errors and interrupts in the middle


class Broken(MapStyle):
    """A data set whose example 9 cannot be read."""

    def __init__(self, data, error):
        super().__init__(data)
        self.error = error

    def __getitem__(self, i):
        if i == 9:
            raise self.error
        return super().__getitem__(i)


@table(who=WHO[:2], error=[OSError("example 9 is damaged"), KeyboardInterrupt("now")])
def test_an_error_in_the_data_surfaces_with_its_traceback(who, error):
    kind, world = who
    call, data = kind(x_of, world, elche.EveryBatch()), Broken(DATA, error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)) as caught:
            call(data, 2)
        assert threads() == []
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert any(frame.name == "__getitem__" for frame in frames)
    assert call.sweep.scheduler.windows == 4 // world, "it was half way"
    assert_usable(call)


@who
def test_an_error_in_an_iterator_surfaces(kind, world):
    def broken():
        yield from Batches(examples(8), 4)
        raise RuntimeError("stream broke")

    call = kind(x_of, world, elche.EveryBatch())
    with pytest.raises(RuntimeError, match="stream broke"):
        call(broken(), None)
    assert threads() == []
    assert_usable(call)


@who
def test_an_error_in_the_function_while_it_is_traced(kind, world):
    faulty = [True]

    def fn(batch):
        if faulty[0]:
            raise KeyError("mine")
        return batch["x"]

    call = kind(fn, world)
    with pytest.raises(KeyError, match="mine"):
        call()
    assert threads() == []
    faulty[0] = False
    assert_usable(call)


@who
def test_an_error_in_the_function_while_it_runs(kind, world):
    def check(batch):
        if bad in batch["index"]:
            raise ValueError(f"example {bad} is odd")
        return batch["x"]

    def fn(batch):
        shape = jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype)
        return jax.pure_callback(check, shape, batch)

    call, bad = kind(fn, world, elche.EveryBatch()), 9
    with pytest.raises(jax.errors.JaxRuntimeError, match="example 9 is odd"):
        call()
    assert threads() == []
    bad = -1
    assert_usable(call)


@table(
    who=WHO,
    place=[
        (Pipeline, "on_request"),
        (Pipeline, "_admit"),
        (Launch, "__call__"),
        (Pipeline, "_hand_over"),
        (Pipeline, "finish"),
    ],
)
def test_an_interrupt_anywhere_in_the_loop(who, place, monkeypatch):
    """Ctrl-C at some moment while windows are in flight."""
    (kind, world), (owner, at) = who, place
    call = kind(x_of, world, elche.EveryBatch())
    method, seen = getattr(owner, at), 0

    def interrupted(run, *args):
        nonlocal seen
        seen += 1
        if seen == (1 if at == "finish" else 3):
            raise KeyboardInterrupt
        return method(run, *args)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            call(DATA, 2)
    # while its traceback is held, and all that is in it
    assert threads() == [] and caught.tb is not None
    assert_usable(call)


@who
def test_an_interrupt_while_results_are_read(kind, world, monkeypatch):
    """The loop waits there most of the time, outside of the generator of windows."""
    call = kind(x_of, world, elche.EveryBatch())

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if kind is Predicted:
            patched.setattr("elche_jax.train.evaluate._parts", interrupted)
        else:
            patched.setattr("elche_jax.train.evaluate.np.asarray", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            call(DATA, 2)
    assert threads() == [] and caught.tb is not None
    assert_usable(call)


@who
def test_an_interrupt_that_came_while_a_device_was_emulated(kind, world):
    """It cannot be raised in the program; the loop does it."""
    emulate = EmulatedSpeeds([0.0] * world)
    call = kind(x_of, world, elche.EveryBatch(), emulate=emulate)
    emulate._held_back.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        call()
    assert call.sweep.scheduler.windows == 1 and threads() == []
    assert_usable(call)


@who
def test_results_that_are_dropped_half_way_end_the_threads(kind, world):
    call = kind(x_of, world, elche.EveryBatch())
    how = {"batch_size": 2, "mask_key": None, "placement": "stream", "window_bytes": 2**20}
    results = call.sweep.results(lambda *_: None, None, None, DATA, **how)
    assert threads() == []
    next(results)
    assert bool(threads()) == (world > 1)
    del results
    assert threads() == []
    assert_usable(call)


def test_all_goes_with_the_last_reference():
    """Programs and data on the devices, at once: the garbage collector may take its time."""
    gc.disable()
    try:
        call = Evaluated(x_of)
        data = jax.tree.map(jnp.asarray, DATA)
        call(data, 4, placement="resident")
        held = weakref.ref(call.sweep._loading._resident[1]["x"])
        assert held() is not None
        del call
        assert held() is None
    finally:
        gc.enable()


SCRIPT = """
import threading
import jax
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

class Data:
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, i):
        if i == 400:
            print("running", flush=True)
        return np.float32(i)

options = {{"devices": jax.devices()[: {world}], "emulate": {emulate}}}
evaluate = elche.build_eval_step(lambda params, x: {{"m": x}}, **options)
apply_fn = lambda params, x: x
calls = [
    lambda data: evaluate(None, data, 4)["m"],
    lambda data: elche.predict(apply_fn, None, data, 4, **options).mean(),
]
for call in calls:
    try:
        call(Data(10**6))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    for thread in threading.enumerate():
        if thread.name.startswith("elche-"):
            thread.join(60)
            assert not thread.is_alive(), thread.name
    print(call(Data(50)), flush=True)
"""


@pytest.mark.slow  # test_an_interrupt_anywhere_in_the_loop; test_train_lifecycle has a signal
@pytest.mark.parametrize(("world", "emulate"), [(1, None), (4, "EmulatedSpeeds([1.0] * 4)")])
def test_ctrl_c(world, emulate):
    """A real process, a real signal; then the same call again, and a clean end."""
    code = SCRIPT.format(world=world, emulate=emulate)
    with children.started(sys.executable, "-c", code) as child:
        for _ in range(2):
            assert child.stdout.readline().strip() == "running"
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline().strip() == "interrupted"
            assert child.stdout.readline().strip() == "24.5"
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (0, "")
