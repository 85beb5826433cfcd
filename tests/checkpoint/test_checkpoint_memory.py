"""What a job that is asked to start again keeps in memory, if its disk fails or hangs."""

import logging

import pytest
from resumed import GRADIENTS, content, data, run, steps

import elche_jax as elche
from elche_jax import _progress
from elche_jax.checkpoint.store import Store

CASE = GRADIENTS["dropout"]
AT = 7
"""Windows after which the run is asked; no checkpoint is due."""


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A folder as a launcher gives it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(_progress.MEMORY, str(folder))
    return folder


@pytest.fixture
def fails(monkeypatch):
    """Lets the checkpoints of some folders fail."""
    save, full = Store.save, []

    def saves(self, *arguments):
        if any(self.folder.is_relative_to(folder) for folder in full):
            raise OSError(28, "No space left on device")
        return save(self, *arguments)

    monkeypatch.setattr(Store, "save", saves)
    return full


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Whether this process is asked is forgotten at the end."""
    monkeypatch.setattr(_progress, "_asked", False)


def stopped(folder, before=lambda: None):
    """Trains until the job is asked to start again."""
    train = CASE.build()
    state = CASE.init(train)
    with elche.Checkpointer(train, elche.Checkpoints(folder, every_windows=3)) as saver:
        for window in train.windows(data(), 2, epochs=1):
            state, _ = train(state, window)
            if window.index + 1 == AT:
                saver.wait()
                before()
                elche.distributed.request_restart()
            saver.save(state, window)


def restored(folder, resume="auto"):
    """The cursor from which the next run goes on."""
    train = CASE.build()
    with elche.Checkpointer(train, elche.Checkpoints(folder)) as saver:
        return saver.restore(CASE.init(train), resume)[1]


def kept(memory):
    """The windows of what is in memory."""
    return sorted(path.name for path in memory.glob("*/*"))


def test_the_next_run_begins_with_what_did_not_reach_the_disk(
    memory, fails, tmp_path, monkeypatch, caplog
):
    whole, _ = run(CASE)
    folder = tmp_path / "saved"
    with pytest.raises(elche.RestartRequested) as ended:
        stopped(folder, lambda: fails.append(folder))
    assert (ended.value.windows, ended.value.code) == (AT, 75)
    assert (steps(folder), kept(memory)) == ([3, 6], [str(AT)])
    assert caplog.messages[-1] == (
        f"elche: the checkpoint of window {AT - 1} is in memory only, from which the next "
        f"generation goes on: OSError: [Errno 28] No space left on device"
    )

    monkeypatch.setattr(_progress, "_asked", False)
    fails.clear()
    with pytest.raises(ValueError, match=f"got a checkpoint after {AT} windows. Pass resume="):
        restored(folder, "never")
    assert kept(memory) == [str(AT)]
    again, _ = run(CASE, folder, resume="must")
    assert content(again) == content(whole)
    assert not kept(memory), "a later checkpoint is on disk"


def test_what_is_on_disk_needs_no_memory(memory, tmp_path):
    with pytest.raises(elche.RestartRequested):
        stopped(tmp_path / "saved")
    assert (steps(tmp_path / "saved"), kept(memory)) == ([3, 6, AT], [])


def test_memory_that_is_full_is_no_error(memory, fails, tmp_path, caplog):
    fails.append(memory)
    with pytest.raises(elche.RestartRequested):
        stopped(tmp_path / "saved")
    assert (steps(tmp_path / "saved"), kept(memory)) == ([3, 6, AT], [])
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
        f"elche: the checkpoint of window {AT - 1} is kept on disk only: OSError: [Errno 28] No "
        "space left on device"
    ]


def test_another_run_has_a_memory_of_its_own(memory, fails, tmp_path):
    with pytest.raises(elche.RestartRequested):
        stopped(tmp_path / "saved", lambda: fails.append(tmp_path / "saved"))
    assert restored(tmp_path / "other") is None
    assert restored(tmp_path / "saved").window == AT


def test_what_is_damaged_in_memory_is_not_used(memory, fails, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "saved"
    with pytest.raises(elche.RestartRequested):
        stopped(folder, lambda: fails.append(folder))
    (path,) = memory.glob(f"*/{AT}/manifest/metadata")
    path.write_text(path.read_text().replace("digest", "digested", 1))
    assert restored(folder).window == 6
    assert "there is no intact checkpoint left" in caplog.text
