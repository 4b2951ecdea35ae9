"""A file is made whole from its archive, or the folder stays as it was."""

from dataclasses import replace

import numpy as np
import pytest
from support.factories import write_zip

from fixpoint.data import storage as cache
from fixpoint.data.archives.archive import files, read
from fixpoint.data.archives.download import Archive
from fixpoint.data.sources.source import Source

OLD = {"x": np.zeros(3)}


def parse(paths):
    for name, file in files(paths):
        if name == "x.txt":
            return {"x": np.array([float(n) for n in read(file, name).split()])}
    raise ValueError("the archive lacks x.txt")


def verify(arrays):
    if len(arrays["x"]) != 4:
        raise ValueError(f"x must have 4 numbers, got {len(arrays['x'])}")


SOURCE = Source(
    name="toy",
    file="toy.npz",
    archives=(Archive(url="https://example.org/a.zip", file="a.zip", checksum=None),),
    page="https://example.org",
    needs="the zip archive",
    parse=parse,
    verify=verify,
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path / "data"))
    cache.write_npz(tmp_path / "data" / "toy.npz", OLD)
    return tmp_path / "data"


def test_a_whole_archive_replaces_the_file(folder, tmp_path):
    path = SOURCE.install([write_zip(tmp_path / "b.zip", {"x.txt": b"1 2 3 4"})])
    assert path == folder / "toy.npz"
    assert np.load(path)["x"].tolist() == [1, 2, 3, 4]
    assert [p.name for p in folder.iterdir()] == ["toy.npz"]
    assert path.stat().st_mode & 0o777 == (tmp_path / "b.zip").stat().st_mode & 0o777


WRONG = {
    "counts": ({"x.txt": b"1 2 3"}, "x must have 4 numbers, got 3"),
    "another": ({"y.txt": b"1 2 3 4"}, "lacks x.txt"),
    "outside": ({"../toy.npz": b"evil", "x.txt": b"1 2 3 4"}, "points outside"),
    "no numbers": ({"x.txt": b"1 2 3 four"}, "four"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_archive_leaves_the_folder_as_it_was(folder, tmp_path, name):
    members, message = WRONG[name]
    before = (folder / "toy.npz").read_bytes()
    with pytest.raises(ValueError, match=message) as error:
        SOURCE.install([write_zip(tmp_path / "b.zip", members)])
    assert "\n" not in str(error.value)
    assert [p.name for p in folder.iterdir()] == ["toy.npz"]
    assert (folder / "toy.npz").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.zip", "data"]


def test_a_full_disk_leaves_the_folder_as_it_was(folder, tmp_path, monkeypatch):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    before = (folder / "toy.npz").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        SOURCE.install([write_zip(tmp_path / "b.zip", {"x.txt": b"1 2 3 4"})])
    assert [p.name for p in folder.iterdir()] == ["toy.npz"]
    assert (folder / "toy.npz").read_bytes() == before


@pytest.mark.parametrize(("checksum", "kept"), [(None, False), ("sha256:00", True)])
def test_a_wrong_download_without_a_checksum_is_removed(folder, checksum, kept):
    archive = replace(SOURCE.archives[0], checksum=checksum)
    (folder / "downloads").mkdir()
    path = write_zip(folder / "downloads" / "a.zip", {"x.txt": b"1"})
    with pytest.raises(ValueError, match="got 1"):
        replace(SOURCE, archives=(archive,)).install([path])
    assert path.exists() is kept


def test_the_subset_is_read_while_the_whole_is_not_there(folder):
    source = replace(SOURCE, file="whole.npz", subset_file="toy.npz")
    assert source.find() == (folder / "toy.npz", False)
    cache.write_npz(folder / "whole.npz", OLD)
    assert source.find() == (folder / "whole.npz", True)
    with pytest.raises(FileNotFoundError, match="run 'fixpoint data fetch toy'"):
        replace(SOURCE, file="other.npz").find()


def test_a_source_that_requires_registration_says_what_to_do(folder):
    with pytest.raises(ValueError, match=r"get the zip archive from .*'.* toy --archive FILE'"):
        replace(SOURCE, archives=()).obtain()
