"""What a job that is asked to start again keeps in memory, if its disk fails or hangs."""

import shutil
from pathlib import Path

import pytest
from resumed import GRADIENTS, content, data, run, steps
from waits import eventually

import elche_jax as elche
from elche_jax import _progress
from elche_jax.checkpoint import memory as module
from elche_jax.checkpoint.store import Store

CASE = GRADIENTS["dropout"]
AT = 7
"""Windows after which the run is asked; no checkpoint is due."""
FULL = "OSError: [Errno 28] No space left on device"


@pytest.fixture(scope="module")
def train():
    """A training step for all runs that train, each of which begins anew."""
    return CASE.build()


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A folder as a launcher gives it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(_progress.MEMORY, str(folder))
    return folder


@pytest.fixture
def saves(monkeypatch):
    """Functions that are called with the step before a checkpoint is written to a folder."""
    save, before = Store.save, {}

    def saves(self, saved):
        before.get(self.folder, lambda _: None)(saved.step)
        return save(self, saved)

    monkeypatch.setattr(Store, "save", saves)
    return before


def full(step):
    """Lets what was due before reach the disk, whenever its thread writes it."""
    if step % 3:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Whether this process is asked is forgotten at the end."""
    monkeypatch.setattr(_progress, "_asked", False)


def stopped(train, folder, before=lambda: None, at=AT, score=None, **options):
    """Trains until the job is asked to start again, after a window."""
    state = CASE.init(train)
    saving = elche.Checkpoints(folder, **{"every_windows": 3} | options)
    with (
        pytest.raises(elche.RestartRequested) as ended,
        elche.Checkpointer(train, saving) as saver,
    ):
        for window in train.windows(data(), 2, epochs=1):
            state, _ = train(state, window)
            if window.index + 1 == at:
                before()
                elche.distributed.request_restart()
            saver.save(state, window, score=score if window.index + 1 == at else None)
    _progress._asked = False
    assert (ended.value.windows, ended.value.code) == (at, 75)


def restored(folder, resume="auto", **options):
    """The cursor from which the next run goes on."""
    train = CASE.build()
    with elche.Checkpointer(train, elche.Checkpoints(folder, **options)) as saver:
        return saver.restore(CASE.init(train), resume)[1]


def kept(memory):
    """The windows of what is in memory."""
    return sorted(path.name for path in memory.glob("*/*") if path.name.isdecimal())


def test_the_next_run_begins_with_what_did_not_reach_the_disk(
    train, memory, saves, tmp_path, caplog
):
    whole, _ = run(CASE, train=train)
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}))
    assert (steps(folder), kept(memory)) == ([3, 6], [str(AT)])
    assert caplog.messages[-1] == (
        f"elche: the checkpoint after {AT} windows is in memory only, until the next generation "
        f"writes it: {FULL}"
    )
    (place,) = memory.iterdir()
    assert (place / _progress.DESTINATION).read_text() == str(folder)

    saves.clear()
    again, _ = run(CASE, folder, resume="must", train=train)
    assert content(again) == content(whole)
    assert not kept(memory)


BEST = {"keep_best": 1, "monitor": "accuracy", "mode": "max"}


def best(folder):
    """After how many windows the best checkpoint was written."""
    train = CASE.build()
    with elche.Checkpointer(train, elche.Checkpoints(folder, **BEST)) as saver:
        return int(saver.best(CASE.init(train)).step[0])


def test_it_keeps_its_score(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}), score=0.9, **BEST)
    saves.clear()
    assert restored(folder, **BEST).window == AT
    assert best(folder) == AT


def test_a_score_of_another_metric_is_none(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}), score=0.9, **BEST)
    saves.clear()
    assert restored(folder, **BEST | {"monitor": "loss"}).window == AT
    with pytest.raises(ValueError, match="must hold a checkpoint with a score of 'accuracy'"):
        best(folder)


def test_it_is_written_even_if_no_window_is_left(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}))
    with pytest.raises(elche.CheckpointError, match="must take checkpoints, but OSError"):
        restored(folder)
    with pytest.raises(elche.CheckpointError):  # at the end
        restored(folder, on_error="end")
    assert (steps(folder), kept(memory)) == ([3, 6], [str(AT)])
    saves.clear()
    assert restored(folder).window == AT
    assert (steps(folder), kept(memory)) == ([3, 6, AT], [])
    assert restored(folder).window == AT


def test_it_is_kept_before_a_disk_that_hangs(train, memory, saves, tmp_path):
    folder, seen = tmp_path / "saved", []

    def hangs(step):
        if step == 6:  # begun before, and not over when the end is kept
            eventually(lambda: kept(memory) == [str(AT)])
        seen.append(kept(memory))

    saves[folder] = hangs
    stopped(train, folder)
    assert seen == [[], [str(AT)], [str(AT)]]
    assert (steps(folder), kept(memory)) == ([3, 6, AT], [])


def test_memory_that_is_short_is_no_error(train, memory, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_room", lambda _: 100.0)
    stopped(train, tmp_path / "saved")
    assert (steps(tmp_path / "saved"), kept(memory)) == ([3, 6, AT], [])
    (said,) = [text for text in caplog.messages if "memory" in text]
    assert said.startswith(
        f"elche: the checkpoint after {AT} windows is not kept in memory, only on disk: {FULL}"
    )
    assert said.endswith("bytes to keep, 100 free'")


def test_what_memory_is_free(tmp_path):
    """The folder's own space is one of several limits."""
    assert 0 < module._room(tmp_path) <= shutil.disk_usage(tmp_path).free


V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
NO_LIMIT = 9223372036854771712
"""What version 1 has in place of none."""
KIB = 1024


@pytest.mark.parametrize(
    ("line", "names", "groups", "room"),
    [
        ("0::/job/step", V2, {}, 500 * KIB),  # what the machine has
        ("0::/job/step", V2, {"job/step": ("max", 30)}, 500 * KIB),
        ("0::/job/step", V2, {"job/step": (100, 30)}, 70),
        ("0::/job/step", V2, {"job/step": ("max", 30), "job": (100, 40)}, 60),
        ("0::/", V2, {"": (100, 30)}, 70),
        ("5:memory:/job/step", V1, {"memory/job/step": (100, 30)}, 70),
        ("5:memory:/job", V1, {"memory/job": (NO_LIMIT, 30), "memory": (90, 40)}, 50),
        ("5:memory:/job", V1, {"memory/job": (NO_LIMIT, 30)}, 500 * KIB),
        ("5:memory:/outside/job", V1, {"memory": (100, 30)}, 70),  # in a container
        ("5:cpu,memory:/job", V1, {"cpu,memory/job": (100, 30)}, 70),
        ("5:memory:/job\n0::/job", V1, {"memory/job": (100, 30)}, 70),  # both versions
        ("5:cpu:/job\n6:name=a:b:/c", V1, {"cpu/job": (100, 30)}, 500 * KIB),
    ],
)
def test_what_memory_a_control_group_leaves(line, names, groups, room, tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    for group, numbers in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, number in zip(names, numbers, strict=True):
            (folder / name).write_text(f"{number}\n")
    assert module._room(tmp_path, tmp_path) == room


def test_another_run_has_a_memory_of_its_own(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}))
    assert restored(tmp_path / "other") is None
    assert kept(memory) == [str(AT)]


def test_a_folder_whose_name_is_not_utf8(memory):
    """As of a relative path, if the working directory has such a name."""
    kept = [module.Memory(Path(name), elche.Checkpoints()) for name in ("/\udcfe", "/\udcff")]
    assert [one.steps for one in kept] == [[], []]


def test_a_run_that_begins_anew_does_not_find_it(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}))
    saves.clear()
    shutil.rmtree(folder)
    assert restored(folder) is None
    # an earlier one takes its place
    stopped(train, folder, lambda: saves.update({folder: full}), at=5)
    assert (steps(folder), kept(memory)) == ([3], ["5"])


def test_what_is_older_than_the_disk_is_not_used(train, memory, saves, tmp_path):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}), at=5)
    (path,) = memory.glob("*/5")
    shutil.copytree(path.parent, tmp_path / "copy")
    saves.clear()
    run(CASE, folder, resume="must", train=train)
    shutil.copytree(tmp_path / "copy", path.parent)
    newest = steps(folder)[-1]
    assert newest > 5 and restored(folder).window == newest


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_what_is_damaged_is_not_used(where, train, memory, saves, tmp_path, caplog):
    folder = tmp_path / "saved"
    stopped(train, folder, lambda: saves.update({folder: full}))
    saves.clear()
    (path,) = memory.glob(f"*/{AT}")
    if where == "disk":  # ended between the two
        shutil.copytree(path, folder / str(AT))
        path = folder / str(AT)
    manifest = path / "manifest/metadata"
    manifest.write_text(manifest.read_text().replace("digest", "digested", 1))
    assert restored(folder).window == (6 if where == "memory" else AT)
    assert "must be as it was written" in caplog.text
