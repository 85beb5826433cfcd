"""The devices of a job, which may have several processes, and what its processes exchange.

Each process runs the windows of its own devices. Once per window the processes exchange data,
through one device of each process, its lead. Everything else that they know about each other
follows from numbers in that exchange, so all processes plan alike.
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
"""Bytes that a process sends at once. This bounds the memory that the leads need."""


class Measured(NamedTuple):
    """Numbers that travel with a device's contribution to a window; scalars, or columns by device.

    With pending windows, all but `plan` describe the previous window. Times are in milliseconds, by
    the clock of the device's process.

    Attributes:
        busy: Busy time.
        ready: Time from when its process was ready for the window until the device was done.
        idle: How long its process's devices were ready before the loop requested the window.
        sync: The shortest wait of its process's devices in the last exchange that has ended;
            infinite if unknown.
        steady: Whether nothing was compiled for the window.
        cold: Whether its programs ran for the first time.
        plan: A number that identifies the plan of the window, see `number_of`.
        replicas: A number that identifies the replicas of its process after the last window that
            was verified; -1 if there is nothing to compare, -2 if its own replicas differ.
        left_out: Whether it had work but is left out of the mean because it is late.
        late: Whether it has still not delivered and therefore gets no work.
        wishes: What its process asks of all processes, see `elche_jax.train.wishes`.
        own: Whether its own sums are finite; filled in on the device unless windows are pending.
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
    """The live processes of a job.

    Attributes:
        devices: The devices of all processes, in rank order.
        gone: Indices of the processes that have ended.
    """

    devices: tuple[jax.Device, ...]
    gone: frozenset[int] = frozenset()

    @cached_property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of each live process's devices, by process index, in order of first rank."""
        ranks: dict[int, list[int]] = {}
        for rank, device in enumerate(self.devices):
            if device.process_index not in self.gone:
                ranks.setdefault(device.process_index, []).append(rank)
        return {process: tuple(own) for process, own in ranks.items()}

    @cached_property
    def left(self) -> tuple[int, ...]:
        """The ranks of the devices of live processes, ascending."""
        return tuple(sorted(rank for ranks in self.ranks_of.values() for rank in ranks))

    @cached_property
    def lost(self) -> tuple[int, ...]:
        """The ranks of the devices of ended processes, ascending."""
        return tuple(rank for rank in range(len(self.devices)) if rank not in self.left)

    @cached_property
    def width(self) -> int:
        """The largest number of devices of a process."""
        return max(map(len, self.ranks_of.values()))

    @cached_property
    def leads(self) -> tuple[jax.Device, ...]:
        """The lead of each live process: its first device that is not a CPU, or else its first."""
        own = [[self.devices[rank] for rank in ranks] for ranks in self.ranks_of.values()]
        return tuple(min(devices, key=lambda one: one.platform == "cpu") for devices in own)

    def combined(self, collective: Collective, row: np.ndarray) -> np.ndarray:
        """Combine host arrays of the live processes; all of them have to call it."""
        if not PROCESSES.recoverable:  # if recoverable, each exchange was waited for
            MappedAcross.settle()  # the exchange of a window, after an error in it
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
        """The live processes."""
        return _members(self.devices, PROCESSES.gone)

    @property
    def ranks_of(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of the devices of each live process, see `Members`."""
        return self.members.ranks_of

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def one_process(self) -> bool:
        """Whether the job has consisted of one process from the start."""
        return len({device.process_index for device in self.devices}) == 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process's devices."""
        if self.one_process:  # JAX may know more processes, whose devices are not of this job
            return tuple(range(self.world_size))
        return self.ranks_of[jax.process_index()]

    @cached_property
    def local(self) -> tuple[jax.Device, ...]:
        """This process's devices."""
        return tuple(self.devices[rank] for rank in self.ranks)

    @property
    def at(self) -> int:
        """Position of this process among the live ones."""
        return 0 if self.one_process else list(self.ranks_of).index(jax.process_index())

    @property
    def leads(self) -> tuple[jax.Device, ...]:
        """The lead of each live process, see `Members`."""
        return self.members.leads

    @cached_property
    def alike(self) -> bool:
        """Whether the leads of all processes compute the same bits; all have to read it.

        Hosts with different processors do not: XLA uses the instructions and cores of each.
        GPUs do not either: each process measures several kernels and picks the fastest.
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
        """Where each device is, to identify it later; all processes have to read it.

        A place is the device's host, the place that a launcher gave to its process, and its
        `local_hardware_id`, separated by `/`. It is empty for a lost device.
        """
        place = f"{socket.gethostname()}/{os.environ.get('ELCHE_LOCAL_ID', '')}"
        told = self.exchange([f"{place}/{device.local_hardware_id}" for device in self.local])
        return self.by_rank(told, "")

    def gather(self, row: np.ndarray, call: str = "") -> np.ndarray:
        """Return the host arrays that the live processes pass, stacked.

        All have to call it; `call` distinguishes this call from others with arrays of this shape.
        """
        return row[None] if self.one_process else self._combine(jax.lax.all_gather, row, call)

    def sum(self, row: np.ndarray) -> np.ndarray:
        """Return the sum of a host array over processes; all have to call it."""
        return self._combine(jax.lax.psum, row)

    def _combine(self, collective: Collective, row: np.ndarray, call: str = "") -> np.ndarray:
        said = f"{collective.__name__} {row.dtype}{row.shape} {call}"
        while True:  # again if a process ended meanwhile
            with suppress(ExchangeLost), TURNS.call():
                return PROCESSES.together(
                    self.leads,
                    lambda: self.members.combined(collective, row),
                    None if TURNS.in_thread_of_windows else said,
                )

    def gather_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows of all devices, by rank, given those of this process's devices.

        All have to call it. The rows of lost devices are 0.
        """
        width = Members(self.devices).width  # of all: it must not change if a process ends
        found = self.gather(np.pad(rows, ((0, width - len(rows)), (0, 0))))
        places = places_of(tuple(self.ranks_of.values()), width, self.world_size)
        flat = found.reshape(-1, rows.shape[1])
        return np.concatenate([flat, np.zeros_like(flat[:1])])[list(places)]

    def exchange(self, value: Any, call: str = "") -> list[Any]:
        """Return what each live process passes, in the order of `ranks_of`; all have to call it.

        Args:
            value: Anything that can be pickled, of any size.
            call: Distinguishes this call from others.
        """
        if self.one_process:
            return [value]
        return [pickle.loads(part) for part in self._exchanged(pickle.dumps(value), call)]

    def _exchanged(self, mine: bytes, call: str, keep: bool = True) -> list[bytearray]:
        """Return the bytes of each live process; an empty list unless `keep`."""
        gone = self.members.gone
        told = self.gather(np.array(divmod(len(mine), 2**32), np.uint32), call)
        sizes = [(int(high) << 32) + int(low) for high, low in told]
        parts = [bytearray() for _ in sizes]
        for begin in range(0, max(sizes), PIECE):
            own = np.frombuffer(mine[begin : begin + PIECE], np.uint8)
            # a power of two, so that few programs are compiled
            row = np.zeros(min(PIECE, _rounded(max(sizes) - begin)), np.uint8)
            row[: own.size] = own
            got = self.gather(row)
            if self.members.gone != gone:  # again: parts may mix bytes of two processes
                return self._exchanged(mine, call, keep)
            if keep:
                for part, size, new in zip(parts, sizes, got, strict=True):
                    part += new[: max(0, size - begin)].tobytes()
        return parts if keep else []

    def check_all(self) -> None:
        """Raise if a process has ended, for calls that need all devices.

        Raises:
            ProcessLostError: If a process has ended.
        """
        gone = sorted(self.members.gone)
        if gone:
            raise ProcessLostError(
                f"process {gone[0]} of the job has ended. Training, evaluation and predict go on "
                "without it, if they can; what is timed or reduced by hand needs all.", gone,
            )  # fmt: skip

    def by_rank(self, told: Sequence[Sequence[Any]], lost: Any) -> tuple[Any, ...]:
        """Return the devices' values in rank order, given those of each live process.

        Args:
            told: For each process, a value for each of its devices.
            lost: Value for devices that are lost.
        """
        flat = [x for own in told for x in own]
        ranks = [rank for own in self.ranks_of.values() for rank in own]
        known = dict(zip(ranks, flat, strict=True))
        return tuple(known.get(rank, lost) for rank in range(self.world_size))

    @property
    def first(self) -> bool:
        """Whether this is the process of the first device, which writes the job's files."""
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
        """Call a function in the first process; return its result or raise its error in all.

        All have to call this. Results and errors are pickled.
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
        """Return a host array of the first process in all processes; all have to call it.

        Args:
            array: The array; ignored in other processes.
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
            if not self.first:  # the sum is the first one's part, as the others add zeros
                part[:] = total[: part.size]
        return found.view(dtype).reshape(shape)

    def rows_at_first(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return arrays with a row per device of the job in the first process, none in others.

        All have to call it.

        Args:
            rows: Arrays with a row for each device of this process, with the same names in all
                processes.
        """
        if not rows:
            return {}
        # all at once, as a small array costs as much as a large one; other protocols copy twice
        own = pickle.dumps(list(rows.values()), protocol=5)
        told = [pickle.loads(part) for part in self._exchanged(own, "rows", keep=self.first)]
        found: dict[str, np.ndarray] = {}
        if self.first:
            for name, *arrays in zip(rows, *told, strict=True):
                # a lost device gets the row of the first device
                found[name] = np.stack(self.by_rank(arrays, lost=arrays[0][0]))
        return found

    def raise_alike(self, where: str, own: Exception | None) -> None:
        """Raise an error in all processes if any process has one; all have to call it.

        A process that has an error raises it. The others raise a `RuntimeError` that quotes the
        error of the first process that has one.

        Args:
            where: The function the user called.
            own: The error of this process, or None.
        """
        said = self.exchange(None if own is None else f"{type(own).__name__}: {own}", where)
        if own is not None:
            try:
                raise own
            finally:
                del own  # its traceback refers to this frame: avoids a reference cycle
        for process, text in zip(self.ranks_of, said, strict=True):
            if text is not None:
                error = RuntimeError(f"{where}: process {process} raised {text}")
                raise of_process(error, process)

    def check_same(self, where: str, **values: Any) -> None:
        """Raise unless all processes pass the same values; all have to call it with the same names.

        Args:
            where: The function the user called.
            **values: The values of this process, as `settings_of` and `digest_of` return them.

        Raises:
            ValueError: If a value differs; the message names two processes.
        """
        if self.one_process:
            return
        self.compare(where, values, self.gather(digests_of(values), where))

    def compare(self, where: str, values: Mapping[str, Any], found: np.ndarray) -> None:
        """Raise unless the digests of all processes are equal, see `check_same`.

        Args:
            where: The function the user called.
            values: The values of this process.
            found: For each process, the `digests_of` its values.
        """
        processes = list(self.ranks_of)
        for at, name in enumerate(values):
            others = np.flatnonzero((found[:, at] != found[0, at]).any(axis=-1))
            if others.size:
                said = self.exchange(shown(values[name]))  # all processes have found the difference
                told = dict(zip(self.ranks_of, said, strict=True))  # one may have ended meanwhile
                got = difference(told, processes[others[0]], processes[0])
                raise ValueError(check.message(where, name, "be the same in all processes", got))


@lru_cache(maxsize=8)
def _members(devices: tuple[jax.Device, ...], gone: frozenset[int]) -> Members:
    """Return the live processes; cached, as finding their ranks takes time."""
    return Members(devices, gone)


@lru_cache(maxsize=8)
def _combiner(collective: Collective, leads: tuple[jax.Device, ...]) -> MappedAcross:
    """Return the program of `Job.gather` or `Job.sum`; cached, so that all `Job`s share it."""
    return MappedAcross(lambda row: (None, collective(row, AXIS)), leads)


def _rounded(size: int) -> int:
    """Return the next power of two, as each length needs a program of its own."""
    return 1 << max(size - 1, 0).bit_length()


def _sendable(result: Any, error: Exception | None) -> tuple[Any, Exception | None]:
    try:
        pickle.loads(pickle.dumps((result, error)))  # some errors cannot be unpickled
        return result, error
    except Exception:
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def places_of(ranks_of: Sequence[Sequence[int]], width: int, size: int) -> tuple[int, ...]:
    """Return each rank's place in rows gathered over processes, ``width`` rows for each process.

    A rank that belongs to no process has the place after all rows.

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
