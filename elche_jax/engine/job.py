"""The devices of a job, which may have several processes, and what its processes exchange.

Each process runs the windows of its own devices. Once in a window the processes exchange, over one
device of each, the lead. Everything else that is known of all of them follows from numbers that
travelled in that exchange, so that all processes plan alike.
"""

import hashlib
import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from elche_jax import _check as check
from elche_jax._processes import PROCESSES, ExchangeLost, ProcessLostError
from elche_jax.engine.mapped import AXIS, MappedAcross

PyTree = Any

PIECE = 2**20
"""Bytes that a process sends at once, so that the leads need no more memory than some of them."""


class Measured(NamedTuple):
    """What travels of a device's window beside its contribution: numbers, or columns of devices.

    With windows pending, all but `plan` are of the window before. Times are of the process's own
    clock, in milliseconds.

    Attributes:
        busy: Busy time.
        ready: From when its process was ready for the window until the device was done.
        idle: How long its process's devices were ready before the loop asked for the window.
        sync: The smallest wait of its process's devices in the last exchange that has ended;
            infinite if unknown.
        steady: Whether nothing was compiled for the window.
        cold: Whether its programs ran for the first time.
        plan: A number for the plan of the window, see `number_of`.
        replicas: A number for the replicas its process found after the last window that was
            verified; -1 if there is nothing to compare, -2 if its own replicas differ.
        left_out: Whether it had work and is not part of the mean, as it is late.
        late: Whether it has not delivered since, so that it gets no work.
        own: Whether its own sums are finite; added on the device unless windows are pending.
    """

    busy: Any
    ready: Any
    idle: Any
    sync: Any
    steady: Any
    cold: Any
    plan: Any
    replicas: Any
    left_out: Any
    late: Any
    own: Any


@dataclass(frozen=True)
class Members:
    """The processes of a job that are there.

    Attributes:
        devices: The devices of all processes, in rank order.
        gone: Indices of the processes that have ended.
    """

    devices: tuple[jax.Device, ...]
    gone: frozenset[int] = frozenset()

    @cached_property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of each process's devices, by its index, in the order of their first rank."""
        ranks: dict[int, list[int]] = {}
        for rank, device in enumerate(self.devices):
            if device.process_index not in self.gone:
                ranks.setdefault(device.process_index, []).append(rank)
        return {process: tuple(own) for process, own in ranks.items()}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """The ranks of the devices that are there, ascending."""
        return tuple(sorted(rank for ranks in self.ranks_of.values() for rank in ranks))

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """The ranks of the other devices, ascending."""
        return tuple(rank for rank in range(len(self.devices)) if rank not in self.left)

    @cached_property
    def width(self) -> int:
        """The largest number of devices of a process."""
        return max(map(len, self.ranks_of.values()))

    @cached_property
    def leads(self) -> tuple[jax.Device, ...]:
        """The device of each process that exchanges with the others: no CPU, if there is one."""
        own = [[self.devices[rank] for rank in ranks] for ranks in self.ranks_of.values()]
        return tuple(min(devices, key=lambda one: one.platform == "cpu") for devices in own)

    def gathered(self, row: np.ndarray) -> np.ndarray:
        """Return an array of the host from each process, stacked; all have to call it."""
        lead = next(one for one in self.leads if one.process_index == jax.process_index())
        return np.asarray(_gatherer(self.leads)(jax.device_put(row[None], lead))[1])


@dataclass(frozen=True)
class Job:
    """The devices of a job.

    Attributes:
        devices: The devices of all processes, in rank order.
    """

    devices: tuple[jax.Device, ...]

    @property
    def members(self) -> Members:
        """The processes that are there."""
        gone = PROCESSES.gone
        if self._known.gone != gone:
            self.__dict__["_known"] = Members(self.devices, gone)
        return self._known

    @cached_property
    def _known(self) -> Members:
        return Members(self.devices)

    @property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of the devices of each process that is there, see `Members`."""
        return self.members.ranks_of

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def one_process(self) -> bool:
        """Whether the job has one process, from the start."""
        return len({device.process_index for device in self.devices}) == 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process's devices."""
        if self.one_process:  # which may be one of several, with devices of its own
            return tuple(range(self.world_size))
        return self.ranks_of[jax.process_index()]

    @cached_property
    def local(self) -> tuple[jax.Device, ...]:
        """This process's devices."""
        return tuple(self.devices[rank] for rank in self.ranks)

    @property
    def at(self) -> int:
        """Place of this process among those that are there."""
        return 0 if self.one_process else list(self.ranks_of).index(jax.process_index())

    @property
    def leads(self) -> tuple[jax.Device, ...]:
        """The device of each process that exchanges with the others, see `Members`."""
        return self.members.leads

    @cached_property
    def alike(self) -> bool:
        """Whether the leads of all processes compute the same bits; all have to ask.

        Hosts of different processors do not: XLA uses the instructions and the cores that each has.
        Nor do GPUs: each process chooses the fastest of several kernels by measuring.
        """
        if self.one_process:
            return True
        lead = self.leads[self.at]
        if lead.platform != "cpu":
            return False
        own = lead.client.platform_version, jax.__version__, os.environ.get("XLA_FLAGS")
        found = self.gather(_digest((*own, os.cpu_count(), _processor())))
        return bool((found == found[0]).all())

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Return an array of the host from each process that is there, stacked.

        All have to call it.
        """
        if self.one_process:
            return row[None]
        while True:  # until no process ends meanwhile
            with suppress(ExchangeLost):
                return PROCESSES.together(self.leads, lambda: self.members.gathered(row))

    @cached_property
    def _psum(self) -> MappedAcross:
        return MappedAcross(lambda row: (None, jax.lax.psum(row, AXIS)), self.leads)

    def sum(self, row: np.ndarray) -> np.ndarray:
        """Return the sum of an array of the host over processes; all have to call it."""
        mine = jax.device_put(row[None], self.leads[self.at])
        return np.asarray(self._psum(mine)[1])

    def gather_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of all devices, by rank, from those of each process; all have to call it.

        Those of devices that are lost are 0.
        """
        width = Members(self.devices).width  # it must not change while a process ends
        found = self.gather(np.pad(rows, ((0, width - len(rows)), (0, 0))))
        places = places_of(tuple(self.ranks_of.values()), width, self.world_size)
        flat = found.reshape(-1, rows.shape[1])
        return np.concatenate([flat, np.zeros_like(flat[:1])])[list(places)]

    def exchange(self, value: Any) -> list[Any]:
        """Return what each process passes, in their order; all have to call it.

        Args:
            value: Anything that can be pickled, of any size.

        Raises:
            ProcessLostError: In all that are left, if a process has ended.
        """
        if self.one_process:
            return [value]
        mine = pickle.dumps(value)
        told = self._gather_of_all(np.array(divmod(len(mine), 2**32), np.uint32))
        sizes = [(int(high) << 32) + int(low) for high, low in told]
        # a power of two: few programs are compiled
        step = min(PIECE, 1 << (max(sizes) - 1).bit_length())
        parts = [bytearray() for _ in sizes]
        for begin in range(0, max(sizes), step):
            row = np.zeros(step, np.uint8)
            own = np.frombuffer(mine[begin : begin + step], np.uint8)
            row[: own.size] = own
            for part, size, got in zip(parts, sizes, self._gather_of_all(row), strict=True):
                part += got[: max(0, size - begin)].tobytes()
        return [pickle.loads(part) for part in parts]

    def _gather_of_all(self, row: np.ndarray) -> np.ndarray:
        """Return what `gather` does, if all processes are there."""
        found, gone = self.gather(row), sorted(self.members.gone)
        if gone:
            raise ProcessLostError(
                f"process {gone[0]} of the job has ended. Training goes on without it, if it can; "
                "evaluation, predict and what is done by hand need all processes.", gone,
            )  # fmt: skip
        return found

    def by_rank(self, told: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Return what each process tells of its devices, in rank order."""
        flat = [x for own in told for x in own]
        ranks = [rank for own in self.ranks_of.values() for rank in own]
        return tuple(x for _, x in sorted(zip(ranks, flat, strict=True), key=lambda one: one[0]))

    def check_same(self, where: str, **values: Any) -> None:
        """Raise unless all processes pass the same; all have to call it with the same names.

        Args:
            where: The function the user called.
            **values: What they pass, as `settings_of` and `digest_of` return it.

        Raises:
            ValueError: If one of them differs; it names the process.
        """
        if self.one_process:
            return
        self.compare(where, list(values), self.gather(digests_of(values)))

    def compare(self, where: str, names: Sequence[str], found: np.ndarray) -> None:
        """Raise unless the digests of all processes are equal, see `check_same`.

        Args:
            where: The function the user called.
            names: Names of the values.
            found: For each process its `digests_of` them.
        """
        processes = list(self.ranks_of)
        for at, name in enumerate(names):
            other = np.flatnonzero((found[:, at] != found[0, at]).any(axis=-1))
            if other.size:
                rule = "be the same in all processes"
                got = f"something else in process {processes[other[0]]} than in {processes[0]}"
                raise ValueError(check.message(where, name, rule, got))


def settings_of(value: Any) -> Any:
    """Return what of a user's object can be compared between processes by its `repr`.

    Of a dataclass these are its class and its fields, of other objects the class alone: the
    `repr` of most holds an address.

    Examples:
        >>> settings_of([2, None, max])
        [2, None, 'builtin_function_or_method']
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list | tuple):
        items: list[Any] = list(value)
        return [settings_of(item) for item in items]
    name = type(value).__name__
    if not is_dataclass(value):
        return name
    return name, [(one.name, settings_of(getattr(value, one.name))) for one in fields(value)]


def number_of(data: bytes) -> int:
    """Return a number of 24 bits for these bytes, exact in float32."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=3).digest(), "big")


def digest_of(tree: PyTree) -> bytes:
    """Return a digest of the arrays of a pytree, of their names, shapes and dtypes."""
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        found.update(f"{jax.tree_util.keystr(path)}{array.shape}{array.dtype}".encode())
        found.update(array.tobytes())
    return found.digest()


@lru_cache(maxsize=4)
def _gatherer(leads: tuple[jax.Device, ...]) -> MappedAcross:
    """Return the program of `Job.gather`: it is compiled once, however many jobs are made."""
    return MappedAcross(lambda rows: (None, jax.lax.all_gather(rows, AXIS)), leads)


def digests_of(values: Mapping[str, Any]) -> np.ndarray:
    """Return a digest of each value, `(values, 2)`."""
    return np.stack([_digest(value) for value in values.values()])


def _processor() -> str:
    """Return which processor the host has and what it can do, as Linux tells; else its name."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = "model name", "flags", "Features", "CPU part"
    return "".join(next((line for line in told if line.startswith(name)), "") for name in names)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _digest(value: Any) -> np.ndarray:
    """Return 64 bits that tell values apart, as two numbers of 32: JAX has no others by default."""
    data = value if isinstance(value, bytes) else repr(value).encode()
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint32)


def places_of(ranks_of: Sequence[Sequence[int]], width: int, size: int) -> tuple[int, ...]:
    """Return for each rank its place in rows gathered over processes, ``width`` for each.

    A rank of none of them has the place after all rows.

    Examples:
        >>> places_of([(0, 3), (1,)], width=2, size=4)
        (0, 2, 4, 1)
    """
    place = {
        rank: at * width + own
        for at, ranks in enumerate(ranks_of)
        for own, rank in enumerate(ranks)
    }
    return tuple(place.get(rank, width * len(ranks_of)) for rank in range(size))
