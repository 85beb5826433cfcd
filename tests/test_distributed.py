"""Mistakes in joining a job, in processes of their own: the suite does not join one."""

import json
import socket
import sys
from types import SimpleNamespace

import children
import jax
import pytest
from marks import slow

from elche_jax import distributed
from elche_jax._processes import PROCESSES

MISTAKES = """
import json, os, socket
import elche_jax as elche, jax

ADDRESS, ID = "JAX_COORDINATOR_ADDRESS", "ELCHE_PROCESS_ID"

def said(address=None, variable=None, **arguments):
    for name, value in ((ADDRESS, address), (ID, variable)):
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        elche.distributed.initialize(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def listened():
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        return said(f"localhost:{port}", num_processes=2, process_id=0).replace(str(port), "PORT")

def told():
    given = {}
    jax.distributed.initialize = lambda **options: given.update(options)
    elche.distributed.initialize("localhost:1", 2, 0, heartbeat_timeout=7, recoverable=False)
    return given

def awaited():
    calls = []
    elche.distributed._await_listener = calls.append
    jax.distributed.initialize = lambda **options: calls.append(options["process_id"])
    elche.distributed.initialize("localhost:1", 2, 1, recoverable=False)
    return calls

print(json.dumps({
    "address only": said("localhost:1234"),
    "no port": said("localhost", num_processes=2, process_id=0),
    "port no number": said(coordinator_address="localhost:x", num_processes=2, process_id=0),
    "id no number": said(process_id="0"),
    "id too large": said(num_processes=2, process_id=2),
    "id no decimal": said(variable="\u00b2"),
    "devices no numbers": said(local_device_ids="a"),
    "too short": said(heartbeat_timeout=1),
    "JAX's name": said(heartbeat_timeout_seconds=9),
    "in use": listened(),
    "too late": jax.devices() and said(
        coordinator_address="localhost:1234", num_processes=2, process_id=0),
    "told": told(),
    "awaited": awaited(),
}))
"""
VARIABLES = "JAX_COORDINATOR_ADDRESS, ELCHE_NUM_PROCESSES and ELCHE_PROCESS_ID"
SAID = {
    "address only": "ValueError: distributed.initialize: coordinator_address, num_processes, "
    "process_id must be given together, got none for num_processes, process_id. Or leave out all "
    f"of them and set {VARIABLES}.",
    "no port": "ValueError: distributed.initialize: JAX_COORDINATOR_ADDRESS must be a host and a "
    "port, such as 10.0.0.1:1234, got 'localhost'.",
    "port no number": "ValueError: distributed.initialize: coordinator_address must be a host and "
    "a port, such as 10.0.0.1:1234, got 'localhost:x'.",
    "id no number": "TypeError: distributed.initialize: process_id must be an integer, got '0' "
    "(str).",
    "id too large": "ValueError: distributed.initialize: process_id must be at most 1, got 2.",
    "id no decimal": "ValueError: distributed.initialize: ELCHE_PROCESS_ID must be a whole number, "
    "got '\u00b2'.",
    "devices no numbers": "TypeError: distributed.initialize: local_device_ids must be a sequence "
    "of integers, got 'a' (str).",
    "too short": "ValueError: distributed.initialize: heartbeat_timeout must be at least 2, got 1.",
    "JAX's name": "TypeError: distributed.initialize: heartbeat_timeout_seconds must be left out, "
    "got 9. Pass heartbeat_timeout.",
    "in use": "RuntimeError: distributed.initialize: the port of coordinator_address must be "
    "free, but PORT is in use. End what uses it, such as an earlier job, or choose another port.",
    "too late": "RuntimeError: distributed.initialize: it must be called before JAX is used, but a "
    "backend is running. Call it first thing, before jax.devices() or any array.",
}


@pytest.fixture(scope="module")
def said():
    """What one process is told, which joins no job by any of its mistakes."""
    done = children.run(sys.executable, "-c", MISTAKES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mistake", SAID)
def test_what_is_missing_or_too_late_is_said(mistake, said):
    assert said[mistake] == SAID[mistake]


def test_jax_looks_for_processes_early_enough(said):
    """It does every second, and the end is to be known within the time that was given."""
    assert said["told"] == {
        "coordinator_address": "localhost:1",
        "num_processes": 2,
        "process_id": 0,
        "heartbeat_timeout_seconds": 6,
    }


ALONE = """
import optax
import elche_jax as elche
for _ in range(2):
    elche.{}
"""
STEP = 'build_train_step(lambda params, batch, rng: params["w"].sum(), optax.sgd(0.1))'
EVALUATION = "build_eval_step(lambda params, batch: {})"


@pytest.mark.parametrize(
    ("call", "count"), [(STEP, "2"), slow(STEP, "1"), slow(EVALUATION, "2"), slow("DDP()", "2")]
)
def test_a_process_that_has_not_joined_the_others_says_so(call, count):
    """Each of them would train on all data, and nobody would notice."""
    program = ALONE.format(call)
    env = {"ELCHE_NUM_PROCESSES": count, "JAX_NUM_CPU_DEVICES": "2"}
    done = children.run(sys.executable, "-c", program, env=env)
    said = (
        "elche: this process works alone, though it is one of 2 that were started together. Call "
        "elche_jax.distributed.initialize() first thing, before JAX is used.\n"
    )
    assert (done.returncode, done.stderr) == (0, said if count == "2" else "")


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            "INTERNAL: NCCL operation ncclCommInitRankConfig(...) failed: invalid usage. Last NCCL "
            "warning(error) log entry 'Duplicate GPU detected : rank 0 and rank 1 both on CUDA'",
            RuntimeError,
            r"^train: each process of the job must have GPUs of its own, but two of them use the "
            r"same one\. Let each choose its own, for example with elche_jax\.distributed\."
            r"initialize\(local_device_ids=int\(os\.environ\['ELCHE_LOCAL_ID'\]\)\)\.$",
        ),
        (
            "UNKNOWN: Gloo all-reduce failed: Timed out waiting 60000ms for recv operation",
            RuntimeError,
            r"^train: an exchange among the processes failed, or took longer than "
            r"exchange_timeout\. All must make the same calls in the same order: one that leaves "
            r"its loop before the others, or that evaluates or saves alone, for example, meets "
            r"them in a different call\.$",
        ),
        ("INTERNAL: NCCL operation failed", jax.errors.JaxRuntimeError, "^INTERNAL: NCCL"),
    ],
)
def test_errors_of_exchanges_in_our_words(said, kind, message):
    """As NCCL and gloo said it."""

    def exchange():
        raise jax.errors.JaxRuntimeError(said)

    with pytest.raises(kind, match=message):
        PROCESSES.together(jax.devices()[:1], exchange)


def test_a_process_waits_until_the_first_one_listens(monkeypatch):
    tried, connect = [], socket.create_connection

    def connected(address, **options):
        tried.append(address)
        if len(tried) == 3:
            server.listen()
        return connect(address, **options)

    monkeypatch.setattr(socket, "create_connection", connected)
    with socket.socket() as server:
        server.bind(("localhost", 0))
        address = server.getsockname()
        distributed._await_listener(f"localhost:{address[1]}")
    assert tried == [("localhost", address[1])] * 3


def test_all_but_the_first_process_wait_for_it(said):
    assert said["awaited"] == ["localhost:1", 1]


@pytest.mark.parametrize(("address", "tries"), [("localhost:1", 3), ("[::1]:1", 3), ("a..b:1", 1)])
def test_it_is_left_to_jax_if_nobody_listens(address, tries, monkeypatch):
    """After some tries; after one if there is no such host."""
    tried, connect = [], socket.create_connection

    def connected(address, **options):
        tried.append(address)
        return connect(address, **options)

    seconds = iter([0, 1, 2, distributed.FIRST_S])
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None)
    monkeypatch.setattr(distributed, "time", clock)

    monkeypatch.setattr(socket, "create_connection", connected)
    distributed._await_listener(address)
    assert len(tried) == tries and tried[0][0] == address.rpartition(":")[0].strip("[]")


def test_a_host_without_the_name_localhost_may_be_the_first(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    distributed._check_port(1)
    with pytest.raises(socket.gaierror):
        distributed._listens("localhost", 1)


def test_a_connection_that_meets_itself_meets_nobody(monkeypatch):
    with socket.socket() as one:
        one.bind(("localhost", 0))
        own = one.getsockname()
        one.connect(own)  # as happens by chance, where many are tried
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: one)
        assert not distributed._listens(*own)
    with socket.socket() as free:
        free.bind(own)  # which it could not for a minute, if that had been closed as usual
