"""Threads end, errors surface, nothing hangs: whatever the loop does."""

import gc
import signal
import sys
import threading
import traceback
import weakref
from functools import cache

import children
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow, table
from small import PARAMS, Broken, build, data, loss_fn, threads
from waits import eventually

import elche_jax as elche
from elche_jax.engine.replicas import replicate_over
from elche_jax.lab import EmulatedSpeeds


@cache
def shared(world, loss=loss_fn):
    """A step for all tests that begin with `init`, and look neither at memory nor at references."""
    return build(world, loss=loss)


def test_threads_live_as_long_as_the_windows():
    train = shared(2)
    state = train.init(PARAMS)
    windows = train.windows(data(), 4)
    assert set(threads()) == {"elche-prefetch", "elche-watch-0", "elche-watch-1"}
    for window in windows:
        state, _ = train(state, window)
    assert threads() == []
    assert next(windows, None) is None
    windows.close()


def test_leaving_the_loop_early_ends_them():
    train = shared(2)
    state = train.init(PARAMS)
    for window in train.windows(data(), 4):
        state, _ = train(state, window)
        break
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize("kind", ["iterator", slow("dataset")])
def test_nothing_is_read_any_more_after_the_loop(kind):
    """The rest of the window that is being read is left to the user."""
    reading, go_on, read = threading.Event(), threading.Event(), []

    def example(number):
        read.append(number)
        if number == 10:  # in the middle of the second window
            reading.set()
            assert go_on.wait(60)
        return {"x": np.ones(3, "float32")}

    class Examples:
        def __len__(self):
            return 100

        def __getitem__(self, number):
            return example(number)

    rows = ({"x": example(number)["x"][None]} for number in range(100))
    train = build(2, cadence=elche.Replay([(1, 1), (20, 20)]))
    state = train.init(PARAMS)
    size = {} if kind == "iterator" else {"batch_size": 1, "shuffle": False}
    for window in train.windows(rows if kind == "iterator" else Examples(), **size):
        state, _ = train(state, window)
        assert reading.wait(60)
        break
    (reader,) = (one for one in threading.enumerate() if one.name == "elche-prefetch")
    go_on.set()
    reader.join(60)
    assert not reader.is_alive() and read[-1] == 10
    if kind == "iterator":
        assert next(rows)["x"].shape == (1, 3) and read[-1] == 11


def test_an_error_in_the_loop_ends_them():
    train = shared(2)
    state = train.init(PARAMS)

    def loop(state):
        for window in train.windows(data(), 4):
            state, _ = train(state, window)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop(state)
    gc.collect()
    assert threads() == []


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_in_the_data_surfaces_with_its_traceback(world):
    train = shared(world)
    state, done = train.init(PARAMS), 0
    with pytest.raises(OSError, match="example 17 is damaged") as caught:
        for window in train.windows(Broken(), 2, shuffle=False):
            state, _ = train(state, window)
            done += 1
    assert done > 0 and threads() == []
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.name == "__getitem__" for frame in frames)
    # nothing is lost: the state is that of the windows before
    assert int(elche.unreplicate(state.step)) == done


def test_an_error_in_an_iterator_surfaces():
    def batches():
        yield {"x": np.ones((4, 3), "float32")}
        yield {"x": np.ones((4, 3), "float32")}
        raise RuntimeError("stream broke")

    train = shared(2)
    state = train.init(PARAMS)
    with pytest.raises(RuntimeError, match="stream broke"):
        for window in train.windows(batches()):
            state, _ = train(state, window)
    assert threads() == []


@pytest.mark.parametrize("world", [1, 2])
def test_windows_that_are_not_used_are_given_up(world):
    train = shared(world)
    state, used = train.init(PARAMS), 0
    for number, window in enumerate(train.windows(data(), 2)):
        if number % 3 == 1:
            state, _ = train(state, window)
            used += 1
    assert number == 64 // (2 * world) - 1
    assert int(elche.unreplicate(state.step)) == used
    assert len(train.records) == used


@pytest.mark.parametrize("world", [1, 2])
def test_windows_may_be_used_after_their_iterator_ended(world):
    train = shared(world)
    state = train.init(PARAMS)
    windows = list(train.windows(data(), 8))
    assert threads() == []
    for window in windows:
        state, metrics = train(state, window)
    assert int(elche.unreplicate(state.microbatches)) == 8
    assert bool(jnp.isfinite(metrics["loss"]))


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_run_while_the_first_is_open(world):
    train = shared(world)
    state = train.init(PARAMS)
    with train.windows(data(), 4) as first, train.windows(data(), 4) as second:
        for a, b in zip(first, second, strict=True):
            state, _ = train(state, a)
            state, _ = train(state, b)
    assert int(elche.unreplicate(state.microbatches)) == 32
    assert threads() == []


def nan_loss(params, batch, rng):
    """Not a number in the loss, finite in the gradient."""
    return loss_fn(params, batch, rng) + jnp.where(batch["x"].max() > 50, jnp.nan, 0.0)


def nan_gradient(params, batch, rng):
    """Finite in the loss, not a number in the gradient."""
    return loss_fn(params, batch, rng) + jnp.sqrt(
        jnp.where(batch["x"].max() > 50, 0.0, 1.0) * params["w"][0] ** 2
    )


def infinite(params, batch, rng):
    return (params["w"] * jnp.inf).sum()


BAD_LOSSES = table(loss=[nan_loss, nan_gradient], world=[2, 1])


def poisoned():
    found = data(32)
    found["x"][20] = 100.0
    return found


@BAD_LOSSES
def test_a_nonfinite_gradient_is_raised_and_never_applied(world, loss):
    train = shared(world, loss)
    state = train.init(PARAMS)
    with pytest.raises(
        elche.NonFiniteError, match=rf"window {20 // (4 * world)} \(epoch 0, counts .* dropped"
    ):
        for window in train.windows(poisoned(), 4, shuffle=False):
            state, _ = train(state, window)
    assert np.isfinite(elche.unreplicate(state.params)["w"]).all()
    assert threads() == []


@BAD_LOSSES
def test_a_nonfinite_gradient_can_be_skipped(world, loss):
    train = build(world, loss=loss, nonfinite="skip")
    state, finite = train.init(PARAMS), []
    for window in train.windows(poisoned(), 4, shuffle=False):
        before = np.asarray(elche.unreplicate(state.params)["w"])
        state, metrics = train(state, window)
        finite.append(bool(metrics["finite"]))
        same = np.array_equal(before, elche.unreplicate(state.params)["w"])
        assert same != finite[-1]
    assert finite.count(False) == 1 and not finite[20 // (4 * world)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("leave", ["with", "break", "hold"])
def test_a_nonfinite_window_in_flight_is_raised_after_leaving_early(world, leave):
    train = shared(world, nan_loss)
    state = train.init(PARAMS)
    bad = 20 // (4 * world)

    def loop(windows, state):
        for window in windows:
            state, _ = train(state, window)
            if window.index == bad:
                break
        return state

    if leave == "with":
        with (
            pytest.raises(elche.NonFiniteError, match=f"window {bad} "),
            train.windows(poisoned(), 4, shuffle=False) as windows,
        ):
            state = loop(windows, state)
    else:
        windows = [train.windows(poisoned(), 4, shuffle=False)]
        state = loop(windows[0] if leave == "hold" else windows.pop(), state)
        with pytest.raises(elche.NonFiniteError, match=f"window {bad} "):
            train.windows(data(), 4)
        for held in windows:
            held.close()
    train.windows(data(), 4).close()  # told once


@pytest.mark.parametrize("world", [1, 2])
def test_a_call_that_fails_leaves_the_loop_usable(world):
    train = shared(world)
    state, wrong = train.init(PARAMS), build(world).init({"w": np.ones(5, "float32")})
    seen = 0
    for window in train.windows(data(), 8):
        if window.index == 1:
            with pytest.raises(
                ValueError, match=r"another: leaf \.params\['w'\] is float32\[\d, 5\] instead of "
            ):
                train(wrong, window)
        state, _ = train(state, window)
        seen += 1
    assert int(elche.unreplicate(state.step)) == seen == 8 // world


@pytest.mark.parametrize("world", [1, 2])
def test_the_metrics_are_the_users_own(world):
    train = shared(world)
    state = train.init(PARAMS)
    for window in train.windows(data(), 8):
        state, metrics = train(state, window)
        metrics["loss"] = float(metrics.pop("loss"))
        del metrics["finite"]
    assert len(train.records) == 8 // world


def test_a_wait_that_was_interrupted_may_be_repeated():
    """Ctrl-C while `train` waits for a free place, caught; the same window goes on."""
    train = build(2, emulate=EmulatedSpeeds([2.0, 2.0]))
    state, run, seen = train.init(PARAMS), None, 0
    for window in train.windows(data(), 4):
        if window.index == 3:
            run = train.pipeline_of(window, "test")
            wait_for, run._changed.wait_for = run._changed.wait_for, interrupted
            with pytest.raises(KeyboardInterrupt):
                train(state, window)
            run._changed.wait_for = wait_for
        state, _ = train(state, window)
        seen += 1
    assert int(elche.unreplicate(state.step)) == seen == 8


def interrupted(*_):
    raise KeyboardInterrupt


@table(world=[1, 2], rule=[None, elche.ParameterAveraging()])
def test_windows_trained_after_their_iterator_are_looked_at(world, rule):
    """What is not finite is heard of two windows later, or by whatever lets the run go."""

    train = build(world, loss=infinite, averaging=rule, cadence=elche.EveryBatch())
    state = train.init(PARAMS)
    first, second, *others = train.windows(data(), 4)
    state, _ = train(state, first)
    state, _ = train(state, second)
    with pytest.raises(elche.NonFiniteError, match="window 0"):
        for window in others:
            state, _ = train(state, window)
    state = train.init(PARAMS)
    state, _ = train(state, next(train.windows(data(), 4)))
    with pytest.raises(elche.NonFiniteError, match="window 0"):
        train.windows(data(), 4)


def test_a_window_is_data_and_keeps_its_run():
    """It may be used when its iterator is gone; whoever drops it drops all."""
    train = build(2)
    state, windows = train.init(PARAMS), train.windows(data(), 4)
    window = next(windows)
    assert sorted(vars(window)) == ["calls", "cursor", "plan", "run"]
    assert not hasattr(window.run, "__dict__")  # nothing but an identity
    windows.close()
    run = weakref.ref(train.pipeline_of(window, "test"))
    del windows
    gc.collect()
    state, metrics = train(state, window)
    assert int(elche.unreplicate(state.step)) == 1 and np.isfinite(metrics["loss"])
    train.settle()
    del window
    gc.collect()
    assert run() is None


def test_resident_data_are_not_held_by_the_run_before(monkeypatch):
    """Data above half a device's memory can be placed anew in every epoch."""
    train = build(2)
    state, placed = train.init(PARAMS), []

    def watched(fleet, tree):
        assert [copy for copy in placed if copy() is not None] == []
        copies = replicate_over(fleet, tree)
        placed.append(weakref.ref(copies["x"]))
        return copies

    monkeypatch.setattr("elche_jax.train.loading.replicate_over", watched)
    for epoch in range(3):
        for window in train.windows(data(16), 4, seed=epoch, placement="resident"):
            state, _ = train(state, window)
        del window
    assert len(placed) == 3


def test_init_gives_back_the_sums_of_the_run_before():
    train = build(cadence=elche.FixedTotal(4))
    params = {"w": np.ones((3, 50_001), "float32")}
    state = train.init(params)
    for window in train.windows(data(), 4):
        state, _ = train(state, window)
    del state, window

    def large():
        gc.collect()
        return [x for x in jax.live_arrays() if x.size == 2 * 3 * 50_001]

    assert large(), "the accumulator"
    train.init({"w": np.ones(3, "float32")})
    assert not large()


def test_a_run_left_early_is_heard_of_before_the_next_one():
    train = shared(2, infinite)
    state = train.init(PARAMS)
    with pytest.raises(elche.NonFiniteError, match=r"^train: .* those of window 0 "):
        for window in train.windows(data(), 4):
            train(state, window)
            break
        train.init(PARAMS)
    train.init(PARAMS)  # it was told


def test_a_run_that_is_still_open_is_heard_of_after_init():
    train = shared(2, infinite)
    state = train.init(PARAMS)
    windows = train.windows(data(), 4)
    train(state, next(windows))
    train.init(PARAMS)
    windows.close()
    with pytest.raises(elche.NonFiniteError, match=r"^train: .* those of window 0 "):
        train.windows(data(), 4)


def test_windows_of_the_run_before_init_are_not_in_the_records():
    train = shared(2)
    train.init(PARAMS)
    windows = train.windows(data(), 4)
    window = next(windows)
    train(train.init(PARAMS), window)
    windows.drain()
    windows.close()
    assert train.records == []


def test_window_bytes_are_those_of_streamed_data():
    train = shared(2)
    train.init(PARAMS)
    train.windows(data(), 4, placement="resident", window_bytes=1).close()


def test_a_window_of_another_training_step():
    a, b = shared(2), build(2)
    a.init(PARAMS)
    with (
        a.windows(data(), 8) as windows,
        pytest.raises(ValueError, match="got a window of another step"),
    ):
        b(b.init(PARAMS), next(windows))


@pytest.mark.parametrize("number", [1, 2])
def test_no_python_code_runs_as_a_window_goes(number):
    """A Ctrl-C that comes while a weak reference calls back is lost."""
    train, called = shared(number), []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename == weakref.__file__:
            called.append(frame.f_code.co_name)

    state = train.init(PARAMS)
    with train.windows(data(), 2) as windows:
        try:
            for window in windows:
                state, _ = train(state, window)
                sys.setprofile(profile)  # after the first window, which JAX traces and compiles
        finally:
            sys.setprofile(None)
    assert int(state.step[0]) > 3 and "remove" not in called


def test_two_masks_on_one_training_step_do_not_share_programs():
    """The same shapes, another program: weights must follow the mask asked for."""
    train = shared(2)

    def last_weight(**options):
        state = train.init(PARAMS)
        for window in train.windows(data(11), 4, shuffle=False, **options):
            state, metrics = train(state, window)
        return float(metrics["weight"])

    assert last_weight() == 2.0
    assert last_weight(mask_key="mask", drop_last=False) == 0.75


def signed_mean(params, batch, rng):
    value = batch["up"].mean() if "up" in batch else -batch["down"].mean()
    return params["w"][0] * 0 + value


def mean_of(rows):
    """What the loss is of data that stay on the devices."""
    train = shared(2, signed_mean)
    state = train.init(PARAMS)
    for window in train.windows(rows, 4, placement="resident"):
        state, metrics = train(state, window)
    return float(metrics["loss"])


def test_resident_data_follows_the_users_arrays():
    held = {"up": np.ones((8, 3), "float32")}
    assert mean_of(held) == 1.0
    held["up"][:] = 7.0
    assert mean_of(held) == 7.0


def test_resident_data_follow_the_names_of_the_users_arrays():
    rows = jnp.ones((8, 3))
    assert [mean_of({name: rows}) for name in ("up", "down")] == [1.0, -1.0]


SCRIPT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np, optax
import elche_jax as elche
from elche_jax.lab import EmulatedSpeeds

def loss_fn(params, batch, rng):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)

train = elche.build_train_step(
    loss_fn, optax.sgd(0.1), devices=jax.devices()[: {world}], cadence=elche.FixedTotal(20),
    emulate={emulate},
)
state = train.init({{"w": np.ones(3, "float32")}})
data = {{"x": np.ones((64, 3), "float32")}}
for window in train.windows(data, 4, epochs=None):
    state, metrics = train(state, window)
    if window.index == 5:
        print("running", flush=True)
"""


@pytest.mark.parametrize(
    ("world", "emulate"),
    [
        slow(1, None),
        slow(1, "EmulatedSpeeds([10.0])"),
        (4, "EmulatedSpeeds([10.0] * 4)"),
    ],
)
def test_ctrl_c_ends_a_run(world, emulate):
    """A real process, a real signal; it must end by KeyboardInterrupt, not hang or crash."""
    code = SCRIPT.format(world=world, emulate=emulate)
    with children.started(sys.executable, "-c", code) as process:
        assert process.stdout.readline().strip() == "running"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    # an emulated device's program may run in the main thread: there JAX may make an error
    # of its own of an interrupt
    ends = {-signal.SIGINT, 1} if emulate and world == 1 else {-signal.SIGINT}
    assert process.returncode in ends, errors[-2000:]
    assert "KeyboardInterrupt" in errors
    assert "FATAL" not in errors and "terminate called" not in errors and "Fatal" not in errors


@pytest.mark.slow  # test_a_program_that_ends_stops_its_run ends in the middle, too
def test_a_process_may_end_in_the_middle_of_everything():
    """Windows in flight, a thread that compiles: the interpreter still ends cleanly."""
    code = SCRIPT.format(world=4, emulate="EmulatedSpeeds([10.0] * 4)").replace(
        "FixedTotal(20)", "Replay([(1,) * 4, (9,) * 4] * 99)"
    )
    code = code.replace('print("running", flush=True)', "break")
    done = children.run(sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("cadence", [elche.FixedTotal(4), slow(elche.EveryBatch())])
@pytest.mark.parametrize("world", [slow(1), 2])
def test_at_most_two_windows_are_in_flight(world, cadence):
    """The loop is held back while the devices work: seen from the inside."""
    train = build(world, cadence=cadence, emulate=EmulatedSpeeds([5.0] * world))
    state, behind = train.init(PARAMS), []
    for handed, window in enumerate(train.windows(data(), 2), start=1):
        state, _ = train(state, window)
        behind.append(handed - len(train.records))
    assert max(behind) <= 2


def test_donated_arrays_are_freed_beside_the_loop():
    """By the thread that sees that the window is complete; none is kept."""
    freed = []

    def note(_):
        freed.append(threading.current_thread().name)

    speeds = EmulatedSpeeds([20.0, 20.0])  # far longer than the loop needs to drop the old state
    train = build(2, emulate=speeds)
    state, kept = train.init(PARAMS), []
    for window in train.windows(data(), 4):
        kept.append(weakref.ref(state.params["w"], note))
        state, _ = train(state, window)
    eventually(lambda: len(freed) == len(kept))
    assert len(kept) == 8 and any(name.startswith("elche-watch") for name in freed)


def test_data_on_the_devices_stay_there(monkeypatch):
    """The copy that is there is used again, however little memory is left beside it."""
    train = build(2)
    train.init(PARAMS)
    arrays = jax.tree.map(jnp.asarray, data())
    train.windows(arrays, 4).close()
    assert train._loading._resident is not None
    before = train._loading._resident[1]["x"]
    monkeypatch.setattr("elche_jax.train.loading.free_bytes", lambda devices: 0)
    train.windows(arrays, 4).close()
    assert train._loading._resident[1]["x"] is before
    train.windows(jax.tree.map(jnp.asarray, data(32)), 4).close()
    assert train._loading._resident[1]["x"] is before, "other data are streamed"


@pytest.mark.parametrize("world", [1, 2])
def test_an_iterators_first_microbatch_survives_a_failed_call(world):
    train = shared(world)
    state, seen = train.init(PARAMS), []

    def batches():
        for number in range(4):
            seen.append(number)
            yield {"x": np.full((4, 3), number, "float32")}

    iterator = batches()
    with pytest.raises(ValueError, match="batch_size must be that of the iterator's"):
        train.windows(iterator, batch_size=8)
    assert seen == [0]
    for window in train.windows(iterator):
        state, _ = train(state, window)
    assert int(elche.unreplicate(state.microbatches)) == 4


@pytest.mark.parametrize("world", [1, 2])
def test_a_window_may_be_used_twice(world):
    train = shared(world)
    state = train.init(PARAMS)
    for window in train.windows(data(), 8):
        for _ in range(3):
            state, _ = train(state, window)
    windows = 8 // world
    assert int(elche.unreplicate(state.step)) == 3 * windows
    assert len(train.records) == 3 * windows


@pytest.mark.parametrize("world", [1, 2])
def test_a_window_used_again_does_not_set_the_numbers_back(world):
    train = shared(world)
    state = train.init(PARAMS)
    windows = train.windows(data(), 8)
    first = next(windows)
    state, _ = train(state, first)
    for window in windows:
        state, _ = train(state, window)
    state, _ = train(state, first)
    assert train.run_to_dict()["next_window"] == window.index + 1
    with train.windows(data(), 8) as later:
        assert next(later).index == window.index + 1
    with train.windows(data(), 8, cursor=first.cursor) as rewound:
        train(state, next(rewound))
    assert train.run_to_dict()["next_window"] == first.index + 2, "a rewind does"


AVERAGE = {"averaging": elche.ParameterAveraging(optimizer_state="keep")}
LATE = {"averaging": elche.ParameterAveraging(optimizer_state="keep", delay=1)}


@pytest.mark.parametrize(
    "how",
    [
        slow({}, id="gradients"),
        slow(AVERAGE, id="averaging"),
        pytest.param(LATE, id="late"),
        slow({**AVERAGE, "config": elche.DDPConfig(exchange="host")}, id="host"),
    ],
)
def test_a_dropped_training_step_leaves_nothing_behind(how):
    def train_and_drop():
        def loss(params, batch, rng):
            return loss_fn(params, batch, rng)

        train = build(3, loss=loss, cadence=elche.Replay([(2, 1, 1)] * 4), **how)
        state = train.init(PARAMS)
        for window in train.windows(data(), 4):
            state, _ = train(state, window)
        train.average(state)
        return [weakref.ref(kept) for kept in (train, loss, state.params["w"])]

    def left():
        dropped = train_and_drop()
        for thread in threading.enumerate():
            if thread.name.startswith("elche-"):
                thread.join()
        gc.collect()
        assert [reference() for reference in dropped] == [None] * 3
        return len(jax.devices()[0].client.live_executables())

    first = left()
    assert left() == first


class Seen:
    """Data, a loss and an optimizer that note under which setting of JAX they are used."""

    def __init__(self):
        self.settings = {"read": set(), "loss": set(), "update": set()}

    def note(self, where):
        self.settings[where].add(jax.config.jax_default_matmul_precision)

    def __len__(self):
        return 8 * 40

    def __getitem__(self, number):
        self.note("read")
        return np.ones(3, "float32")

    def loss(self, params, batch, rng):
        self.note("loss")
        return ((params["w"] - batch) ** 2).mean()

    def optimizer(self):
        def update(updates, state, params=None):
            self.note("update")
            return updates, state

        return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    "exchange",
    [pytest.param(None, id="devices"), slow(elche.HostExchange(), id="host")],
)
def test_threads_have_the_settings_of_the_loop(exchange):
    """Some of JAX's settings hold in a thread alone. Data is read and programs are traced under
    them, also those that a thread prepares: larger ones, fused ones, those of further devices."""
    seen = Seen()
    train = elche.build_train_step(
        seen.loss, seen.optimizer(), devices=jax.devices()[:2], exchange=exchange,
        cadence=elche.Replay([(2, 2)] * 22 + [(1, 3)] * 18),
    )  # fmt: skip

    def run():
        state = train.init({"w": np.zeros(3, "float32")})
        for window in train.windows(seen, 2, epochs=1):
            state, _ = train(state, window)
            train._cache.wait()

    with jax.default_matmul_precision("highest"):
        run()
    assert set(map(frozenset, seen.settings.values())) == {frozenset({"highest"})}
    run()  # compiled anew, as `jax.jit` would be
    assert set(map(frozenset, seen.settings.values())) == {frozenset({"highest", None})}
