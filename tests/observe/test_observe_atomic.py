"""A file is there whole, or as it was."""

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
