"""C8: with one device the program is the plain jit step."""

import threading

import jax
import optax
from models import Cnn, Script, assert_close, digits, host, run, scalar_loss, variables

import elche_jax as elche
from elche_jax.engine.mapped import Mapped


def programs(train):
    """The text of every program the training step compiled."""
    return [program.built.as_text() for program in train._cache._programs.values()]


def plain_step(model, tx):
    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(scalar_loss(model))(params, batch, jax.random.key(0))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def plain(model, params, windows, count):
    """A plain jit loop over the same microbatches."""
    tx = optax.adam(1e-3)
    step, opt_state = plain_step(model, tx), tx.init(params)
    size = 8 * count
    for i in range(windows):
        batch = {name: leaf[size * i : size * (i + 1)] for name, leaf in digits().items()}
        params, opt_state = step(params, opt_state, batch)
    return params


def test_default_is_a_step_per_microbatch():
    model = Cnn()
    params = variables(model)["params"]
    train = elche.build_train_step(scalar_loss(model), optax.adam(1e-3), devices=jax.devices()[:1])
    state = train.init(params)
    seen = set()
    # streamed: rows of data on the device are copied by a loop
    windows = train.windows(digits(), 8, shuffle=False, placement="stream")
    for number, window in enumerate(windows):
        state, _ = train(state, window)
        seen |= {thread.name for thread in threading.enumerate()}
        if number == 19:
            break
    assert window.counts == (1,)
    assert not any(name.startswith("elche-") for name in seen)
    assert_close(host(state.params), plain(model, params, 20, 1), rtol=1e-5, atol=1e-6)
    (text,) = programs(train)
    tx, batch = optax.adam(1e-3), {name: leaf[:8] for name, leaf in digits().items()}
    by_hand = plain_step(model, tx).lower(params, tx.init(params), batch).compile().as_text()
    # the compiler may have made loops of its own, of a scatter, say
    assert "all-reduce" not in text and text.count("while(") == by_hand.count("while(")


def test_large_windows_need_no_collective_either():
    model = Cnn()
    params = variables(model)["params"]
    train = elche.build_train_step(
        scalar_loss(model), optax.adam(1e-3), devices=jax.devices()[:1],
        cadence=elche.FixedTotal(5),
    )  # fmt: skip
    state, _ = run(train, train.init(params), digits(), 8, windows=6, shuffle=False)
    assert_close(host(state.params), plain(model, params, 6, 5), rtol=2e-5, atol=2e-6)
    assert all("all-reduce" not in text for text in programs(train))


def test_windows_beyond_the_capacity():
    """Several calls and one combine give what one call gives."""
    model = Cnn()
    params = variables(model)["params"]

    def trained(**options):
        train = elche.build_train_step(
            scalar_loss(model), optax.adam(1e-3), devices=jax.devices()[:1],
            cadence=Script([(11,), (2,)]),
        )  # fmt: skip
        state, used = run(train, train.init(params), digits(), 8, windows=4, **options)
        return host(state.params), [len(window.calls) for window in used]

    large, calls = trained(placement="stream")
    assert calls == [1, 1, 1, 1]
    microbatch = 8 * (8 * 8 * 4 + 4)
    small, calls = trained(placement="stream", window_bytes=3 * microbatch)
    assert calls == [4, 1, 4, 1]
    assert_close(small, large, rtol=1e-5, atol=1e-6)


def test_two_devices_do_need_one(devices4):
    """The check of the program's text can fail."""
    model = Cnn()
    train = elche.build_train_step(
        scalar_loss(model), optax.adam(1e-3), devices=devices4, cadence=Script([(1, 1, 1, 1)])
    )
    run(train, train.init(variables(model)["params"]), digits(), 8, windows=1)
    reductions = [text.count(" all-reduce(") for text in programs(train)]
    assert sorted(reductions) == [0, 1], "one collective, in the combine alone"


def test_stacking_is_no_copy_of_what_is_read_on_one_device():
    """The leading axis of one is a bitcast; with donation XLA may copy a result (note 0013)."""
    mapped = Mapped(lambda x: (x * 2, None), jax.devices()[:1], donate=(0,))
    text = mapped.compile(jax.ShapeDtypeStruct((1, 64, 64), "float32")).as_text()
    assert " copy(" not in text
