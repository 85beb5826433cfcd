"""`Checkpointer`: saves a run during training and restores it."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from os.path import exists  # unlike Path.exists, accepts any name
from pathlib import Path
from typing import Any

from elche_jax import _check as check, _progress
from elche_jax._exit import before_exit
from elche_jax._log import logger
from elche_jax._processes import RestartRequested, of_process
from elche_jax._threads import BackgroundThread, wait_at_exit
from elche_jax.checkpoint.content import Notes, content_of, read_by_first, run_of, state_of
from elche_jax.checkpoint.errors import CheckpointError, advised, beside, described, none_there
from elche_jax.checkpoint.lock import lock
from elche_jax.checkpoint.memory import Memory
from elche_jax.checkpoint.options import RESUME, Checkpoints
from elche_jax.checkpoint.snapshot import take
from elche_jax.checkpoint.store import Saved, Store, may_hold
from elche_jax.data.order import Cursor
from elche_jax.engine.state import TrainState
from elche_jax.observe.events import CheckpointEvent
from elche_jax.train.in_flight import Window
from elche_jax.train.step import TrainStep

AGAIN_S = 60.0
"""Seconds before a job that was asked to restart, but failed to save, tries to save again."""


class Checkpointer:
    """Save and restore checkpoints of a training step in your own loop.

    A checkpoint holds everything the run needs to continue as if it had not stopped: the state,
    the cadence's state and `counts_history`, the guard's history, and the position in the data.
    The state is copied on the devices, which is quick; a thread fetches and writes the copy
    while training continues. A checkpoint is either complete or absent, even if the process is
    killed at any moment, and checksums detect changed bytes.

    `save` follows `every_windows` and `every_seconds` of `Checkpoints`, but not `every_epochs`:
    call `save(..., force=True)` yourself at the end of an epoch. Use `with`, or call `close`: a
    checkpoint still being written when the program ends may be lost.

    In a job of several processes, each creates a `Checkpointer` and makes the same calls. Only the
    first process reads and writes the folder; the others need no access to it. Errors are raised
    in all processes.

    Attributes:
        written: Number of windows in the newest checkpoint that this object has written; None
            before the first. In a job of several processes it changes a few windows later.

    Args:
        train: The training step.
        checkpoints: Where and when to save; its folder must be set.

    Raises:
        ValueError: The folder is not set, or the processes of a job pass different `checkpoints`,
            apart from `folder` and `every_seconds`.
        RuntimeError: Another process, or another `Checkpointer`, uses the folder.
        OSError: The folder cannot be created or opened, and `on_error` is `"now"` or the folder
            may hold checkpoints. Otherwise training runs without checkpoints, and `close` raises
            `CheckpointError`.

    Examples:
        >>> import tempfile, elche_jax as elche, jax, numpy as np, optax
        >>> def loss_fn(params, batch, rng):
        ...     return ((batch["x"] @ params["w"] - 1) ** 2).mean()
        >>> data = {"x": np.ones((16, 2), "float32")}
        >>> folder = tempfile.TemporaryDirectory()
        >>> checkpoints = elche.Checkpoints(folder.name, every_windows=2)
        >>> def run(epochs):
        ...     train = elche.build_train_step(loss_fn, optax.sgd(0.1), devices=jax.devices()[:2])
        ...     state = train.init({"w": np.zeros(2, "float32")})
        ...     with elche.Checkpointer(train, checkpoints) as saver:
        ...         state, cursor = saver.restore(state, resume="auto")
        ...         for window in train.windows(data, batch_size=2, epochs=epochs, cursor=cursor):
        ...             state, metrics = train(state, window)
        ...             saver.save(state, window)
        ...     return cursor, int(state.step[0])
        >>> run(epochs=1)
        (None, 4)
        >>> run(epochs=2)
        (Cursor(epoch=0, microbatch=8, window=4), 8)
        >>> folder.cleanup()
    """

    def __init__(self, train: TrainStep, checkpoints: Checkpoints):
        check.instance("Checkpointer", "train", train, TrainStep)
        check.instance("Checkpointer", "checkpoints", checkpoints, Checkpoints)
        folder = checkpoints.path
        if folder is None:
            todo = "Write Checkpoints('runs/name')."
            rule = "be a path"
            raise ValueError(check.message("Checkpoints", "folder", rule, None, todo))
        self._train, self._checkpoints, self._folder = train, checkpoints, folder.absolute()
        self._job = train.fleet.job
        self.written: int | None = None
        self._written: int | None = None  # set by the thread; other processes learn it later
        self._thread: BackgroundThread | None = None
        self._error: BaseException | None = None  # of the thread or of opening the folder
        self._shared: BaseException | None = None  # the same, once all processes know it
        self._closed = False
        self._step: int | None = None
        self._run: int | None = None  # that `_step` belongs to, see `TrainStep.run`
        self._last = time.monotonic()
        self._stack = ExitStack()  # what `close` undoes
        self._created: list[Path] = []
        self._unwanted: list[Path] = []  # created folders to remove again in `close`
        self._store: Store | None = None  # in the first process only
        self._memory = Memory(self._folder, checkpoints)
        self._job.check_same("Checkpointer", checkpoints=checkpoints.shared())
        self._opened = self._job.by_first(self._open)
        self._not_again_before = 0.0
        _ = self._job.places  # a collective call; the first process needs the places when it saves

    def _open(self) -> bool:
        """Open the folder; return False if it fails and training runs without checkpoints."""
        asked, parents = self._checkpoints, (self._folder, *self._folder.parents)
        self._created = [path for path in parents if not exists(path)]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stack.callback(lock(self._folder))  # before anything in it is changed
            self._store = Store(self._folder, asked)
            return True
        except BaseException as error:
            self._stack.close()
            if not isinstance(error, OSError):
                raise
            now = asked.on_error == "now"
            if now or may_hold(self._folder):  # a fresh start would ignore them
                why = "" if now else ", as it may hold checkpoints"
                raise OSError(
                    f"checkpoints: {self._folder} must be readable and writable{why}, but "
                    f"{advised(error)}"
                ) from error
            logger.warning("elche: no checkpoints will be written: %s", described(error))
            self._error = error
            return False

    def restore(self, state: TrainState, resume: str = "auto") -> tuple[TrainState, Cursor | None]:
        """Restore the newest intact checkpoint, after waiting for one that is still being written.

        Damaged checkpoints are renamed and logged. The number of devices may differ: replicated
        leaves are copied, leaves that differ between devices are averaged, and the cadence starts
        from the known speeds of the devices.

        Args:
            state: The state from `init`; returned unchanged if there is no checkpoint.
            resume: `"auto"`: start if there is no checkpoint. `"must"`: raise an error if there
                is none. `"never"`: raise an error if there is one.

        Returns:
            The state and the cursor for `train.windows`; the cursor is None at the start.

        Raises:
            ValueError: The checkpoint is of a different model or optimizer (the message names the
                first leaf that differs) or has a different format version, or `resume` does not
                allow what is in the folder; or `close` was called.
        """
        return self.restore_all(state, resume)[:2]

    def restore_all(
        self, state: TrainState, resume: str = "auto"
    ) -> tuple[TrainState, Cursor | None, Mapping[str, Any]]:
        """Restore like `restore`, and also return the saved notes."""
        self._check_open("Checkpointer.restore")
        check.one_of("Checkpointer.restore", "resume", resume, RESUME)
        self.wait()  # the thread may be writing the newest one, or removing the one to be read
        with _progress.phase("restore"):
            saved = read_by_first(self._job, lambda: self._newest(resume))
            if saved is None:
                return state, None, {}
            notes, state = saved.notes, state_of(saved, self._train, state, self._folder)
        self._train.restore_run(run_of(saved), state)
        self._step, self._run = saved.step, self._train.run
        logger.info("elche: resumed after window %d from %s.", saved.step, self._folder)
        return state, Cursor.from_dict(notes["cursor"]), notes["notes"]

    def _newest(self, resume: str) -> Saved | None:
        """Read the newest checkpoint, in the first process."""
        folder, store = self._folder, self._store
        there = [] if store is None else store.steps
        if resume == "never":
            if there:
                raise ValueError(
                    f"checkpoints: {folder} must be empty with resume='never', got a checkpoint "
                    f"after {there[-1]} windows. Pass resume='auto' to go on, or another folder."
                )
            return None
        saved = None if store is None else store.newest()
        on_disk = -1 if saved is None else saved.step
        kept = self._memory.newest(on_disk, max(there, default=-1))
        if kept is not None:  # it did not reach the disk
            if store is not None:
                self._bring(store, kept)
            saved = kept
        if saved is None and resume == "must":
            self._unwanted = self._created
            raise none_there(folder)
        return saved

    def _bring(self, store: Store, kept: Saved) -> None:
        """Write a checkpoint to disk that was only in memory."""
        logger.info("elche: the checkpoint after %d windows was in memory only.", kept.step)
        try:
            store.save(kept)
        except OSError as error:  # it stays in memory
            if self._checkpoints.on_error == "now":
                raise self._failed(error) from error
            self._error = error
        else:
            self._memory.forget(kept.step)

    def best(self, state: TrainState) -> TrainState:
        """Return the state of the checkpoint with the best score, see `Checkpoints.keep_best`.

        Waits for a checkpoint being written, and works after `close`, too. Use the state for
        inference, not to train further: cadence and cursor are not restored.

        Args:
            state: The state from `init`.

        Raises:
            ValueError: No checkpoint has a score, or it is of a different model.
            DamagedCheckpoint: The checkpoint is damaged.
            OSError: A score cannot be read.
        """

        def read() -> Saved:
            store = self._store
            if store is None or not store.ranked:
                raise ValueError(
                    f"checkpoints: {self._folder} must hold a checkpoint with a score of "
                    f"{self._checkpoints.monitor!r}, got none. Train with keep_best and an "
                    "evaluation."
                )
            return store.read(store.ranked[0])

        self.wait()  # as in `restore_all`
        with _progress.phase("restore"):
            saved = read_by_first(self._job, read)
            assert saved is not None
            return state_of(saved, self._train, state, self._folder)

    def due(self, window: Window) -> bool:
        """Return whether a checkpoint is due by number of windows or by time.

        In a job of several processes, the first process measures the time and tells the others, so
        a checkpoint is due a few windows later. The same holds if a process is asked to restart.

        Raises:
            CheckpointError: As in `save`.
            ValueError: `close` was called.
        """
        self._check_open("Checkpointer.due")
        wishes = self._train.pipeline_of(window, "Checkpointer.due").wishes
        every, seconds = self._checkpoints.every_windows, self._checkpoints.every_seconds
        if _progress.asked() and time.monotonic() >= self._not_again_before:
            wishes.add("again")
        if self._job.first:
            if seconds is not None and time.monotonic() - self._last >= seconds:
                wishes.add("save")
            if self._thread is not None and not self._thread.running:
                # the thread resets the step if it could not write the checkpoint
                wishes.add("lost" if self._step is None else "wrote")
        agreed = wishes.agreed
        if "wrote" in agreed or "lost" in agreed:
            self._join()
            if "lost" in agreed:
                self.wait()  # to learn the reason
            else:
                self.written = self._step
            wishes.clear("wrote")
            wishes.clear("lost")
        self.check()
        if every is not None and (window.index + 1) % every == 0:
            return True
        return not wishes.agreed.isdisjoint({"save", "again"})

    def save(
        self,
        state: TrainState,
        window: Window,
        *,
        force: bool = False,
        score: float | None = None,
        notes: Notes | None = None,
    ) -> bool:
        """Save a checkpoint if it is due.

        Waits for the windows in flight, so that their measurements are saved too, and for the
        previous checkpoint if it is still being written; the rest overlaps with training.

        Args:
            state: The state that `train` returned for this window.
            window: The window trained last.
            force: Save even if it is not due. A window that is saved already is not saved again.
            score: Score of the state, for `keep_best`.
            notes: Returns further data to save as JSON. Called on the writing thread, or by `save`
                itself before a restart.

        Returns:
            Whether a checkpoint is being saved.

        Raises:
            CheckpointError: An earlier checkpoint could not be written, and `on_error="now"`.
            RestartRequested: The job was asked to restart, and this checkpoint is on disk or kept
                in memory.
            NonFiniteError, ReplicaMismatch: Raised by a window in flight.
            TypeError: `window` is not a window, or `state` not a training state on the devices.
            ValueError: The folder already has a checkpoint of this window or a later one, because
                `restore` was not called, or `init` has begun another run since; or something else
                has its name; or another window was trained since; or a leaf of `state`
                was donated, or it is of a different model; or `close` was called.
        """
        self._check_open("Checkpointer.save")
        pipeline = self._train.pipeline_of(window, "Checkpointer.save")
        due = self.due(window)
        if pipeline.trained != window.index:
            rule = f"be the one that was trained last ({pipeline.trained})"
            todo = "Save before the next window is trained."
            raise ValueError(check.message("Checkpointer.save", "window", rule, window.index, todo))
        step = window.index + 1
        # another run's window of this number is not what was saved: `_check_free` rejects it
        saved = self._step == step and self._run == self._train.run
        if not self._opened or not (force or due) or saved:
            return False
        self._train.check_state(state, "Checkpointer.save", pipeline.runner.state)
        again = "again" in pipeline.wishes.agreed
        if not again:
            self._wait_or_raise()  # one at a time, which bounds the memory for copies
        pipeline.finish()
        self._job.by_first(lambda: self._check_free(step))
        # copied before this returns: the next window donates the state's buffers
        snapshot = take(state, self._train.common(state), self._job)
        run = self._train.run_to_dict(state)
        content = cache(partial(content_of, window, snapshot, run, notes, score))
        if again:
            if self._store is not None:  # before the disk, which may fail or hang
                after = max(self._store.steps, default=-1)
                self._memory.keep(step, after, content)
            self._wait_or_raise()
        self._step, self._run, self._last = step, self._train.run, time.monotonic()
        for wish in ("save", "wrote", "lost"):  # of the previous checkpoint, which all know about
            pipeline.wishes.clear(wish)
        if self._store is not None:  # only the first process writes
            self._begin(self._store, window, content)
        if again:
            self._wait_or_raise()
            if self.written == step:
                raise RestartRequested(step)
            pipeline.wishes.clear("again")  # the run goes on; `due` repeats the request
            self._not_again_before = time.monotonic() + AGAIN_S
            logger.warning(
                "elche: the job is not started again, as no checkpoint could be written; the next "
                "try is in %g s.",
                AGAIN_S,
            )
        return True

    def _check_open(self, where: str) -> None:
        """Check that the folder is still locked, and that `close` will raise what fails."""
        if self._closed:
            todo = "Call it before close, or inside the with block."
            raise ValueError(
                check.message(where, "the checkpointer", "be open", "a closed one", todo)
            )

    def _wait_or_raise(self) -> None:
        """Wait for the checkpoint being written, if any, then `check`."""
        self.wait()
        self.check()

    def _begin(self, store: Store, window: Window, content: Callable[[], Saved]) -> None:
        """Start the thread that fetches and writes a checkpoint."""
        job = store, window, content
        thread = BackgroundThread(self._write, job, name="elche-checkpoint", daemon=False)
        wait_at_exit(thread)  # in case a Ctrl-C ends the wait below
        thread.start()
        self._thread = thread
        # before Python closes its thread pools, one of which orbax needs
        self._forget = before_exit(thread.wait)

    def _check_free(self, step: int) -> None:
        """Check in the first process that a checkpoint may be written."""
        assert self._store is not None
        if self._store.steps and self._store.steps[-1] >= step:
            raise ValueError(
                f"checkpoints: {self._folder} must hold no checkpoint of the window to be saved "
                f"({step}) or a later one, got one after {self._store.steps[-1]}. Call restore "
                "before the loop and pass its cursor, or take another folder."
            )
        self._store.check_free(step)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk or has failed; all processes must call it."""
        self._join()
        error = None if self._error is None else advised(self._error)
        outcome = self._written, self._step, error
        self.written, self._step, text = self._job.by_first(lambda: outcome)
        self._shared = None
        if text is not None:
            first = self._job.devices[0].process_index
            self._shared = self._error or of_process(RuntimeError(text), first)

    def _join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.wait()
            self._forget()
            self._thread = None

    def check(self) -> None:
        """Raise the error of a failed checkpoint, if `on_error="now"`.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        if self._checkpoints.on_error == "now":
            self._raise()

    def close(self) -> None:
        """Wait for the last checkpoint and release the folder.

        In a job of several processes, all must call it unless an error is being raised.

        Raises:
            CheckpointError: A checkpoint could not be written.
        """
        try:
            if sys.exc_info()[1] is None and not self._closed:
                self.wait()
            else:  # the others may not get here
                self._join()
        finally:
            self._closed = True
            if self._unwanted and self.written is None:
                with suppress(OSError):  # the folder is no longer empty
                    (self._folder / ".lock").unlink(missing_ok=True)
                    for path in self._unwanted:
                        path.rmdir()
            self._stack.close()
        self._raise()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        with beside(error):
            self.close()

    def _raise(self) -> None:
        error = self._error if self._job.one_process else self._shared
        if error is None:
            return
        self._error = self._shared = None
        raise self._failed(error) from error

    def _failed(self, error: BaseException) -> CheckpointError:
        what = advised(error) if self._job.first else str(error)
        return CheckpointError(f"checkpoints: {self._folder} must take checkpoints, but {what}")

    def _write(self, store: Store, window: Window, content: Callable[[], Saved]) -> None:
        """Fetch and write a checkpoint, on the thread."""
        begun, step = time.perf_counter(), window.index + 1
        try:
            saved = content()
            with _progress.phase("checkpoint", window.index):
                size = store.save(saved)
            self._memory.forget(step)
        except BaseException as error:  # raised later by `check` or `close`
            if self._memory.step == step:
                self._written = step
                logger.warning(
                    "elche: the checkpoint after %d windows is in memory only, until the next "
                    "generation writes it: %s", step, described(error),
                )  # fmt: skip
                return
            if self._error is None:  # log once: on a full disk all of them fail
                logger.warning(
                    "elche: the checkpoint of window %d was not written: %s. Later failures are "
                    "not logged.", step, described(error),
                )  # fmt: skip
            # no step: a window whose checkpoint failed may be saved again
            self._error, self._step = self._error or error, None
        else:
            self._written = step
            if self._job.one_process:
                self.written = step
            if self._train.timeline is not None:
                self._train.timeline.add(
                    CheckpointEvent, window=window.index, epoch=window.epoch,
                    seconds=time.perf_counter() - begun, size=size, path=str(step),
                )  # fmt: skip
