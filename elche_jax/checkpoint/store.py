"""A folder of checkpoints, each either complete or absent, with checksums."""

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import numpy as np
from flax.traverse_util import unflatten_dict

from elche_jax import _progress
from elche_jax._log import logger
from elche_jax.checkpoint.leaves import LeafSpec, decode, digest, encode
from elche_jax.checkpoint.options import Checkpoints
from elche_jax.observe.atomic import sync, sync_entries

FORMAT = 2

UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name of an unfinished checkpoint, the same as in Orbax. Ours have the step before it
and a number after it; Orbax itself may be writing others in this folder."""

STATE, MANIFEST = "state", f"{_progress.MANIFEST}/metadata"
"""Paths of the arrays and of their manifest within a checkpoint. A folder without the manifest's
folder is not ours, whatever its name: it may be a class folder, a run named by its seed or a
checkpoint of Orbax."""

_Read = TypeVar("_Read")


class DamagedCheckpoint(RuntimeError):
    """A checkpoint is not as it was written."""


class OtherFormat(ValueError):
    """A checkpoint is intact, but has a format that this version cannot read."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint.

    Attributes:
        step: Number of windows trained.
        leaves: Arrays by name.
        specs: Descriptions of the arrays by name.
        notes: Further data, as JSON values.
        score: Score for `keep_best`; None if it has no score of the monitored metric.
    """

    step: int
    leaves: Mapping[str, np.ndarray]
    specs: Mapping[str, LeafSpec]
    notes: Mapping[str, Any]
    score: float | None


class Store:
    """The checkpoints of one run, in folders named by step.

    A checkpoint is written to a temporary folder, which is renamed when complete, so that a kill
    leaves the earlier checkpoints intact. A manifest with checksums of the leaves detects damage.
    Old checkpoints are deleted only once a new one is complete and would survive a power cut.

    Args:
        folder: The folder; created if missing.
        checkpoints: Which to keep; of equal scores, the older one ranks first. Scores of metrics
            other than its `monitor` are ignored.

    Raises:
        OSError: The folder cannot be created, or the scores for `keep_best` cannot be read.
    """

    def __init__(self, folder: Path, checkpoints: Checkpoints):
        # imported here: only runs with checkpoints load orbax, and they load it before they train
        from elche_jax.checkpoint.handler import write_arrays

        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._checkpoints = checkpoints
        self._remove_unfinished()
        self._write_arrays = write_arrays
        self._steps = set(steps_in(self.folder))
        self._scores: dict[int, float | None] = {}  # of those that were asked for
        if checkpoints.keep_best:
            self._read_scores()  # now, as an error would end training later

    def save(self, saved: Saved) -> int:
        """Write a checkpoint; it is complete when this returns.

        Args:
            saved: The checkpoint; a score that is not finite counts as none.

        Returns:
            Size of the arrays in bytes.

        Raises:
            ValueError: The step already exists, or something else has its name.
            OSError: The checkpoint could not be written.
        """
        step, score = saved.step, saved.score
        self.check_free(step)
        path = self._path(step)
        score = None if score is None or not math.isfinite(score) else float(score)
        content = {
            "format": FORMAT,
            "step": step,
            "score": score,
            "monitor": self._checkpoints.monitor,
            "leaves": {name: asdict(spec) for name, spec in saved.specs.items()},
            "notes": dict(saved.notes),
        }
        # a string within the JSON, so that the digest covers exactly these bytes
        text = json.dumps(content)
        manifest = {"text": text, "digest": digest(text.encode())}
        # orbax refuses arrays without elements; the manifest alone describes them
        there = {name: encode(array) for name, array in saved.leaves.items() if array.size}
        temporary = self._free(f"{step}{UNFINISHED}")
        try:
            (temporary / STATE).mkdir(parents=True)
            with _quiet():
                self._write_arrays(temporary / STATE, unflatten_dict(there, sep="/"))
            (temporary / MANIFEST).parent.mkdir()
            (temporary / MANIFEST).write_text(json.dumps(manifest))
            sync(temporary)  # orbax syncs only the arrays
            temporary.rename(path)
        except BaseException as error:
            self._remove_unfinished()  # free the space on a full disk
            cause = _system_error(error, path)
            if cause is None:
                raise
            raise cause from error
        self._steps.add(step)
        self._scores[step] = score
        sync_entries(self.folder)  # after a power cut, the new one or the old ones must be there
        self._remove_old()
        return sum(array.nbytes for array in saved.leaves.values())

    def check_free(self, step: int) -> None:
        """Check that a checkpoint may be written.

        Raises:
            ValueError: The step already exists, or something else has its name.
        """
        path = self._path(step)
        if os.path.lexists(path):
            got = "another checkpoint" if step in self._steps else "something that is not one"
            raise ValueError(
                f"checkpoints: {path} must not exist before a checkpoint is written there, got "
                f"{got}. Move it, or use another folder."
            )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, oldest first."""
        return sorted(self._steps)

    @property
    def ranked(self) -> list[int]:
        """Steps of the checkpoints with a score, best first; raises errors of the disk."""
        sign = 1 if self._checkpoints.mode == "min" else -1
        self._read_scores()
        scores = list(self._scores.items())  # copied: the writing thread may add one
        known = [(sign * score, step) for step, score in scores if score is not None]
        return [step for _, step in sorted(known)]

    def read(self, step: int) -> Saved:
        """Read a checkpoint.

        Raises:
            DamagedCheckpoint: It is not as it was written.
            OtherFormat: It is intact, but has a different format version.
            MemoryError, OSError: It could not be read, so it may be intact.
        """
        return self._intact(step, self._read)

    def _intact(self, step: int, read: Callable[[int], _Read]) -> _Read:
        """Read something of a checkpoint; raises what `read` raises."""
        try:
            return read(step)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise self._damaged(step, error) from error
        except (OtherFormat, MemoryError, OSError):  # an OSError comes from the disk or network
            raise
        except Exception as error:  # tensorstore and json raise many kinds of errors
            raise self._damaged(step, error) from error

    def newest(self) -> Saved | None:
        """Read the newest intact checkpoint; return None if there is none.

        Damaged checkpoints are logged and renamed, which frees their steps.
        """
        damaged = False
        for step in reversed(self.steps):
            try:
                saved = self.read(step)
                if damaged:
                    logger.warning("elche: using the checkpoint after %d windows.", step)
                return saved
            except DamagedCheckpoint as error:
                aside = self._set_aside(step)
                logger.warning("elche: %s. It was renamed to %s.", error, aside)
                damaged = True
        if damaged:
            logger.warning("elche: there is no intact checkpoint left in %s.", self.folder)
        return None

    def _path(self, step: int) -> Path:
        return self.folder / str(step)

    def _remove_unfinished(self) -> None:
        """Delete what a kill or an error has left unfinished."""
        for path in self.folder.glob(f"[0-9]*{UNFINISHED}-[0-9]*"):
            shutil.rmtree(path, ignore_errors=True)  # leftovers are never mistaken for checkpoints

    def _remove_old(self) -> None:
        """Delete the checkpoints that need not be kept."""
        steps, asked = self.steps, self._checkpoints
        best = self.ranked[: asked.keep_best] if asked.keep_best else ()
        kept = {*steps[-asked.keep_last :], *best}
        for step in (step for step in steps if step not in kept):
            # renamed first, so that a kill leaves no partial checkpoint
            doomed = self._free(f"{step}{UNFINISHED}")
            try:
                shutil.rmtree(self._path(step).rename(doomed))
            except FileNotFoundError:  # the user has deleted it
                pass
            except OSError as error:  # not fatal: the new one is complete
                logger.warning("elche: an old checkpoint could not be deleted: %s", error)
            self._forget(step)

    def _read_scores(self) -> None:
        """Read the scores that are not known yet; raises errors of the disk.

        Without its score, the best checkpoint would be deleted.
        """
        for step in self._steps - self._scores.keys():
            try:
                score = self._intact(step, lambda step: self._score_in(self._manifest(step)))
            except (DamagedCheckpoint, OtherFormat):
                score = None
            self._scores[step] = score

    def _score_in(self, content: Mapping[str, Any]) -> float | None:
        return content["score"] if content["monitor"] == self._checkpoints.monitor else None

    def _damaged(self, step: int, error: Exception) -> DamagedCheckpoint:
        what = shorten(str(error), 160).rstrip(".") or "no message"
        return DamagedCheckpoint(
            f"checkpoint: {self._path(step)} must be as it was written, but "
            f"{type(error).__name__}: {what}"
        )

    def _manifest(self, step: int) -> dict[str, Any]:
        manifest = json.loads((self._path(step) / MANIFEST).read_text())
        if digest(manifest["text"].encode()) != manifest["digest"]:
            raise ValueError("its manifest has changed")
        content = json.loads(manifest["text"])
        if content["format"] != FORMAT:
            raise OtherFormat(
                f"checkpoint: {self._path(step)} must have format {FORMAT}, got "
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
            name: decode(found[name], spec) if name in found else np.empty(spec.shape, spec.dtype)
            for name, spec in specs.items()
        }
        for name, spec in specs.items():
            # orbax alone returned an array with a flipped bit, without an error
            if digest(leaves[name]) != spec.digest:
                raise ValueError(f"leaf {name} has changed")
        return Saved(step, leaves, specs, content["notes"], self._score_in(content))

    def _arrays(self, step: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Read arrays concurrently.

        Not with Orbax: when an array cannot be read, its remaining threads write to stderr.
        """
        import tensorstore as ts

        base = {"driver": "file", "path": f"{self._path(step) / STATE}/"}

        def spec(name: str) -> dict[str, Any]:
            path = name.replace("/", ".") + "/"
            return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}

        opened = {name: ts.open(spec(name), open=True, read=True) for name in names}
        reading = {name: array.result().read() for name, array in opened.items()}
        return {name: np.asarray(array.result()) for name, array in reading.items()}

    def _free(self, name: str) -> Path:
        """Return a path that does not exist; earlier ones may be impossible to delete."""
        places = (self.folder / f"{name}-{number}" for number in count())
        return next(place for place in places if not place.exists())

    def _set_aside(self, step: int) -> Path:
        aside = self._free(f"damaged-{step}")
        self._path(step).rename(aside)
        self._forget(step)
        return aside

    def _forget(self, step: int) -> None:
        self._steps.discard(step)
        self._scores.pop(step, None)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, oldest first, including damaged ones.

    Raises:
        OSError: The folder, or one of its folders that may be a checkpoint, cannot be read.
    """
    names = os.listdir(folder)
    steps = sorted(int(name) for name in names if _progress.STEP.fullmatch(name))
    ours = [step for step in steps if _is_ours(folder / str(step))]
    if len(ours) < len(steps):
        others = ", ".join(str(step) for step in steps if step not in ours)
        logger.warning(
            "elche: what has no %s in %s is not a checkpoint, and is left alone: %s.",
            Path(MANIFEST).parent, folder, shorten(others, 100),
        )  # fmt: skip
    return ours


def _is_ours(path: Path) -> bool:
    try:
        os.listdir(path / Path(MANIFEST).parent)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def may_hold(folder: Path) -> bool:
    """Return whether a folder holds checkpoints; True if that cannot be determined."""
    try:
        return bool(steps_in(folder))
    except OSError as error:  # these mean that there is no such folder
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress the tracebacks that Orbax logs in each thread; the error itself is raised."""

    def not_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in Path(record.pathname).parts

    absl = logging.getLogger("absl")
    absl.addFilter(not_orbax)
    try:
        yield
    finally:
        absl.removeFilter(not_orbax)


def _system_error(error: BaseException, place: Path) -> OSError | None:
    """Return the system error within tensorstore's long `ValueError`; None if there is none."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return None if code is None else OSError(int(code[1]), os.strerror(int(code[1])), str(place))
