"""What is written is read, or known to be damaged; and what is kept."""

import errno
import json
import logging
import math
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import children
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.traverse_util import unflatten_dict
from hypothesis import given, settings, strategies as st

from elche_jax.checkpoint.leaves import LeafSpec, decode, encode, names_of
from elche_jax.checkpoint.lock import lock
from elche_jax.checkpoint.options import Checkpoints
from elche_jax.checkpoint.store import DamagedCheckpoint, OtherFormat, Saved, Store

RANDOM = np.random.default_rng(0)
LEAVES = {
    "params/w": RANDOM.normal(size=(40, 30)).astype("float32"),
    "params/half": RANDOM.normal(size=(7, 3)).astype(ml_dtypes.bfloat16),
    "params/number": np.array(1.5, ml_dtypes.bfloat16)[()],
    "params/empty": np.empty((0, 3), "float32"),
    "empty/too": np.empty((4, 0), ml_dtypes.bfloat16),
    "small": np.array([True, False]),
    "int4": np.array([1, -8, 7], ml_dtypes.int4),
    "float8": np.array([0.5, np.nan], ml_dtypes.float8_e4m3fn),
    "nan": np.array([np.nan, -0.0, np.inf], "float64"),
    "key": np.array([1, 2**32 - 1], "uint32"),
    "counts": RANDOM.integers(0, 9, (5, 4)),
    "a%2Fb/%2E%2E/größe": np.int32(3),
}
OWN = frozenset({"counts"})


def same(one, other):
    """Whether leaves are alike: shapes, dtypes and bits."""
    assert one.keys() == other.keys()
    return all(
        (x.shape, x.dtype, x.tobytes()) == (other[n].shape, other[n].dtype, other[n].tobytes())
        for n, x in one.items()
    )


def save(store, step, leaves, own, notes, score=None):
    """Write a checkpoint, and return its size."""
    specs = {name: LeafSpec.of(leaf, name in own) for name, leaf in leaves.items()}
    return store.save(Saved(step, leaves, specs, notes, score))


def fill(folder, steps=(1, 2), **kept):
    """A folder of checkpoints; their leaves differ in one number."""
    store = Store(folder, Checkpoints(keep_last=len(steps), **kept))
    for step in steps:
        save(store, step, leaves(step), OWN, {"step": step}, score=float(step))
    return folder


def leaves(step):
    return LEAVES | {"step": np.int32(step)}


def is_whole(saved):
    step = saved.step
    assert saved.notes == {"step": step}
    assert {name for name, spec in saved.specs.items() if spec.own} == OWN
    return same(saved.leaves, leaves(step))


def test_the_type_of_an_array_is_named_where_orbax_does_not(tmp_path, monkeypatch):
    """As in orbax 0.12.0 to 0.12.4."""
    whole = ocp.type_handlers.get_json_tspec_write

    def without_type(*args, **kwargs):
        spec = whole(*args, **kwargs)
        spec.pop("dtype", None)
        return spec

    monkeypatch.setattr(ocp.type_handlers, "get_json_tspec_write", without_type)
    store = Store(fill(tmp_path), Checkpoints(keep_last=2))
    assert is_whole(store.read(2))


def test_what_is_written_is_read(tmp_path):
    store = Store(fill(tmp_path), Checkpoints(keep_last=2))
    assert store.steps == [1, 2]
    assert is_whole(store.read(1)) and is_whole(store.newest())
    size = save(store, 3, {"w": np.zeros((3, 4), "float32")}, OWN, {})
    assert size == 48 and store.steps == [2, 3]


def test_a_step_that_is_there_is_not_overwritten(tmp_path):
    store = Store(fill(tmp_path), Checkpoints())
    with pytest.raises(
        ValueError,
        match=r"^checkpoints: .*/2 must not exist before a checkpoint is written there, got "
        r"another checkpoint\. Move it, or use another folder\.$",
    ):
        save(store, 2, LEAVES, OWN, {})
    assert is_whole(store.newest())


def test_what_is_no_checkpoint_is_left_alone(tmp_path, caplog):
    """Class folders, runs by seed and checkpoints of Orbax are also named by numbers."""
    folder = fill(tmp_path, (4,))
    for name in ("0", "1", "9"):
        (folder / name / "state").mkdir(parents=True)
        (folder / name / "state" / "mine.txt").write_text(name)
    (folder / "8").write_text("mine")
    others = {path: path.read_text() for path in folder.rglob("mine.txt")}
    caplog.clear()
    store = Store(folder, Checkpoints(keep_last=1))
    assert caplog.messages == [
        f"elche: what has no manifest in {folder} is not a checkpoint, and is left alone: "
        "0, 1, 8, 9."
    ]
    assert store.steps == [4] and is_whole(store.newest())
    save(store, 5, leaves(5), OWN, {"step": 5})
    assert store.steps == [5] and is_whole(store.newest())
    for step in (8, 9):
        with pytest.raises(
            ValueError,
            match=rf"^checkpoints: .*/{step} must not exist before a checkpoint is written there, "
            r"got something that is not one\. Move it, or use another folder\.$",
        ):
            save(store, step, LEAVES, OWN, {})
    assert {path: path.read_text() for path in folder.rglob("mine.txt")} == others
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "5", "8", "9"]


# -- damage


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("filled"))


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
def test_every_file_of_a_checkpoint_may_be_damaged(damage, filled, tmp_path, caplog):
    files = [path.relative_to(filled) for path in (filled / "2").rglob("*") if path.is_file()]
    assert len(files) > 5
    noticed = 0
    for number, file in enumerate(sorted(files)):
        folder = tmp_path / str(number)
        shutil.copytree(filled, folder)
        damage(folder / file)
        caplog.clear()
        store = Store(folder, Checkpoints(keep_last=2, keep_best=1))
        try:
            whole = is_whole(store.read(2))
        except DamagedCheckpoint as error:
            whole = False
            noticed += 1
            assert str(error).startswith(f"checkpoint: {folder / '2'} must be as it was written")
            assert is_whole(store.newest()) and store.steps == [1]
            assert (folder / "damaged-2-0").is_dir() and not (folder / "2").exists()
            warned = [r.getMessage() for r in caplog.records if r.name == "elche_jax"]
            assert len(warned) == 2
            assert warned[0].startswith(f"elche: {error}".rstrip(".")[:60])
            assert warned[0].endswith(f"It was renamed to {folder / 'damaged-2-0'}.")
            assert warned[1] == "elche: using the checkpoint after 1 windows."
        else:
            assert whole, file
            assert store.newest().step == 2
        save(store, 3, leaves(3), OWN, {"step": 3}, score=3.0)
        if not whole:
            save(store, 4, leaves(4), OWN, {"step": 4}, score=4.0)
        assert is_whole(store.newest())
    assert noticed >= 4  # the list of leaves, and three that hold the leaves


def test_a_damaged_step_is_written_anew_and_damaged_again(filled, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(filled, folder)
    for number in range(2):
        flipped(folder / "2" / "manifest" / "metadata")
        store = Store(folder, Checkpoints(keep_last=2))
        assert store.newest().step == 1
        assert (folder / f"damaged-2-{number}").is_dir()
        save(store, 2, leaves(2), OWN, {"step": 2})
        assert is_whole(store.newest()) and store.steps == [1, 2]


def test_all_are_damaged(filled, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(filled, folder)
    for step in "12":
        shutil.rmtree(folder / step / "state")
    store = Store(folder, Checkpoints())
    assert store.newest() is None and store.steps == []


def change(folder, **values):
    """Changes the list of leaves as another version would write it."""
    from elche_jax.checkpoint.leaves import digest

    path = folder / "2" / "manifest" / "metadata"
    text = json.dumps(json.loads(json.loads(path.read_text())["text"]) | values)
    path.write_text(json.dumps({"text": text, "digest": digest(text.encode())}))


def test_another_format_is_no_damage(filled, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(filled, folder)
    change(folder, format=1)
    store = Store(folder, Checkpoints(keep_best=1))
    with pytest.raises(
        OtherFormat, match=r"checkpoint: .*/2 must have format 2, got 1\. Read it with the version"
    ):
        store.newest()
    assert store.steps == [1, 2]  # nothing was put aside


@pytest.mark.parametrize("error", [MemoryError, PermissionError])
def test_what_cannot_be_read_now_is_not_put_aside(error, filled, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(filled, folder)
    store = Store(folder, Checkpoints())

    def fails(*_):
        raise error("not now")

    with monkeypatch.context() as patch, pytest.raises(error, match="not now"):
        patch.setattr(store, "_read", fails)
        store.newest()
    with monkeypatch.context() as patch, pytest.raises(error, match="not now"):
        patch.setattr(Path, "read_text", fails)
        Store(folder, Checkpoints(keep_best=1))  # without its score the best would be deleted
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        unranked = Store(folder, Checkpoints())  # none is kept for its score
        assert unranked.steps == [1, 2]
        with pytest.raises(error, match="not now"):
            _ = unranked.ranked
    assert is_whole(store.newest()) and store.steps == [1, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from elche_jax.checkpoint.leaves import LeafSpec
from elche_jax.checkpoint.options import Checkpoints
from elche_jax.checkpoint.store import Saved, Store

store = Store(Path(sys.argv[1]), Checkpoints(keep_last=1))
rename = os.rename

def kill(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

os.rename = os.replace = Path.rename = kill
leaves = {"w": np.ones((100, 100))}
specs = {"w": LeafSpec.of(leaves["w"], own=False)}
store.save(Saved(3, leaves, specs, {}, None))
"""


@pytest.mark.slow  # test_kills, and test_what_a_kill_has_left_is_gone_before_anything_is_written
def test_what_a_killed_save_leaves_behind(filled, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(filled, folder)
    done = children.run(sys.executable, "-c", KILLED, folder)
    assert done.returncode == -9
    left = [path.name for path in folder.iterdir() if path.name not in "12"]
    assert left, "the temporary folder"
    store = Store(folder, Checkpoints(keep_last=2))
    assert store.steps == [1, 2] and is_whole(store.newest())
    save(store, 3, leaves(3), OWN, {"step": 3})
    assert is_whole(store.newest()) and store.steps == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


def test_all_is_on_disk_before_old_ones_go(tmp_path, monkeypatch):
    """As a power cut may lose whatever was not synced, also the names in a folder."""
    store, done = Store(fill(tmp_path, (1,)), Checkpoints(keep_last=1)), []

    def noting(module, name, note):
        call = getattr(module, name)

        def noted(*arguments, **options):
            done.append((name, note(*arguments)))
            return call(*arguments, **options)

        monkeypatch.setattr(module, name, noted)

    noting(os, "fsync", lambda file: os.fstat(file).st_ino)
    noting(os, "rename", lambda _, new: Path(new).name)
    noting(shutil, "rmtree", lambda path, **_: Path(path).name)
    save(store, 2, leaves(2), OWN, {"step": 2})
    monkeypatch.undo()
    there = [tmp_path / "2", *(tmp_path / "2").rglob("*")]
    assert len([path for path in there if path.is_file()]) > 5
    moved = done.index(("rename", "2"))
    synced = {what for name, what in done[:moved] if name == "fsync"}
    assert synced == {path.stat().st_ino for path in there}
    old = "1.orbax-checkpoint-tmp-0"
    assert done[moved + 1 :] == [
        ("fsync", tmp_path.stat().st_ino), ("rename", old), ("rmtree", old)
    ]  # fmt: skip


def test_a_disk_that_cannot_sync(tmp_path, monkeypatch):
    """Names in a folder cannot be synced everywhere; an error that is none of that is raised."""
    store = Store(fill(tmp_path, (1,)), Checkpoints(keep_last=1))
    fsync, codes = os.fsync, [errno.EINVAL]

    def fails(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(codes[0], os.strerror(codes[0]))
        fsync(file)

    monkeypatch.setattr(os, "fsync", fails)
    save(store, 2, leaves(2), OWN, {"step": 2})
    codes[0] = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        save(store, 3, leaves(3), OWN, {"step": 3})
    assert store.steps == [2] and is_whole(store.newest())
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


# -- what is kept

SCORES = st.none() | st.sampled_from([math.nan, math.inf, 0.0, 1.0, 2.0, -3.5])


def must_remain(scores, last, best, mode):
    """Steps that must be there after saves 1, 2, ...: one look back over all of them."""
    steps = range(1, len(scores) + 1)
    known = [n for n in steps if scores[n - 1] is not None and math.isfinite(scores[n - 1])]
    sign = 1 if mode == "min" else -1
    remain = set(list(steps)[-last:])
    for _ in range(min(best, len(known))):
        found = min(known, key=lambda n: (sign * scores[n - 1], n))
        known.remove(found)
        remain.add(found)
    return sorted(remain)


@settings(max_examples=12)
@given(
    scores=st.lists(SCORES, min_size=2, max_size=7),
    last=st.integers(1, 2),
    best=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
    again=st.integers(1, 6),
)
def test_the_last_and_the_best_remain(scores, last, best, mode, again):
    checkpoints = Checkpoints(keep_last=last, keep_best=best, mode=mode)
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name), checkpoints)
        for step, score in enumerate(scores, start=1):
            if step == again:
                store = Store(Path(name), checkpoints)
            save(store, step, {"w": np.int32(step)}, frozenset(), {}, score)
            assert store.steps == must_remain(scores[:step], last, best, mode)
        there = sorted(int(path.name) for path in Path(name).iterdir())
        assert there == must_remain(scores, last, best, mode)


def test_what_a_kill_has_left_is_gone_before_anything_is_written(tmp_path):
    folder = fill(tmp_path, (1,))
    for step in (1, 2, 3):
        half = folder / f"{step}.orbax-checkpoint-tmp-{step}" / "state.orbax-checkpoint-tmp"
        half.mkdir(parents=True)
        for number in range(200):
            (half / str(number)).write_bytes(b"half")
    other = folder / "params.orbax-checkpoint-tmp"  # of Orbax, which writes beside this run
    other.mkdir()
    Store(folder, Checkpoints())
    assert sorted(path.name for path in folder.iterdir()) == ["1", other.name]


def test_what_cannot_be_deleted_blocks_no_step(tmp_path, monkeypatch):
    left = tmp_path / "2.orbax-checkpoint-tmp-0" / "state"
    left.mkdir(parents=True)
    monkeypatch.setattr("elche_jax.checkpoint.store.Store._remove_unfinished", lambda self: None)
    store = Store(fill(tmp_path, (1, 2)), Checkpoints())
    assert left.exists() and is_whole(store.read(2))


def test_an_old_one_that_cannot_be_deleted_does_no_harm(tmp_path, monkeypatch, caplog):
    """As on a network's disk, where another machine still reads it."""
    store = Store(fill(tmp_path), Checkpoints(keep_last=1))

    def busy(path, **_):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    with caplog.at_level(logging.WARNING, "elche_jax"):
        assert save(store, 3, LEAVES, OWN, {"step": 3}) > 0
    assert "an old checkpoint could not be deleted: [Errno 16]" in caplog.text
    assert store.steps == [3] and store.read(3).notes == {"step": 3}
    monkeypatch.undo()
    save(store, 4, LEAVES, OWN, {})
    Store(tmp_path, Checkpoints(keep_last=1))  # which deletes what is left
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with caplog.at_level(logging.WARNING, "elche_jax"):
        unlock = lock(tmp_path)
    unlock()  # does nothing
    assert caplog.messages == [
        f"elche: {tmp_path} is not locked, as its file system has no locks ([Errno 38] Function "
        "not implemented). Use it for one run at a time."
    ]


def test_the_score_of_a_damaged_one_is_unknown(tmp_path):
    folder = fill(tmp_path, (1, 2, 3))
    flipped(folder / "1" / "manifest" / "metadata")  # it was the best
    store = Store(folder, Checkpoints(keep_last=1, keep_best=1))
    save(store, 4, LEAVES, OWN, {}, score=9.0)
    assert store.steps == [2, 4]


# -- names and bytes


def test_names():
    tree = {"a.b": {"c/d": 1, "": 2}, "%": [3, (4, {"5": 5})]}
    names = names_of(tree)
    assert names == ["%25/0", "%25/1/0", "%25/1/1/5", "a%2Eb/%", "a%2Eb/c%2Fd"]
    assert names_of({1: 0, 2: 0}) == ["[1]", "[2]"]
    assert unflatten_dict(dict(zip(names, range(5), strict=True)), sep="/") == {
        "%25": {"0": 0, "1": {"0": 1, "1": {"5": 2}}},
        "a%2Eb": {"%": 3, "c%2Fd": 4},
    }


def test_names_that_are_not_unique():
    class Same:
        """Two keys of one name."""

        def __repr__(self):
            return "same"

        def __lt__(self, other):
            return id(self) < id(other)

    with pytest.raises(
        ValueError,
        match=r"checkpoint: every leaf must have a name of its own, got '\[same\]' twice\. Rename",
    ):
        names_of({Same(): 1, Same(): 2})


@pytest.mark.parametrize("name", LEAVES)
def test_bytes_come_back(name):
    leaf = LEAVES[name]
    spec = LeafSpec.of(leaf, own=False)
    back = decode(encode(leaf), spec)
    assert same({"": back}, {"": np.asarray(leaf)})
    assert LeafSpec.of(back, own=False) == spec
    if leaf.size:
        other = bytearray(leaf.tobytes())
        other[-1] ^= 1
        changed = np.frombuffer(bytes(other), leaf.dtype).reshape(leaf.shape)
        assert LeafSpec.of(changed, own=False) != spec


def test_jax_arrays_of_unusual_types_have_the_same_names():
    for name in ("bfloat16", "float8_e5m2", "int4"):
        assert np.asarray(jnp.zeros(2, name)).dtype == np.dtype(name)


def test_nothing_is_said_of_a_store_that_is_whole(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "elche_jax"):
        store = Store(fill(tmp_path), Checkpoints())
        store.newest()
    assert [r for r in caplog.records if r.name == "elche_jax"] == []
