"""Archives are read in memory, and hostile or damaged ones refused in one line."""

import gzip
import io
import random
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.factories import damaged, truncated, write_tar, write_zip

from fixpoint.data.archives.archive import files, read

MEMBERS = {"top/a.txt": b"first", "top/b/c.txt": b"second" * 1000}


def contents(path):
    return {name: read(file, name) for name, file in files([path])}


@pytest.mark.parametrize(
    ("write", "name"), [(write_zip, "a.zip"), (write_tar, "a.tar.gz"), (write_tar, "a.tgz")]
)
def test_members_are_read(write, name, tmp_path):
    path = write(tmp_path / name, MEMBERS)
    assert contents(path) == MEMBERS
    assert list(tmp_path.iterdir()) == [path]  # nothing is unpacked
    renamed = path.rename(tmp_path / "without_suffix")
    assert contents(renamed) == MEMBERS


def test_a_plain_file_and_a_gz_file_are_themselves(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"plain")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"packed"))
    found = {n: f.read() for n, f in files([tmp_path / "a.txt", tmp_path / "b.txt.gz"])}
    assert found == {"a.txt": b"plain", "b.txt": b"packed"}


@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_what_macos_adds_is_skipped_and_names_have_slashes(write, tmp_path):
    extra = {"__MACOSX/top/._a.txt": b"\0", "top/._a.txt": b"\0", "top\\b\\d.txt": b"third"}
    path = write(tmp_path / ("a.zip" if write is write_zip else "a.tgz"), MEMBERS | extra)
    assert contents(path) == {**MEMBERS, "top/b/d.txt": b"third"}


def test_a_folder_is_read_as_the_archive_that_it_was(tmp_path):
    for name, data in {
        **MEMBERS,
        ".DS_Store": b"\0",
        "__MACOSX/a.txt": b"",
        ".git/a.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "top" / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    write_zip(tmp_path / "e.zip", {"e/f.txt": b"inside"})
    found = {**MEMBERS, "top/d.txt": b"packed", "e/f.txt": b"inside"}
    assert contents(tmp_path) == found
    (tmp_path / "e.zip").write_bytes(b"PK\3\4")
    with pytest.raises(ValueError, match=r"e\.zip is truncated or corrupt"):
        contents(tmp_path)


def test_tar_names_lose_the_dot_in_front(tmp_path):
    assert list(contents(write_tar(tmp_path / "a.tgz", {"./x/a.txt": b"1"}))) == ["x/a.txt"]


@pytest.mark.parametrize("write", [write_zip, write_tar])
@pytest.mark.parametrize("name", ["../a.txt", "x/../../a.txt", "/etc/a.txt", "..\\a.txt", "C:\\a"])
def test_names_that_point_outside_are_refused(write, name, tmp_path):
    path = write(tmp_path / ("a.zip" if write is write_zip else "a.tgz"), {"ok": b"", name: b"1"})
    with pytest.raises(ValueError, match="points outside the archive; get a fresh copy") as error:
        contents(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_links_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(entry)
    with pytest.raises(ValueError, match=r"a\.txt is a link or a device"):
        contents(tmp_path / "a.tgz")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        entry = zipfile.ZipInfo("a.txt")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/hostname")
    with pytest.raises(ValueError, match=r"a\.txt is a link"):
        contents(tmp_path / "a.zip")


def test_the_same_name_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", "1")
        archive.writestr("./a.txt", "2")
    with pytest.raises(ValueError, match="is there twice"):
        contents(tmp_path / "a.zip")


def test_an_encrypted_member_is_refused(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a.txt": b"1"})
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"a\.txt is encrypted"):
        contents(path)


@pytest.mark.parametrize(("write", "name"), [(write_zip, "a.zip"), (write_tar, "a.tgz")])
@pytest.mark.parametrize("fraction", [0, 0.001, 0.5, 0.98])
def test_a_truncated_archive_is_refused(write, name, fraction, tmp_path):
    path = truncated(write(tmp_path / name, MEMBERS), fraction)
    with pytest.raises(ValueError, match="is truncated or corrupt") as error:
        contents(path)
    assert "\n" not in str(error.value)


def test_a_damaged_member_is_refused(tmp_path):
    path = write_zip(tmp_path / "a.zip", MEMBERS)
    data = bytearray(path.read_bytes())
    data[40] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        contents(path)


def test_a_page_instead_of_an_archive_is_refused(tmp_path):
    (tmp_path / "a.zip").write_text("<html>404 Not Found</html>")
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        contents(tmp_path / "a.zip")


def test_a_file_that_grows_beyond_its_limit_is_refused(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"zeros": bytes(10**6)})  # 1 KB packed
    for name, file in files([path]):
        with pytest.raises(ValueError, match="zeros holds more than the 1000 bytes"):
            read(file, name, at_most=1000)
    assert read(io.BytesIO(bytes(1000)), "zeros", at_most=1000) == bytes(1000)


def test_a_missing_archive_is_named():
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.zip"):
        contents(Path("nowhere.zip"))


@pytest.mark.parametrize(("write", "name"), [(write_zip, "a.zip"), (write_tar, "a.tgz")])
def test_any_damage_of_an_archive_gets_one_line(write, name, tmp_path):
    whole = write(tmp_path / name, MEMBERS).read_bytes()
    chance, messages = random.Random(0), []
    for _ in range(200):
        (tmp_path / name).write_bytes(damaged(whole, chance))
        try:
            found = contents(tmp_path / name)
        except ValueError as error:
            messages.append(str(error))
        else:
            for key in set(found) & set(MEMBERS):
                assert found[key] == MEMBERS[key]
    assert len(messages) > 100
    assert not any("\n" in message for message in messages)
