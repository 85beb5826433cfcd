"""Selection, checks and a printable summary of the devices of a job."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence

import jax

from elche_jax.engine.lane import lanes_of

GIB = 1024**3


def select_devices(
    devices: Sequence[jax.Device] | None, where: str = "build_train_step"
) -> tuple[jax.Device, ...]:
    """Return the devices to compute on, checked.

    Args:
        devices: The user's choice; None for all local devices.
        where: The function the user called.

    Raises:
        TypeError: If `devices` is not a sequence, or an entry is not a `jax.Device`.
        ValueError: If it is empty or holds duplicates, or the job has several processes.
    """
    chosen = listed(devices, where)
    check_one_process(where)
    return chosen


def check_one_process(where: str) -> None:
    """Check that the job has one process: devices of others would train separately.

    Args:
        where: The function the user called.

    Raises:
        ValueError: If `jax.distributed` was initialized with several processes.
    """
    processes = jax.process_count()
    if processes > 1:
        raise ValueError(
            f"{where}: jax.process_count() must be 1, got {processes}. Devices of several "
            "processes cannot work together yet: leave out jax.distributed.initialize."
        )


def listed(devices: Sequence[jax.Device] | None, where: str) -> tuple[jax.Device, ...]:
    """Return the devices as a tuple, checked as in `select_devices`, of any process."""
    chosen = jax.local_devices() if devices is None else devices
    if not isinstance(chosen, Iterable):
        raise TypeError(
            f"{where}: devices must be a sequence of jax.Device objects, got "
            f"{type(chosen).__name__}. Write [device] for one."
        )
    chosen = tuple(chosen)
    if not chosen:
        raise ValueError(f"{where}: devices must hold at least one device, got none.")
    for device in chosen:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"{where}: devices must be jax.Device objects (see jax.local_devices()), "
                f"got {type(device).__name__}."
            )
    for device, times in Counter(chosen).items():
        if times > 1:
            raise ValueError(
                f"{where}: no device may appear twice in devices, got {device} {times} times."
            )
    return chosen


def check_one_kind(where: str, devices: Sequence[jax.Device]) -> None:
    """Check that one program can serve these devices.

    Raises:
        ValueError: If they are of several kinds or platforms.
    """
    lanes = lanes_of(devices)
    if len(lanes) > 1:
        kinds = ", ".join(f"{lane.devices[0].device_kind} x{lane.world_size}" for lane in lanes)
        raise ValueError(
            f"{where}: devices must be of one kind and platform, got {kinds}. "
            "Choose with devices=[...]; one program cannot serve several kinds."
        )


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
    lanes = lanes_of(listed(devices, "device_summary"))
    platform, *others = {lane.devices[0].platform for lane in lanes}
    noun = platform.upper() if platform in ("gpu", "tpu") and not others else "device"
    count = sum(lane.world_size for lane in lanes)
    kinds = f" ({len(lanes)} kinds)" if len(lanes) > 1 else ""
    parts = [
        _kind(lane.devices[0]) + (f" x{lane.world_size}" if lane.world_size > 1 else "")
        for lane in lanes
    ]
    return f"elche: {count} {noun}{'s' if count > 1 else ''}{kinds} | {' | '.join(parts)}"


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Return the free bytes on the device with the least free memory; None if unknown.

    CPU devices share the host's memory.
    """
    # `memory_stats()` of a CPU device is None
    if devices[0].platform == "cpu":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # not provided by this system
            return None
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in memory for memory in stats):
        return None
    # the limit on a GPU is what JAX may take, by default 75 % of the card
    return min(int(memory["bytes_limit"]) - int(memory.get("bytes_in_use", 0)) for memory in stats)


def _kind(device: jax.Device) -> str:
    name = device.device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f"{name} ({limit / GIB:.1f} GiB)" if limit else name
