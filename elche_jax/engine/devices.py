"""Selection, checks and a printable summary of a job's devices."""

import os
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from jax.extend.backend import backends

from elche_jax import _check as check
from elche_jax._processes import PROCESSES
from elche_jax.engine.job import Job
from elche_jax.engine.lane import Fleet, kinds_of, lanes_across, lanes_of, memory_limit

GIB = 1024**3

_apart = ContextVar("_apart", default=False)


@contextmanager
def apart() -> Generator[None]:
    """Allow training steps built in the context to use devices of this process only.

    They train independently of the other processes of the job.
    """
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


def select_job(
    devices: Sequence[jax.Device] | None, where: str = "build_train_step"
) -> tuple[jax.Device, ...]:
    """Return the checked devices of a job over all processes; all processes must call it.

    Args:
        devices: The user's choice; None for all devices of all processes.
        where: The function the user called.

    Raises:
        TypeError, ValueError: See `listed`.
        ValueError: If a process has none of the devices, processes choose different devices, or
            the leads are not all of one platform.
    """
    chosen = listed(jax.devices() if devices is None else devices, where)
    missing = set(range(jax.process_count())) - {device.process_index for device in chosen}
    if missing and not _apart.get():
        rule = "hold devices of every process of the job"
        got = f"none of process {min(missing)}"
        todo = "Pass the same in all processes: jax.devices() has the devices of all."
        raise ValueError(check.message(where, "devices", rule, got, todo))
    job = Job(chosen)
    platforms = {device.platform for device in job.leads}
    if len(platforms) > 1:
        rule = "have a device of the same platform in every process, for the exchanges"
        got = " and ".join(sorted(platforms))
        raise ValueError(check.message(where, "devices", rule, got))
    PROCESSES.warn_if_alone()
    if not job.one_process:
        # Not over the leads of the choice: if these differ, the processes do not meet. It is one
        # small exchange, even if over a device that was left out.
        everyone = Job(tuple(job.leads[0].client.devices()))
        everyone.check_same(where, devices=list(map(str, chosen)))
    return chosen


def listed(devices: Sequence[jax.Device] | None, where: str) -> tuple[jax.Device, ...]:
    """Return devices of any process as a tuple, checked.

    Args:
        devices: The user's choice; None for all local devices.
        where: The function the user called.

    Raises:
        TypeError: If `devices` is not a sequence, or an entry is not a `jax.Device`.
        ValueError: If it is empty or holds duplicates, or if a device's backend is gone.
    """
    chosen = jax.local_devices() if devices is None else devices
    rule, todo = "be a sequence of jax.Device objects", "Write [device] for one."
    check.instance(where, "devices", chosen, Iterable, rule, todo, brief=True)
    chosen = tuple(chosen)
    if not chosen:
        raise ValueError(f"{where}: devices must hold at least one device, got none.")
    for device in chosen:
        rule = "be jax.Device objects (see jax.local_devices())"
        check.instance(where, "devices", device, jax.Device, rule, brief=True)
    in_use = {id(client) for client in backends().values()}
    for device in chosen:
        if id(device.client) not in in_use:
            rule, got = "be of a backend in use", f"{device} of one that is gone"
            todo = "Get them from JAX again."
            raise ValueError(check.message(where, "devices", rule, got, todo))
    for device, times in Counter(chosen).items():
        if times > 1:
            raise ValueError(
                f"{where}: no device may appear twice in devices, got {device} {times} times."
            )
    return chosen


def one_reader(device: jax.Device) -> bool:
    """Return whether only one thread at a time may read an array of a device.

    On the CPU of a plugin, XLA counts the readers of an array without a lock: two that begin at
    the same moment crash the process. JAX's own CPU client allows several readers, and arrays on
    an accelerator are copied to be read.
    """
    return device.platform == "cpu" and device.client is not backends().get("cpu")


LaneChoice = Sequence[Sequence[int]] | Callable[[jax.Device], Hashable]
"""The user's lanes: ranks by lane, or a function of a device whose result names its lane."""


def fleet_of(where: str, devices: Sequence[jax.Device], lanes: LaneChoice | None = None) -> Fleet:
    """Group the devices into lanes, by kind or as the user says.

    Args:
        where: The function the user called.
        devices: The devices, checked.
        lanes: The user's lanes; None for one per kind.

    Raises:
        TypeError: If `lanes` has the wrong type, or the name of a lane is not hashable.
        ValueError: If the lanes do not partition the ranks, or one has devices of several kinds.
    """
    job = Job(tuple(devices))
    if lanes is None:
        return lanes_of(devices) if job.one_process else lanes_across(job)
    kinds, keys = kinds_of(devices), _lane_keys(where, devices, lanes)
    kind_of: dict[Hashable, str] = {}
    for key, kind in zip(keys, kinds, strict=True):
        if kind_of.setdefault(key, kind) != kind:
            rule = "keep devices of several kinds apart"
            got = f"{kind_of[key]} and {kind} in one lane"
            raise ValueError(check.message(where, "lanes", rule, got))
    return lanes_of(devices, keys) if job.one_process else lanes_across(job, keys)


def _lane_keys(where: str, devices: Sequence[jax.Device], lanes: LaneChoice) -> Sequence[Hashable]:
    """Return the name of every device's lane."""
    if callable(lanes):
        keys = [lanes(device) for device in devices]
        for key in keys:
            check.instance(where, "lanes(device)", key, Hashable, "be hashable")
        return keys
    parts = [
        check.integers(where, "lanes", part)
        for part in check.items(where, "lanes", lanes, "sequences of ranks")
    ]
    of_rank = {rank: at for at, part in enumerate(parts) for rank in part}
    count = len(devices)
    if sorted(of_rank) != list(range(count)) or sum(map(len, parts)) != count:
        rule = f"hold each rank of the {count} devices once"
        raise ValueError(check.message(where, "lanes", rule, tuple(parts)))
    return [of_rank[rank] for rank in range(count)]


def names_of(devices: Sequence[jax.Device]) -> list[str]:
    """Return the name of every device for reports, with its kind if there are several kinds."""
    kinds = kinds_of(devices)
    if len(set(kinds)) == 1:
        return [str(device) for device in devices]
    return [f"{device} ({kind})" for device, kind in zip(devices, kinds, strict=True)]


def device_summary(devices: Sequence[jax.Device] | None = None) -> str:
    """Return a one-line summary of the devices.

    Args:
        devices: The devices; None for all local devices.

    Returns:
        For instance `elche: 4 devices | cpu x4`, or
        `elche: 3 GPUs (2 kinds) | RTX 4090 (24.0 GiB) x2 | RTX 3090 (24.0 GiB)`.

    Examples:
        >>> import jax
        >>> from elche_jax import device_summary
        >>> device_summary(jax.devices("cpu")[:1])
        'elche: 1 device | cpu'
    """
    return summary_of(lanes_of(listed(devices, "device_summary")))


def summary_of(fleet: Fleet) -> str:
    """Return the summary of a fleet, with the number of lanes if several are of one kind."""
    lanes, kinds = fleet.in_lanes(), kinds_of(fleet.devices)
    platform, *others = {lane.devices[0].platform for lane in lanes}
    noun = platform.upper() if platform in ("gpu", "tpu") and not others else "device"
    count, several = fleet.world_size, len(set(kinds))
    said = f" ({several} kinds)" if several > 1 else ""
    if len(lanes) > several:
        said = f" ({several} kind{'s' if several > 1 else ''}, {len(lanes)} lanes)"
    parts = [
        _kind(lane.devices[0], kinds[lane.ranks[0]])
        + (f" x{lane.world_size}" if lane.world_size > 1 else "")
        for lane in lanes
    ]
    if not fleet.job.one_process:
        said += f" of {fleet.job.world_size} in {len(fleet.job.ranks_of)} processes"
    return f"elche: {count} {noun}{'s' if count > 1 else ''}{said} | {' | '.join(parts)}"


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the free bytes on the device with the least free memory; None if unknown.

    CPU devices share the host's memory equally.
    """
    # `memory_stats()` of a CPU device is None
    on_host = sum(device.platform == "cpu" for device in devices)
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    if not all("bytes_limit" in memory for memory in stats):
        return None
    # the limit on a GPU is what JAX may take, by default 75 % of the card
    free = [int(memory["bytes_limit"]) - int(memory.get("bytes_in_use", 0)) for memory in stats]
    if on_host:
        try:
            host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # not provided by this system
            return None
        free.append(host // on_host)
    return min(free)


def _kind(device: jax.Device, kind: str) -> str:
    name = kind.removeprefix("NVIDIA ").removeprefix("GeForce ")
    limit = memory_limit(device)
    return f"{name} ({limit / GIB:.1f} GiB)" if limit else name
