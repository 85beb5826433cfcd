"""`elche-jax advise`: targets, models, what the arguments change."""

import json
import sys

import jax
import pytest
from marks import slow

from elche_jax.cli import advise, main
from elche_jax.cli.models import MODELS

TARGET = """
from dataclasses import dataclass
import numpy as np, optax

@dataclass  # which looks its module up
class Kept:
    size: "int" = 256

def loss_fn(params, batch, rng):
    return {loss}

def broken():
    raise BrokenPipeError("of the target's own")

def job(devices=None):
    print("made", end="")
    x = np.ones((Kept().size, 3), "float32")
    params = {{"w": np.zeros(3, "float32")}}
    return dict(loss_fn=loss_fn, optimizer=optax.sgd(0.1), params=params, data={{"x": x}},
                batch_size=8, seconds=0.02, anchor=3, devices=devices)

def nothing():
    pass

def half():
    return {{"params": {{}}, "data": {{}}}}

value = 5
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    """Writes a module into the current folder; gives its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def target(loss="((batch['x'] @ params['w'] - 1) ** 2).mean()", name="my_job"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(TARGET.format(loss=loss))
        return path

    yield target
    for name in ("my_job", "other_job", "needs"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["my_job.py:job", slow("my_job:job")])
def test_a_target_is_measured(target, capsys, name):
    target()
    assert main(["advise", name, "--devices", "0,3", "--json", "--batch-size", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "made"
    advice = json.loads(printed.out)
    assert advice["batch_size"] == 4
    assert [device["name"][-2:] for device in advice["devices"]] == [":0", ":3"]
    assert len(advice["elche"]["counts"]) == 2


def test_the_table_is_printed(target, capsys):
    target()
    assert main(["advise", "my_job:job", "--devices", "1"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("elche: 1 device | cpu\n\ndevice ")
    assert printed.err == "mademeasuring each for 0.02 s ...\n"


def test_arguments_are_above_those_of_the_target(target, capsys, monkeypatch):
    target()
    given = {}

    def spy(**arguments):
        given.update(arguments)
        raise ValueError("enough")

    monkeypatch.setattr(advise, "advise", spy)
    assert main(["advise", "my_job:job"]) == 1
    assert (given["batch_size"], given["seconds"], given["anchor"]) == (8, 0.02, 3)
    assert (len(given["devices"]), "emulate" in given, "total" in given) == (8, False, False)
    argv = "--seconds 0.5 --anchor 7 --total 9 --devices 1,0 --emulate 5,2.5"
    assert main(["advise", "my_job:job", *argv.split()]) == 1
    assert (given["seconds"], given["anchor"], given["total"]) == (0.5, 7, 9)
    assert [device.id for device in given["devices"]] == [1, 0]
    assert given["emulate"].schedule == [5.0, 2.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_file.py:job", "no_file.py must be a file, but there is none"),
        ("no_module:job", "no_module must be a module, but there is none of this name"),
        ("no.module:job", "no.module must be a module, but there is none of this name"),
        ("my_job:other", "my_job must have a function other, but has none"),
        ("my_job:value", "my_job must have a function value, but has none"),
        (
            "my_job:nothing",
            "my_job:nothing must return a dict of arguments of elche.advise, got NoneType",
        ),
        ("my_job:half", "my_job:half must return a dict with loss_fn, optimizer"),
        ("my_job:broken", "BrokenPipeError: of the target's own (--debug shows where)"),
        (
            "needs:job",
            "ModuleNotFoundError: No module named 'not_installed' (--debug shows where)",
        ),
    ],
)
def test_targets_that_are_none(target, tmp_path, capsys, name, message):
    target()
    (tmp_path / "needs.py").write_text("import not_installed")
    assert main(["advise", name, "--devices", "0"]) == 1
    assert capsys.readouterr().err == f"elche-jax advise: {message}\n"


def test_seconds_of_a_target_that_are_no_number(target, capsys):
    path = target()
    path.write_text(path.read_text().replace("seconds=0.02", "seconds='2'"))
    assert main(["advise", "my_job.py:job", "--devices", "0"]) == 1
    message = "advise: seconds must be a number, got '2' (str)."
    assert capsys.readouterr().err.startswith(f"madeelche-jax advise: TypeError: {message}")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("1 / 0", "elche-jax advise: ZeroDivisionError: division by zero (--debug"),
        ("params['w'].sum() / 0", "elche-jax advise: NonFiniteError: "),
    ],
)
def test_a_step_that_fails(target, capsys, loss, message):
    target(loss, "other_job")
    assert main(["advise", "other_job:job", "--devices", "0,1"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("mademeasuring")
    assert len(err) == 2 and err[1].startswith(message)


def test_what_a_step_prints_is_not_the_answer(target, capsys):
    target("print('traced') or params['w'].sum() + batch['x'].sum() * 0")
    assert main(["advise", "my_job:job", "--devices", "0", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["batch_size"] == 8
    assert printed.err.startswith("madetraced")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_the_command_line_have_a_loss(name):
    job = MODELS[name]()
    batch = {key: leaf[:4] for key, leaf in job["data"].items()}
    loss = jax.eval_shape(job["loss_fn"], job["params"], batch, jax.random.key(0))
    assert (loss.shape, loss.dtype) == ((), "float32")


@pytest.mark.slow  # test_a_target_is_measured, and those above
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_of_the_command_line_train(capsys, name):
    argv = f"--model {name} --devices 0 --seconds 0.01 --batch-size 4 --json"
    assert main(["advise", *argv.split()]) == 0
    advice = json.loads(capsys.readouterr().out)
    [count] = advice["elche"]["counts"]
    assert advice["plain"]["counts"] == [1]
    assert advice["cadence"] == (
        "elche.EveryBatch()" if count == 1 else f"elche.FixedTotal({count})"
    )
