"""Private folders are refused where others could have written; names from files stay inside their folder."""

import os

import pytest

from autoshard.errors import FileFormatError, FolderError
from autoshard.folders import path_inside, private_folder


def test_a_private_folder_is_made_for_its_owner_only(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "missing" / "cache")
    finally:
        os.umask(before)
    assert folder == tmp_path / "missing" / "cache" and folder.stat().st_mode & 0o777 == 0o700
    assert private_folder(folder) == folder


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FolderError, match=f"{mode:04o}.*chmod 700"):
        private_folder(folder)


def test_a_folder_that_others_may_only_read_is_taken(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    assert private_folder(folder) == folder


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder = private_folder(tmp_path / "cache")
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(FolderError, match="belongs to"):
        private_folder(folder)


def test_links_and_files_are_no_private_folders(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(FolderError, match="a folder itself"):
            private_folder(tmp_path / name)
    assert private_folder(tmp_path / "link" / "inner") == tmp_path / "real" / "inner"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "cache", f"{tmp_path}/\0"):
        with pytest.raises(FolderError):
            private_folder(path)


@pytest.mark.parametrize("name", ["a", "a/b", "a/../b", "./a", "..a", "a..", "link_in/x"])
def test_names_that_stay_inside(tmp_path, name):
    (tmp_path / "sub").mkdir()
    (tmp_path / "link_in").symlink_to("sub")
    assert path_inside(tmp_path, name).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a/../..", "link_out/x", "link_out", "loop/x", "a\0b"],
)
def test_names_that_lead_out_are_refused(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "link_out").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    with pytest.raises(FileFormatError, match="must stay inside"):
        path_inside(folder, name)


def test_a_folder_whose_name_begins_alike_is_outside(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run2").mkdir()
    with pytest.raises(FileFormatError):
        path_inside(tmp_path / "run", "../run2/x")
    with pytest.raises(FileFormatError):
        path_inside(tmp_path / "run", str(tmp_path / "run" / "x"))
