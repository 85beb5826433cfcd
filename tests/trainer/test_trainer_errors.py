"""Wrong arguments of `Trainer`, `fit` and what one hands to them."""

import math

import numpy as np
import optax
import pytest
from fitting import DATA, HELD_OUT, PARAMS, loss_fn, metric_fn, shared, trainer
from hypothesis import example, given, strategies as st

import elche_jax as elche
from elche_jax.observe.writers import CSVWriter
from elche_jax.trainer.evaluation import Patience

EVALUATION = elche.Evaluation(metric_fn, HELD_OUT, 16)


@pytest.fixture(scope="module")
def one():
    return shared()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"params": None}, TypeError, r"^Trainer\.fit: params must be given, got None\.$"),
        ({"data": None}, TypeError, r"^Trainer\.fit: data must be given, got None\.$"),
        ({"batch_size": None}, TypeError, r"^data: batch_size must be an integer, got None"),
        ({"batch_size": 0}, ValueError, r"^data: batch_size must be at least 1, got 0\.$"),
        ({"epochs": 0}, ValueError, r"^Trainer\.fit: epochs must be at least 1, got 0\.$"),
        ({"epochs": 1.0}, TypeError, r"^Trainer\.fit: epochs must be an integer, got 1\.0"),
        ({"max_windows": 0}, ValueError, r"^Trainer\.fit: max_windows must be at least 1, got 0"),
        ({"log_every": 0}, ValueError, r"^Trainer\.fit: log_every must be at least 1, got 0"),
        ({"max_seconds": 0}, ValueError, r"^Trainer\.fit: max_seconds must be above 0, got 0"),
        ({"evaluation": metric_fn}, TypeError, r"^Trainer\.fit: evaluation must be of type Eval"),
        ({"early_stopping": 3}, TypeError, r"^Trainer\.fit: early_stopping must be of type Early"),
        ({"checkpoints": "a"}, TypeError, r"^Trainer\.fit: checkpoints must be of type Checkpoi"),
        ({"run_dir": 3}, TypeError, r"^Trainer\.fit: run_dir must be a path or None, got 3 \(int"),
        ({"resume": "yes"}, ValueError, r"^Trainer\.fit: resume must be one of 'never', 'auto', "),
        ({"progress": 1}, TypeError, r"^Trainer\.fit: progress must be of type bool, got 1 \(int"),
        ({"callbacks": [print]}, TypeError, r"^Trainer\.fit: callbacks\[0\] must be of type Call"),
        ({"callbacks": 3}, TypeError, r"^Trainer\.fit: callbacks must be a sequence of Callback"),
        ({"writers": ["a"]}, TypeError, r"^Trainer\.fit: writers\[0\] must be a Writer: scalars"),
        (
            {"writers": [CSVWriter]}, TypeError,
            r"^Trainer\.fit: writers\[0\] must be a Writer: scalars\(step, values\) and close\(\), "
            r"got <class '.*CSVWriter'> \(",
        ),
        (
            {"resume": "auto"}, ValueError,
            r"^Trainer\.fit: resume must be 'never' without checkpoints, got 'auto'\. Pass chec",
        ),
        (
            {"checkpoints": elche.Checkpoints()}, ValueError,
            r"^Trainer\.fit: checkpoints must have a folder if there is no run_dir, got None",
        ),
        ({"nonsense": 1}, TypeError, r"^Trainer\.fit: nonsense is not an argument; there are m"),
        (
            {"log_every": 3}, ValueError,
            r"^Trainer\.fit: log_every must be None without writers and run_dir, got 3\. There is",
        ),
    ],
)  # fmt: skip
def test_arguments_of_fit(one, options, error, message):
    arguments = {"params": PARAMS, "data": DATA, "batch_size": 8, "progress": False} | options
    with pytest.raises(error, match=message):
        one.fit(**arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"metric_fn": 3}, TypeError, r"^Evaluation: metric_fn must be callable, got 3 \(int\)"),
        (
            {"data": iter([HELD_OUT]), "batch_size": None},
            TypeError,
            r"^Evaluation: data must be readable in every evaluation, got list_iterator\. Pass "
            r"arrays, a dataset, or an object whose __iter__ starts anew\.$",
        ),
        ({"batch_size": 0}, ValueError, r"^Evaluation: batch_size must be at least 1, got 0"),
        ({"every_epochs": 0}, ValueError, r"^Evaluation: every_epochs must be at least 1, got 0"),
        (
            {"batch_size": None},
            TypeError,
            r"^Evaluation: batch_size must be an integer unless data is an iterable of micro",
        ),
        ({"every_windows": 0}, ValueError, r"^Evaluation: every_windows must be at least 1, got"),
        (
            {"every_epochs": None}, ValueError,
            r"^Evaluation: every_epochs must be at least 1 if every_windows is None, got None",
        ),
    ],
)  # fmt: skip
def test_arguments_of_an_evaluation(options, error, message):
    with pytest.raises(error, match=message):
        elche.Evaluation(**{"metric_fn": metric_fn, "data": HELD_OUT, "batch_size": 16} | options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"monitor": 3}, TypeError, r"^EarlyStopping: monitor must be of type str, got 3 \(int\)"),
        ({"mode": "best"}, ValueError, r"^EarlyStopping: mode must be one of 'min', 'max', got "),
        ({"patience": 0}, ValueError, r"^EarlyStopping: patience must be at least 1, got 0\.$"),
        ({"min_delta": -1}, ValueError, r"^EarlyStopping: min_delta must be at least 0, got -1"),
    ],
)
def test_arguments_of_early_stopping(options, error, message):
    with pytest.raises(error, match=message):
        elche.EarlyStopping(**options)


def test_the_trainers_own_arguments():
    with pytest.raises(TypeError, match=r"^Trainer: config must be of type DDPConfig, got 3"):
        elche.Trainer(loss_fn, optax.sgd(0.1), config=3)
    with pytest.raises(TypeError, match=r"^build_train_step: loss_fn must be callable, got int"):
        elche.Trainer(3, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"^Trainer: timeline must be a Timeline, got 'x.jsonl'"):
        elche.Trainer(loss_fn, optax.sgd(0.1), timeline="x.jsonl")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lr'"):
        elche.Trainer(loss_fn, optax.sgd(0.1), lr=1)


@pytest.mark.parametrize("evaluation", [None, EVALUATION])
def test_a_metric_that_nobody_gives(one, evaluation):
    known = ("'error', " if evaluation else "") + "'loss', 'mae'"
    with pytest.raises(ValueError, match=rf"^EarlyStopping: monitor must be one of {known}, got "):
        one.fit(
            PARAMS, DATA, 8, 2, evaluation=evaluation, progress=False,
            early_stopping=elche.EarlyStopping("accuracy"),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["examples_per_s", "seconds"])
def test_a_metric_named_like_one_of_epochs(name):
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0], {name: 1.0}

    one = trainer(loss=loss)
    message = f"^loss_fn: aux must not use the name '{name}', which every epoch of Trainer rep"
    with pytest.raises(TypeError, match=message):
        one.fit(PARAMS, DATA, 8, 1, progress=False)


def test_these_are_the_names_that_epochs_report(one):
    (epoch,) = one.fit(PARAMS, DATA, 8, 1, progress=False).history
    assert epoch.values.keys() - {"loss", "mae"} == {"examples_per_s", "seconds"}


def test_a_metric_named_like_one_of_the_evaluation():
    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0], {"eval_error": 1.0}

    message = r"^metric_fn: metrics must not use the name 'error', as the loss reports 'eval_er"
    with pytest.raises(ValueError, match=message):
        trainer(1, loss).fit(PARAMS, DATA, 8, 1, evaluation=EVALUATION, progress=False)


@pytest.mark.parametrize(
    ("name", "options", "taken"),
    [
        ("step", {"run_dir": "run"}, "the first column of metrics.csv"),
        ("window_loss", {"log_every": 2, "run_dir": "run"}, "the mean of 'loss' with log_every"),
    ],
)
def test_a_metric_with_a_name_of_the_table(name, options, taken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loss(params, batch, rng):
        return loss_fn(params, batch, rng)[0], {name: 1.0}

    message = f"^loss_fn: metrics must not use the name '{name}', which is {taken}. "
    one = trainer(1, loss)
    with pytest.raises(ValueError, match=message):
        one.fit(PARAMS, DATA, 8, 1, progress=False, **options)
    assert one.fit(PARAMS, DATA, 8, 1, progress=False).history[0].metrics[name] == 1


def test_a_score_that_nobody_gives(one, tmp_path):
    saving = elche.Checkpoints(tmp_path, keep_best=1, monitor="accuracy")
    with pytest.raises(ValueError, match=r"^Checkpoints: monitor must be one of 'loss', 'mae', go"):
        one.fit(PARAMS, DATA, 8, 2, checkpoints=saving, progress=False)


@given(
    st.lists(
        st.integers(0, 5).map(float) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=12
    ),
    st.integers(1, 4), st.sampled_from(["min", "max"]), st.sampled_from([0.0, 1.0]),
)  # fmt: skip
@example([1.0, math.inf, 2.0, 3.0], 2, "max", 0.0)
@example([-math.inf, 2.0, 1.0, 1.0], 2, "min", 0.0)
def test_patience_by_its_definition(values, patience, mode, delta):
    rule = elche.EarlyStopping("x", mode, patience, delta)
    state, stopped = Patience(), None
    for at, value in enumerate(values):
        state = state.update(rule, value)
        if stopped is None and state.over(rule):
            stopped = at
    # independently: the run ends where `patience` values in a row beat none before them
    best, since, want = None, 0, None
    for at, value in enumerate(values):
        signed = -value if mode == "min" else value
        better = np.isfinite(value) and (best is None or signed > best + delta)
        best, since = (signed, 0) if better else (best, since + 1)
        if want is None and since == patience:
            want = at
    assert stopped == want
