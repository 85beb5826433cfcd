"""The command line as real processes: devices, pipes, Ctrl-C. Few of them: each is slow."""

import contextlib
import json
import re
import signal
import sys

import children
import pytest

COMMAND = [sys.executable, "-W", "error", "-m", "elche_jax"]
GIVE_UP = 120


@pytest.fixture
def start(tmp_path):
    """Starts a command in an empty folder; ends what is left of it."""
    with contextlib.ExitStack() as stack:

        def start(*argv, **env):
            process = children.started(*COMMAND, *argv, cwd=tmp_path, env=env)
            return stack.enter_context(process)

        yield start


def test_arguments_are_above_the_environment(start):
    process = start(
        "devices", "--cpu-devices", "3", "--no-probe", "--json",
        XLA_FLAGS="--xla_force_host_platform_device_count=5",
        JAX_NUM_CPU_DEVICES="6",
        JAX_PLATFORMS="cuda",
    )  # fmt: skip
    out, err = process.communicate(timeout=GIVE_UP)
    assert (process.returncode, err) == (0, "")
    assert [device["platform"] for device in json.loads(out)["devices"]] == ["cpu"] * 3


def test_platforms_that_are_not_there_are_named(start):
    process = start("devices", JAX_PLATFORMS="nowhere")
    out, err = process.communicate(timeout=GIVE_UP)
    assert (process.returncode, out) == (2, "")
    said = (
        r"elche-jax devices: JAX must have devices of the platforms 'nowhere', got an error: .+\n"
    )
    assert re.fullmatch(said, err)


@pytest.mark.slow  # test_cli_advise advises in this process
@pytest.mark.further
def test_emulated_devices_are_made_and_advised_on(start):
    process = start(
        "advise", "--emulate", "1,3", "--seconds", "0.05", "--batch-size", "2", "--json"
    )
    out, err = process.communicate(timeout=GIVE_UP)
    assert (process.returncode, err) == (0, "")
    advice = json.loads(out)
    pairs = zip(advice["devices"], (1, 3), strict=True)
    assert all(device["solo_ms"] + device["step_ms"] >= ms for device, ms in pairs)
    assert len(advice["devices"]) == len(advice["elche"]["counts"]) == 2


@pytest.mark.slow  # only `make test-all` shows that it ends, and what it prints
def test_demo(start):
    process = start("demo", "--short")
    out, err = process.communicate(timeout=GIVE_UP)
    assert process.returncode == 0
    assert re.fullmatch(r"equal counts: [\d.]+ s\nElChe: [\d.]+ s\n", err)
    lines = out.splitlines()
    assert lines[0] == "elche: 4 devices | cpu x4"
    assert lines[1] == "3,200 examples, limit 4,400 examples/s"
    assert lines[2].split() == ["equal", "counts", "ElChe"]
    rows = {re.split(r"\s{2,}", line)[0]: line for line in lines[3:-1]}
    assert list(rows) == [
        "training time", "examples/s", "busy share", "share of the limit", "updates", "accuracy",
    ]  # fmt: skip
    assert len(re.findall(r"\d+%", rows["busy share"])) == 8
    plain, elche = map(int, rows["updates"].split()[1:])
    assert (plain, elche < plain) == (100, True)
    assert lines[-1].endswith("times as fast on the same four devices")


def test_nobody_reads_any_more(start):
    process = start("devices", "--cpu-devices", "1", "--seconds", "0.01")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "elche: 1 device | cpu\n"
    process.stdout.close()
    assert process.wait(GIVE_UP) == 141
    assert "Traceback" not in process.stderr.read()


@pytest.mark.slow  # as test_nobody_reads_any_more
def test_a_pipe_that_nobody_reads_is_noticed_without_a_buffer(start):
    process = start(
        "devices", "--cpu-devices", "1", "--seconds", "0.01", PYTHONUNBUFFERED="1"
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(GIVE_UP) == 141
    assert "Traceback" not in process.stderr.read()


TARGET = """
import jax, numpy as np, optax

jax.config.update("jax_num_cpu_devices", 2)

def job():
    print("made")
    x = np.ones((64, 3), "float32")
    return dict(loss_fn=lambda params, batch, rng: (batch["x"] @ params["w"]).mean(),
                optimizer=optax.sgd(0.1), params={"w": np.zeros(3, "float32")},
                data={"x": x}, batch_size=4, seconds=0.01, devices=None)
"""


@pytest.mark.slow  # test_cli_advise has a target measured in this process
def test_a_target_may_make_its_devices(start, tmp_path):
    (tmp_path / "train.py").write_text(TARGET)
    process = start("advise", "train.py:job", "--json", JAX_PLATFORMS="cpu", XLA_FLAGS="")
    out, err = process.communicate(timeout=GIVE_UP)
    assert (process.returncode, err) == (0, "made\n")
    assert len(json.loads(out)["devices"]) == 2


def test_ctrl_c(start):
    process = start("demo")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)][1].startswith("16,000 examples")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=GIVE_UP)
    assert (process.returncode, out, err) == (130, "", "elche-jax demo: stopped\n")
