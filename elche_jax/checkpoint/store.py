"""Checkpoints in a folder: each whole or absent, and known to be as it was written."""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from elche_jax.checkpoint.leaves import LeafSpec, digest, unwritten, written

logger = logging.getLogger("elche_jax")

FORMAT = 2

HALF = ".orbax-checkpoint-tmp"
"""Suffix of what is not whole yet; orbax's."""

STATE, MANIFEST = "state", "manifest/metadata"
"""Where in a checkpoint the arrays are, and the list of them."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not what was written."""


class OtherFormat(ValueError):
    """A checkpoint is whole, but of a format that this version does not read."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint.

    Attributes:
        step: Its number: windows so far.
        leaves: Arrays by name.
        specs: What is known of them.
        notes: What else was saved, JSON.
    """

    step: int
    leaves: Mapping[str, np.ndarray]
    specs: Mapping[str, LeafSpec]
    notes: Mapping[str, Any]


class Store:
    """The checkpoints of one run, in folders named by their step.

    Written by orbax beside their place and moved there when they are whole, so that a kill
    leaves the earlier ones. A list of the leaves with the digests of their bytes tells a
    damaged one. Those that are not to be kept are deleted once a new one is there.

    Args:
        folder: The folder; it is made.
        keep_last: How many of the newest are kept, at least 1.
        keep_best: How many of the best by score are kept in addition; of equal ones the older.
        best: `"min"` or `"max"`: which scores are better.
        monitor: What the scores are of; those of something else do not count.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 1,
        keep_best: int = 0,
        best: str = "min",
        monitor: str = "",
    ):
        import orbax.checkpoint as ocp

        from elche_jax.checkpoint import handler

        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._sign, self._monitor = 1 if best == "min" else -1, monitor
        self._drop_halves()
        with _quiet():
            self._orbax = ocp.Checkpointer(handler.Handler())
        self._content = handler.Content
        names = [path.name for path in self.folder.iterdir()]
        steps = [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
        self._scores = {step: self._score(step) for step in steps}

    def save(
        self,
        step: int,
        leaves: Mapping[str, np.ndarray],
        own: frozenset[str],
        notes: Mapping[str, Any],
        score: float | None = None,
    ) -> int:
        """Writes a checkpoint; it is there when this returns.

        Args:
            step: Its number.
            leaves: Arrays by name.
            own: Names of those of which each device has its own.
            notes: What else there is, for JSON.
            score: For the best to be kept; None, or not finite, for none.

        Returns:
            Bytes of the arrays.

        Raises:
            ValueError: The step is there already, by orbax.
            OSError: It could not be written.
        """
        specs = {name: LeafSpec.of(array, name in own) for name, array in leaves.items()}
        score = None if score is None or not math.isfinite(score) else float(score)
        content = {
            "format": FORMAT,
            "step": step,
            "score": score,
            "monitor": self._monitor,
            "leaves": {name: asdict(spec) for name, spec in specs.items()},
            "notes": dict(notes),
        }
        text = json.dumps(content)
        manifest = {"text": text, "digest": digest(text.encode())}
        there = {name: written(array) for name, array in leaves.items() if array.size}
        nested = unflatten_dict(there, sep="/")
        try:
            with _quiet():
                self._orbax.save(self._place(step), args=self._content(nested, manifest))
        except BaseException as error:
            self._drop_halves()  # do not leave halves on a disk that is full
            cause = _system_error(error, self._place(step))
            if cause is None:
                raise
            raise cause from error
        self._scores[step] = score
        self._tidy()
        return sum(array.nbytes for array in leaves.values())

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints there are, oldest first."""
        return sorted(self._scores)

    @property
    def ranked(self) -> list[int]:
        """The steps of those that have a score, the best first."""
        known = [
            (self._sign * score, step)
            for step, score in list(self._scores.items())  # a thread may add one meanwhile
            if score is not None
        ]
        return [step for _, step in sorted(known)]

    def read(self, step: int) -> Saved:
        """Reads a checkpoint.

        Raises:
            DamagedCheckpoint: It is not what was written.
            OtherFormat: It is, but of another version.
            MemoryError, OSError: It could not be read, so its state is unknown.
        """
        try:
            return self._read(step)
        except (OtherFormat, MemoryError):
            raise
        except OSError as error:
            if not isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise  # of the disk or the network, not of what was written
            raise self._damaged(step, error) from error
        except Exception as error:  # orbax, tensorstore and json have errors of their own
            raise self._damaged(step, error) from error

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole; None if there is none.

        Damaged ones are renamed, so that they are out of the way, and the log says so.
        """
        damaged = False
        for step in reversed(self.steps):
            try:
                saved = self.read(step)
                if damaged:
                    logger.warning("elche: the checkpoint after %d windows is taken.", step)
                return saved
            except DamagedCheckpoint as error:
                aside = self._put_aside(step)
                logger.warning("elche: %s. It was renamed to %s.", error, aside)
                damaged = True
        if damaged:
            logger.warning("elche: there is no whole checkpoint left in %s.", self.folder)
        return None

    def close(self) -> None:
        """Releases the folder."""
        self._orbax.close()

    def _place(self, step: int) -> Path:
        return self.folder / str(step)

    def _drop_halves(self) -> None:
        """Deletes what a kill or an error has left unfinished."""
        for half in self.folder.glob(f"*{HALF}*"):
            shutil.rmtree(half, ignore_errors=True)  # one that stays is no checkpoint either

    def _tidy(self) -> None:
        """Deletes the checkpoints that are not to be kept."""
        steps = self.steps
        kept = {*steps[-self._keep_last :], *self.ranked[: self._keep_best]}
        for step in (step for step in steps if step not in kept):
            half = self.folder / f"{step}{HALF}"  # a kill leaves no half of a checkpoint
            with suppress(FileNotFoundError):  # it was deleted by hand
                shutil.rmtree(self._place(step).rename(half))
            del self._scores[step]

    def _score(self, step: int) -> float | None:
        try:
            content = self._manifest(step)
            return content["score"] if content["monitor"] == self._monitor else None
        except Exception:  # it is damaged, so its score is unknown
            return None

    def _damaged(self, step: int, error: Exception) -> DamagedCheckpoint:
        what = shorten(str(error), 160).rstrip(".") or "it is not"
        return DamagedCheckpoint(
            f"checkpoint: {self._place(step)} must be as it was written, but "
            f"{type(error).__name__}: {what}"
        )

    def _manifest(self, step: int) -> dict[str, Any]:
        manifest = json.loads((self._place(step) / MANIFEST).read_text())
        if digest(manifest["text"].encode()) != manifest["digest"]:
            raise ValueError("its list of leaves has changed")
        content = json.loads(manifest["text"])
        if content["format"] != FORMAT:
            raise OtherFormat(
                f"checkpoint: {self._place(step)} must have format {FORMAT}, got "
                f"{content['format']}. Read it with the version of elche_jax that wrote it."
            )
        return content

    def _read(self, step: int) -> Saved:
        content = self._manifest(step)
        specs = {
            name: LeafSpec(**spec | {"shape": tuple(spec["shape"])})
            for name, spec in content["leaves"].items()
        }
        found = self._arrays(step, [name for name, spec in specs.items() if 0 not in spec.shape])
        leaves = {
            name: unwritten(found[name], spec)
            if name in found
            else np.empty(spec.shape, spec.dtype)
            for name, spec in specs.items()
        }
        for name, spec in specs.items():
            if digest(leaves[name]) != spec.digest:
                raise ValueError(f"leaf {name} has changed")
        return Saved(step, leaves, specs, content["notes"])

    def _arrays(self, step: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads arrays, all at once; without orbax, which leaves threads behind that write
        to stderr where one cannot be read."""
        import tensorstore as ts

        base = {"driver": "file", "path": f"{self._place(step) / STATE}/"}

        def spec(name: str) -> dict[str, Any]:
            path = name.replace("/", ".") + "/"
            return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}

        opened = {name: ts.open(spec(name), open=True, read=True) for name in names}
        reading = {name: array.result().read() for name, array in opened.items()}
        return {name: np.asarray(array.result()) for name, array in reading.items()}

    def _put_aside(self, step: int) -> Path:
        places = (self.folder / f"damaged-{step}-{number}" for number in count())
        aside = next(place for place in places if not place.exists())
        self._place(step).rename(aside)
        del self._scores[step]
        return aside


@contextmanager
def _quiet() -> Generator[None]:
    """Suppresses what orbax logs about an error in each of its threads, with tracebacks: the
    error itself is raised and logged once."""

    def others(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    absl = logging.getLogger("absl")
    absl.addFilter(others)
    try:
        yield
    finally:
        absl.removeFilter(others)


def _system_error(error: BaseException, place: Path) -> OSError | None:
    """What the system said, if tensorstore reports it, at length, as a `ValueError`."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else OSError(int(code[1]), os.strerror(int(code[1])), str(place))
