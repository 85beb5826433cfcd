"""Starts a process of a job: `jax.distributed`, set up as this library needs it."""

import os
import socket
import struct
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from elche_jax import _check as check, _progress
from elche_jax._exit import before_exit
from elche_jax._log import logger
from elche_jax._processes import COUNT, PROCESSES

HEARTBEAT_S = 30
"""Default number of seconds within which the others know that a process has ended."""

LOOKS_S = 1
"""Seconds between two checks of JAX's coordinator for processes that give no sign of life."""

HEARTBEAT = "heartbeat_timeout_seconds"
"""JAX's name for the heartbeat timeout."""

TLS = "mtls_cert_file"
"""JAX's argument, and its setting (with `jax_` in front), for encrypted connections."""

LIMIT = "--xla_cpu_collective_timeout_seconds"
"""XLA's flag for the seconds that a collective on CPUs may take."""

LEAVE_S = 300
"""Longest time in seconds that a process that has ended its work waits for the others."""

FIRST_S = 3
"""Seconds that a process waits for process 0 to listen, before it leaves the waiting to JAX."""

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""JAX's environment variable for the address of process 0."""

ID = "ELCHE_PROCESS_ID"
"""Environment variable in which a launcher gives this process's index."""

VARIABLES = f"{ADDRESS}, {COUNT} and {ID}"
"""The environment variables that a launcher sets, for messages."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout: int = HEARTBEAT_S,
    exchange_timeout: int = 60,
    recoverable: bool = True,
    **options: Any,
) -> None:
    """Join the job that this process is part of, before JAX is used.

    Without arguments, the environment describes the job: variables of a launcher
    (`JAX_COORDINATOR_ADDRESS`, `ELCHE_NUM_PROCESSES` and `ELCHE_PROCESS_ID`), or a cluster that
    `jax.distributed` knows, such as Slurm, Open MPI or Kubernetes. If it describes none, the job
    has only this process, so a script runs unchanged on one process or several.

    Args:
        coordinator_address: Address and port of process 0, such as `"10.0.0.1:1234"`.
        num_processes: Number of processes, at least 1.
        process_id: Index of this process, from 0 on.
        heartbeat_timeout: Seconds within which the others know that a process has ended, at least
            2. A process that pauses for half of this time may count as ended, too.
        exchange_timeout: Seconds that one exchange may take on the devices, at least 1. If a
            process ends in the middle of an exchange, the others may wait that long. On CPUs only.
        recoverable: Whether the others go on if a process other than process 0 ends. If not, JAX
            ends them.
        **options: Further arguments of `jax.distributed.initialize`.

    Raises:
        RuntimeError: If JAX has been used before, the job was joined before, or the port of
            process 0 is in use.
        TypeError: If a number, the address or `recoverable` has the wrong type, or `options` has
            JAX's `heartbeat_timeout_seconds`.
        ValueError: If a number is out of range, the address is not a host and a port, or only
            some of the first three arguments are given.

    Examples:
        >>> import elche_jax as elche
        >>> elche.distributed.initialize(num_processes=1, process_id=0)  # no other to join
    """
    where = "distributed.initialize"
    address = _address(coordinator_address)
    count, number = _given(num_processes, COUNT), _given(process_id, ID)
    heartbeat_timeout = check.integer(where, "heartbeat_timeout", heartbeat_timeout, low=2)
    exchange_timeout = check.integer(where, "exchange_timeout", exchange_timeout, low=1)
    check.instance(where, "recoverable", recoverable, bool)
    if (chosen := options.get("local_device_ids")) is not None:
        ids = [chosen] if isinstance(chosen, int) else chosen
        options["local_device_ids"] = check.integers(where, "local_device_ids", ids, low=0)
    if count is not None:
        count = check.integer(where, "num_processes", count, low=1)
    if number is not None:
        last = None if count is None else count - 1
        number = check.integer(where, "process_id", number, low=0, high=last)
    if count == 1:
        return
    known = {"coordinator_address": address, "num_processes": count, "process_id": number}
    if jax.distributed.is_initialized():
        raise RuntimeError(
            f"{where}: it must be called once, but this process has joined a job before."
        )
    if address is not None and number == 0:
        _check_port(int(address.rpartition(":")[2]))
    if HEARTBEAT in options:
        rule, todo = "be left out", "Pass heartbeat_timeout."
        raise TypeError(check.message(where, HEARTBEAT, rule, options[HEARTBEAT], todo))
    _limit_collectives(exchange_timeout)
    jax.config.update("jax_enable_recoverability", recoverable)
    _progress.joined(number or 0, several=True)
    options[HEARTBEAT] = heartbeat_timeout - LOOKS_S
    try:
        with _progress.phase("connect"):
            if address is not None and count is not None and number:
                _await_listener(address)
            jax.distributed.initialize(**known, **options)
    except ValueError as error:
        if any(value is not None for value in known.values()):
            missing = ", ".join(name for name, value in known.items() if value is None)
            rule, todo = "be given together", f"Or leave out all of them and set {VARIABLES}."
            names = "coordinator_address, num_processes, process_id"
            got = f"none for {missing}" if missing else str(error)
            raise ValueError(check.message(where, names, rule, got, todo)) from error
        if "coordinator_address should be defined" not in str(error):
            raise  # a cluster that says something JAX does not understand
        _progress.joined(0, several=False)
        logger.info("elche: one process, as neither arguments nor environment name others")
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise RuntimeError(
            f"{where}: it must be called before JAX is used, but a backend is running. Call it "
            "first thing, before jax.devices() or any array."
        ) from error
    else:
        if recoverable:
            PROCESSES.joined(secure=TLS in options or bool(jax.config.values.get(f"jax_{TLS}")))
            before_exit(_leave, last=True)


def watch(timeout: float) -> None:
    """Start a watchdog outside of this process that ends it if it makes no progress.

    Use it for processes that are not started by `elche-jax launch`, but for example by Slurm or
    over ssh. Under `elche-jax launch --timeout`, which watches its processes itself, it does
    nothing. The watchdog is a separate process, without JAX. It sees this process's phases, and
    whether it is stopped. It reports on stderr the phase that did not end, and kills this process
    and those that it has started. It ends when this process does.

    Call it before `initialize`, so that it notices a process that is stopped in there.

    Args:
        timeout: Seconds that a window, or reading its data, may take, above 0. A compile, a
            restore, a checkpoint, the first window, its data, and what a loop does between two
            windows may take twenty times as long. While this process waits for others, it is not
            ended: their own watchdogs end those.

    Raises:
        RuntimeError: If `watch` or `initialize` was called before, the system is Windows, or
            `elche-jax launch --elastic` has started this process without `--timeout`.
        TypeError: If `timeout` is not a number.
        ValueError: If it is out of range.

    Examples:
        >>> import elche_jax as elche
        >>> elche.distributed.watch(timeout=-1)
        Traceback (most recent call last):
        ...
        ValueError: distributed.watch: timeout must be above 0, got -1.
    """
    where = "distributed.watch"
    timeout = check.real(where, "timeout", timeout, above=0)
    if os.name != "posix":
        raise RuntimeError(f"{where}: it needs the sessions of POSIX, which Windows lacks.")
    if os.environ.get(_progress.VARIABLE) and _progress.watched():
        logger.info("elche: the launcher watches this process, so %s does nothing", where)
        return
    if jax.distributed.is_initialized():
        raise RuntimeError(f"{where}: it must be called before initialize, not after it.")
    if _progress.watched():
        raise RuntimeError(f"{where}: it must be called once, but this process is watched already.")
    if _progress.noting():
        raise RuntimeError(
            f"{where}: under `elche-jax launch --elastic` the launcher must watch, but it got no "
            f"--timeout. Pass it --timeout {timeout:g}."
        )
    from elche_jax.launch.marked import start
    from elche_jax.launch.watcher import PROGRESS_FILE

    folder = Path(tempfile.mkdtemp(prefix="elche-watch-"))
    _progress.write_to(_progress.ProgressFile.create(folder / PROGRESS_FILE))
    _progress.joined(0, several=False)
    start("watcher", folder, timeout)


def request_restart() -> None:
    """Ask the job to save a checkpoint and end with exit code 75, to be started again.

    All processes do so after the same window, a few windows later: `Checkpointer.save` and
    `Trainer.fit` write a checkpoint, whether or not it is due, and raise `RestartRequested`. It is
    enough if one process calls this. A loop that does not save goes on.

    It only sets a flag, so it may be called in a signal handler, for example of the signal that
    Slurm or Kubernetes sends when the job's time is over. `elche-jax launch --elastic` asks without
    such a call.

    Examples:
        ```python
        signal.signal(signal.SIGUSR1, lambda *_: elche.distributed.request_restart())
        ```
    """
    _progress.ask()


def _limit_collectives(seconds: int) -> None:
    """Make collectives on CPUs fail after some time, unless the environment sets that time.

    If a process ends in the middle of a collective, some of the others notice, and the rest would
    wait in it for those for half an hour. XLA reads the flag when the first backend starts; as an
    option of a program it has no effect.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if LIMIT not in flags:
        # in front: XLA stops reading at a word that is not a flag
        os.environ["XLA_FLAGS"] = f"{LIMIT}={seconds} {flags}".strip()


def _leave() -> None:
    """Leave the job, see `Processes.leave`; JAX itself waits only if the job is not recoverable."""
    waiting = threading.Thread(target=PROCESSES.leave, name="elche-leave", daemon=True)
    waiting.start()
    waiting.join(LEAVE_S)
    if waiting.is_alive():
        logger.warning(
            "elche: this process ends after waiting %d s for others, which still work", LEAVE_S
        )


def _address(given: str | None) -> str | None:
    """Return the given address of process 0, or the environment's, checked."""
    where, name = "distributed.initialize", "coordinator_address"
    if given is not None:
        check.instance(where, name, given, str)
    elif given := os.environ.get(ADDRESS) or None:
        name = ADDRESS
    if given is not None and not check.is_address(given):
        rule = "be a host and a port, such as 10.0.0.1:1234"
        raise ValueError(check.message(where, name, rule, repr(given)))
    return given


def _check_port(port: int) -> None:
    """Check that the coordinator's port is free: JAX might crash, or meet another job."""
    with suppress(socket.gaierror):  # a host without this name
        if _listens("localhost", port):
            raise RuntimeError(
                "distributed.initialize: the port of coordinator_address must be free, but "
                f"{port} is in use. End what uses it, such as an earlier job, or choose another "
                "port."
            )


def _await_listener(address: str) -> None:
    """Wait until process 0 listens; JAX, if it comes too early, retries only a second later.

    If process 0 does not listen for some seconds, or the host's name is unknown here, JAX goes on
    waiting, and reports it in the end.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + FIRST_S
    with suppress(socket.gaierror, UnicodeError):
        while not _listens(host.strip("[]"), int(port)) and time.monotonic() < end:
            time.sleep(0.05)


def _listens(host: str, port: int) -> bool:
    """Return whether a process listens at a port.

    Raises:
        OSError: If the host has no address: a `socket.gaierror`.
        UnicodeError: If its name is invalid.
    """
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            # by chance, a connection on this host may use the port that it connects to
            itself = connection.getsockname() == connection.getpeername()
            if itself:  # reset at its end: the port would otherwise stay in use for a minute
                reset = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            return not itself
    except socket.gaierror:
        raise
    except OSError:
        return False


def _given(value: int | None, variable: str) -> int | None:
    """Return the given number, or the one in an environment variable."""
    if value is not None or variable not in os.environ:
        return value
    text = os.environ[variable]
    if not text.isdecimal():  # `isdigit` allows "²", which `int` rejects
        rule = "be a whole number"
        raise ValueError(check.message("distributed.initialize", variable, rule, repr(text)))
    return int(text)
