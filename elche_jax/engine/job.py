"""The devices of a job, which may have several processes, and what its processes exchange.

Each process runs the windows of its own devices. Once in a window the processes exchange, over one
device of each, the lead. Everything else that is known of all of them follows from numbers that
travelled in that exchange, so that all processes plan alike.
"""

import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from elche_jax import _check as check
from elche_jax._processes import PROCESSES, ExchangeLost, ProcessLostError, of_process
from elche_jax._turns import TURNS
from elche_jax.engine.digests import difference, digest_of_host, digests_of, shown
from elche_jax.engine.mapped import AXIS, MappedAcross

T = TypeVar("T")
Collective = Callable[[Any, str], Any]

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
        wishes: What its process wants all to do, see `elche_jax.train.wishes`.
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
    wishes: Any
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

    def combined(self, collective: Collective, row: np.ndarray) -> np.ndarray:
        """Combine an array of the host with those of the others; all have to call it."""
        if not PROCESSES.recoverable:  # else no exchange is on its way: each was waited for
            MappedAcross.settle()  # of a window, after an error in it
        lead = next(one for one in self.leads if one.process_index == jax.process_index())
        own = jax.device_put(row[None], lead)
        return np.asarray(_combiner(collective, self.leads)(own)[1])


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
        return _members(self.devices, PROCESSES.gone)

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
        found = self.gather(digest_of_host(lead))
        return bool((found == found[0]).all())

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Where each device is, by which it is known again; all have to ask.

        These are its host, the place that a launcher gave to its process, and its number there,
        divided by `/`; empty for a device that is lost.
        """
        place = f"{socket.gethostname()}/{os.environ.get('ELCHE_LOCAL_ID', '')}"
        told = self.exchange([f"{place}/{device.local_hardware_id}" for device in self.local])
        return self.by_rank(told, "")

    def gather(self, row: np.ndarray, call: str = "") -> np.ndarray:
        """Return an array of the host from each process that is there, stacked.

        All have to call it; `call` tells this call from others with arrays of this shape.
        """
        return row[None] if self.one_process else self._combine(jax.lax.all_gather, row, call)

    def sum(self, row: np.ndarray) -> np.ndarray:
        """Return the sum of an array of the host over processes; all have to call it."""
        return self._combine(jax.lax.psum, row)

    def _combine(self, collective: Collective, row: np.ndarray, call: str = "") -> np.ndarray:
        said = f"{collective.__name__} {row.dtype}{row.shape} {call}"
        while True:  # until no process ends meanwhile
            with suppress(ExchangeLost), TURNS.call():
                return PROCESSES.together(
                    self.leads,
                    lambda: self.members.combined(collective, row),
                    None if TURNS.in_thread_of_windows else said,
                )

    def gather_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of all devices, by rank, from those of each process; all have to call it.

        Those of devices that are lost are 0.
        """
        width = Members(self.devices).width  # it must not change while a process ends
        found = self.gather(np.pad(rows, ((0, width - len(rows)), (0, 0))))
        places = places_of(tuple(self.ranks_of.values()), width, self.world_size)
        flat = found.reshape(-1, rows.shape[1])
        return np.concatenate([flat, np.zeros_like(flat[:1])])[list(places)]

    def exchange(self, value: Any, call: str = "") -> list[Any]:
        """Return what each process that is there passes, in their order; all have to call it.

        Args:
            value: Anything that can be pickled, of any size.
            call: Tells this call from others.
        """
        if self.one_process:
            return [value]
        return [pickle.loads(part) for part in self._exchanged(pickle.dumps(value), call)]

    def _exchanged(self, mine: bytes, call: str, keep: bool = True) -> list[bytearray]:
        """Return the bytes of each process that is there; an empty list unless `keep`."""
        gone = self.members.gone
        told = self.gather(np.array(divmod(len(mine), 2**32), np.uint32), call)
        sizes = [(int(high) << 32) + int(low) for high, low in told]
        parts = [bytearray() for _ in sizes]
        for begin in range(0, max(sizes), PIECE):
            own = np.frombuffer(mine[begin : begin + PIECE], np.uint8)
            # a power of two: few programs are compiled
            row = np.zeros(min(PIECE, _rounded(max(sizes) - begin)), np.uint8)
            row[: own.size] = own
            got = self.gather(row)
            if self.members.gone != gone:  # again: a part may be half one process's, half another's
                return self._exchanged(mine, call, keep)
            if keep:
                for part, size, new in zip(parts, sizes, got, strict=True):
                    part += new[: max(0, size - begin)].tobytes()
        return parts if keep else []

    def check_all(self) -> None:
        """Raise if a process has ended, where its devices have to take part.

        Raises:
            ProcessLostError: If one has.
        """
        gone = sorted(self.members.gone)
        if gone:
            raise ProcessLostError(
                f"process {gone[0]} of the job has ended. Training, evaluation and predict go on "
                "without it, if they can; what is timed or reduced by hand needs all.", gone,
            )  # fmt: skip

    def by_rank(self, told: Sequence[Sequence[Any]], lost: Any) -> tuple[Any, ...]:
        """Return what each process that is there tells of its devices, in rank order.

        Args:
            told: For each process a value for each of its devices.
            lost: In place of that of a device that is lost.
        """
        flat = [x for own in told for x in own]
        ranks = [rank for own in self.ranks_of.values() for rank in own]
        known = dict(zip(ranks, flat, strict=True))
        return tuple(known.get(rank, lost) for rank in range(self.world_size))

    @property
    def first(self) -> bool:
        """Whether this is the process of the first device, which writes the files of the job."""
        return self.one_process or self.devices[0].process_index == jax.process_index()

    def _check_first(self) -> None:
        """Raise if the first process has ended."""
        first = self.devices[0].process_index
        if first in self.members.gone:
            raise ProcessLostError(
                f"process {first} of the job, which reads and writes its files, has ended. Start "
                "the job again, with resume='auto' to go on from its last checkpoint.", [first],
            )  # fmt: skip

    def by_first(self, call: Callable[[], T]) -> T:
        """Call a function in the first process; all return its result or raise its error.

        All have to call it. Results and errors are pickled.
        """
        if self.one_process:
            return call()
        result: Any = None
        error: Exception | None = None
        if self.first:
            try:
                result = call()
            except Exception as found:  # the others must not wait for a result
                error = found
        told = self.exchange(_sendable(result, error) if self.first else None, "first")[0]
        self._check_first()
        if error is not None:
            raise error
        if self.first:
            return result
        result, error = told
        if error is not None:
            raise of_process(error, self.devices[0].process_index)
        return result

    def from_first(self, array: np.ndarray | None, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return an array of the host of the first process; all have to call it.

        Args:
            array: The array; not read in other processes.
            shape: Its shape.
            dtype: Its dtype.
        """
        whole = array if self.first else np.zeros(shape, dtype)
        assert whole is not None
        found = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
        if self.one_process:
            return found.view(dtype).reshape(shape)
        for begin in range(0, found.size, PIECE):
            part = found[begin : begin + PIECE]
            row = np.zeros(_rounded(part.size), np.uint8)
            row[: part.size] = part
            total = self.sum(row)
            self._check_first()
            if not self.first:  # zeros are added to the first one's
                part[:] = total[: part.size]
        return found.view(dtype).reshape(shape)

    def rows_at_first(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return arrays with a row per device of the job in the first process; others get none.

        All have to call it.

        Args:
            rows: Arrays with a row for each device of this process, by the same names everywhere.
        """
        if not rows:
            return {}
        # in one, as small arrays cost what large ones do; other protocols copy arrays twice
        own = pickle.dumps(list(rows.values()), protocol=5)
        told = [pickle.loads(part) for part in self._exchanged(own, "rows", keep=self.first)]
        found: dict[str, np.ndarray] = {}
        if self.first:
            for name, *arrays in zip(rows, *told, strict=True):
                # a device that is lost gets the first one's
                found[name] = np.stack(self.by_rank(arrays, lost=arrays[0][0]))
        return found

    def raise_alike(self, where: str, own: Exception | None) -> None:
        """Raise an error that some processes have, in all of them; all have to call it.

        A process with an error raises its own, the others say what the first such one says.

        Args:
            where: The function the user called.
            own: The error of this process, or None.
        """
        said = self.exchange(None if own is None else f"{type(own).__name__}: {own}", where)
        if own is not None:
            raise own
        for process, text in zip(self.ranks_of, said, strict=True):
            if text is not None:
                error = RuntimeError(f"{where}: process {process} raised {text}")
                raise of_process(error, process)

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
        self.compare(where, values, self.gather(digests_of(values), where))

    def compare(self, where: str, values: Mapping[str, Any], found: np.ndarray) -> None:
        """Raise unless the digests of all processes are equal, see `check_same`.

        Args:
            where: The function the user called.
            values: The values of this process.
            found: For each process the `digests_of` its values.
        """
        processes = list(self.ranks_of)
        for at, name in enumerate(values):
            others = np.flatnonzero((found[:, at] != found[0, at]).any(axis=-1))
            if others.size:
                said = self.exchange(shown(values[name]))  # all have found it
                told = dict(zip(self.ranks_of, said, strict=True))  # one may have ended meanwhile
                got = difference(told, processes[others[0]], processes[0])
                raise ValueError(check.message(where, name, "be the same in all processes", got))


@lru_cache(maxsize=8)
def _members(devices: tuple[jax.Device, ...], gone: frozenset[int]) -> Members:
    """Return the processes that are there, whose ranks are found once."""
    return Members(devices, gone)


@lru_cache(maxsize=8)
def _combiner(collective: Collective, leads: tuple[jax.Device, ...]) -> MappedAcross:
    """Return a program of `Job.gather` or `Job.sum`, compiled once, however many jobs are made."""
    return MappedAcross(lambda row: (None, collective(row, AXIS)), leads)


def _rounded(size: int) -> int:
    """Return the next power of two: each length is a program of its own."""
    return 1 << max(size - 1, 0).bit_length()


def _sendable(result: Any, error: Exception | None) -> tuple[Any, Exception | None]:
    try:
        pickle.loads(pickle.dumps((result, error)))  # some errors do not come back
        return result, error
    except Exception:
        return None, RuntimeError(f"{type(error).__name__}: {error}")


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
