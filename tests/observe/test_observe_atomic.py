"""A file is there whole, or as it was."""

import errno
import os

import pytest

from elche_jax.observe.atomic import replacing


def test_the_old_content_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "new" / "page.html"
    with replacing(path) as file:
        file.write(b"old")
        assert not path.exists()
    with replacing(str(path)) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and os.listdir(path.parent) == ["page.html"]


def test_after_an_error_nothing_is_left_of_it(tmp_path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    with pytest.raises(KeyError, match="half"), replacing(path) as file:
        file.write(b"new")
        raise KeyError("half")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["page.html"]


def test_it_may_be_read_by_those_who_may_read_any_new_file(tmp_path):
    (tmp_path / "other").write_bytes(b"")
    with replacing(tmp_path / "page.html"):
        pass
    mode = (tmp_path / "page.html").stat().st_mode
    assert mode == (tmp_path / "other").stat().st_mode


@pytest.mark.skipif(os.name == "nt", reason="Windows has no permissions for others")
def test_what_only_some_may_read_stays_so(tmp_path):
    path = tmp_path / "page.html"
    path.touch(mode=0o600)
    with replacing(path) as file:
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o600}
        file.write(b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    for content in (b"new", b"newer"):  # before the target is there, and after
        with replacing(link) as file:
            file.write(content)
        assert link.is_symlink() and target.read_bytes() == content
    assert os.listdir(target.parent) == ["page.html"]


def test_a_pipe_is_written_as_it_is(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(path) as file:
            file.write(b"all")
        assert os.read(end, 9) == b"all"
    finally:
        os.close(end)
    assert path.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_link_to_what_has_no_path_is_written_as_it_is():
    """As /dev/stdout is where it is a pipe."""
    read, write = os.pipe()
    try:
        with replacing(f"/dev/fd/{write}") as file:
            file.write(b"all")
        assert os.read(read, 9) == b"all"
    finally:
        os.close(read)
        os.close(write)


def test_an_error_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    with pytest.raises(IsADirectoryError) as error, replacing(tmp_path):
        pass
    assert error.value.filename == str(tmp_path)
    path = tmp_path / "page.html"

    def full(here, there):
        raise OSError(errno.ENOSPC, "No space left on device", str(here), None, str(there))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as error, replacing(path):
        pass
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="another"), replacing(path):
        (tmp_path / "another").read_bytes()
