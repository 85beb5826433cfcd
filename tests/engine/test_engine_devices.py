"""Which devices take part: the choice, the groups, the summary line, free memory."""

import os
import sys
from unittest import mock

import children
import jax
import pytest

from elche_jax.engine import devices as module
from elche_jax.engine.devices import (
    GIB,
    device_summary,
    free_bytes,
    select_job,
)
from elche_jax.engine.lane import Lane, Lanes, lanes_of


def fake(kind, platform="gpu", limit_gib=None, used=None):
    """A device that this machine has not got."""
    device = mock.Mock(spec=jax.Device)
    device.platform, device.device_kind, device.client = platform, kind, "one for all"
    device.process_index = 0
    stats = None if limit_gib is None else {"bytes_limit": int(limit_gib * GIB)}
    if used is not None:
        stats["bytes_in_use"] = used
    device.memory_stats.return_value = stats
    return device


def test_none_stands_for_all_local_devices():
    assert select_job(None) == tuple(jax.local_devices())


def test_the_order_is_the_users():
    backwards = jax.devices()[::-1]
    assert select_job(backwards) == tuple(backwards)
    assert select_job(iter(backwards)) == tuple(backwards)


def test_no_device_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"^build_train_step: devices must hold at least one device, got none\.$",
    ):
        select_job([])


@pytest.mark.parametrize("devices", [[0, 1], ["cpu:0"], "cpu"])
def test_what_is_no_device_is_an_error(devices):
    kind = type(devices[0]).__name__
    with pytest.raises(
        TypeError,
        match=r"^build_train_step: devices must be jax.Device objects \(see "
        rf"jax.local_devices\(\)\), got {kind}\.$",
    ):
        select_job(devices)


@pytest.mark.parametrize("one", [4, fake("A100")])
def test_what_is_no_sequence_is_an_error(one):
    with pytest.raises(
        TypeError,
        match=r"^build_train_step: devices must be a sequence of jax.Device objects, got "
        rf"{type(one).__name__}\. Write \[device\] for one\.$",
    ):
        select_job(one)


def test_a_device_twice_is_an_error():
    first, second = jax.devices()[:2]
    with pytest.raises(
        ValueError,
        match=r"^build_train_step: no device may appear twice in devices, got "
        rf"{second} 2 times\.$",
    ):
        select_job([first, second, second])


def test_errors_name_the_function_that_was_called():
    with pytest.raises(ValueError, match=r"^device_summary: devices must hold"):
        device_summary([])


def test_groups_are_kinds_in_the_order_of_their_first_rank():
    big, small, also_big = fake("H100"), fake("L4"), fake("H100")
    other = fake("H100", platform="cpu")
    fleet = lanes_of([big, small, also_big, other])
    lanes = (Lane((big, also_big), (0, 2)), Lane((small,), (1,)), Lane((other,), (3,)))
    assert fleet == Lanes((big, small, also_big, other), lanes)
    assert fleet.in_lanes() == lanes
    assert lanes_of([big, also_big]) == Lane((big, also_big), (0, 1))


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        ([fake("cpu", "cpu")], "elche: 1 device | cpu"),
        ([fake("cpu", "cpu")] * 4, "elche: 4 devices | cpu x4"),
        ([fake("NVIDIA H200", limit_gib=139.81)], "elche: 1 GPU | H200 (139.8 GiB)"),
        (
            [
                fake("NVIDIA GeForce RTX 4090", limit_gib=24),
                fake("NVIDIA GeForce RTX 3090", limit_gib=24),
                fake("NVIDIA GeForce RTX 4090", limit_gib=24),
            ],
            "elche: 3 GPUs (2 kinds) | RTX 4090 (24.0 GiB) x2 | RTX 3090 (24.0 GiB)",
        ),
        ([fake("TPU v5e", "tpu", 16)] * 2, "elche: 2 TPUs | TPU v5e (16.0 GiB) x2"),
        (
            [fake("L4", "gpu", 24), fake("cpu", "cpu")],
            "elche: 2 devices (2 kinds) | L4 (24.0 GiB) | cpu",
        ),
    ],
)
def test_summary(devices, line, monkeypatch):
    monkeypatch.setattr(module, "listed", lambda chosen, where: tuple(chosen))
    assert device_summary(devices) == line


def test_summary_of_this_machine():
    kind = jax.devices()[0].device_kind
    assert device_summary(jax.devices()[:2]) == f"elche: 2 devices | {kind} x2"


def test_free_bytes_is_what_the_tightest_device_has_left():
    devices = [fake("A", limit_gib=2, used=GIB), fake("A", limit_gib=2, used=GIB + 1)]
    assert free_bytes(devices) == GIB - 1
    assert free_bytes([fake("A", limit_gib=3)]) == 3 * GIB


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_free_bytes_is_not_known_where_one_device_does_not_say(stats):
    silent = fake("A")
    silent.memory_stats.return_value = stats
    assert free_bytes([fake("A", limit_gib=2), silent]) is None


def test_cpu_devices_share_the_free_bytes_of_the_host(monkeypatch):
    figures = {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", figures.__getitem__)
    assert free_bytes(jax.devices()[:2]) == 2_048_000
    assert free_bytes([*jax.devices()[:2], fake("A", limit_gib=1)]) == 2_048_000
    assert free_bytes([*jax.devices()[:2], fake("A", limit_gib=2**-12)]) == GIB // 2**12


@pytest.mark.parametrize("error", [ValueError, OSError, AttributeError])
def test_free_bytes_is_not_known_where_the_system_does_not_say(monkeypatch, error):
    def sysconf(name):
        raise error(name)

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert free_bytes(jax.devices()[:1]) is None


GONE = """
import jax, optax
from jax.extend.backend import clear_backends
import elche_jax as elche
devices = jax.devices()[:1]
clear_backends()
calls = [
    lambda: elche.build_train_step(lambda *args: 0.0, optax.sgd(0.1), devices=devices),
    lambda: elche.build_eval_step(lambda *args: {}, devices=devices),
    lambda: elche.replicate({}, devices),
    lambda: elche.build_train_step(lambda *args: 0.0, optax.sgd(0.1), devices=jax.devices()[:1]),
]
for call in calls:
    try:
        print(type(call()).__name__)
    except ValueError as error:
        print(error)
"""


def test_a_device_whose_backend_is_gone():
    done = children.run(sys.executable, "-c", GONE)
    *refused, taken = done.stdout.splitlines()
    got = "of one that is gone. Get them from JAX again."
    assert done.returncode == 0 and len(refused) == 3, done.stderr
    assert all(line.endswith(got) for line in refused) and taken == "TrainStep"
    assert all("devices must be of a backend in use, got " in line for line in refused)
    assert [line.split(":")[0] for line in refused] == [
        "build_train_step",
        "build_eval_step",
        "replicate",
    ]
