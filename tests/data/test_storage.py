"""Where files are looked for, and how a bad one is reported."""

import random
import zipfile
from pathlib import Path

import numpy as np
import pooch
import pytest
from support.factories import damaged

from fixpoint.data.storage import find, folder, read_npz, write_npz

SCHEMA = {"x": ("float32", (40, 5)), "y": ("uint8", (40,))}
REMEDY = "make it from https://example.org/toy.zip"


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(40, 5)).astype("float32"), "y": np.arange(40, dtype="uint8")}


@pytest.fixture
def path(tmp_path, arrays):
    np.savez_compressed(tmp_path / "toy.npz", **arrays)
    return tmp_path / "toy.npz"


def line_of(error):
    message = str(error.value)
    assert "\n" not in message
    return message


def test_folder_follows_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.setenv("FIXPOINT_DATA", "~/somewhere")
    assert folder() == Path.home() / "somewhere"
    monkeypatch.setenv("FIXPOINT_DATA", "")  # as pooch: empty counts as not set
    assert folder() == Path(pooch.os_cache("fixpoint"))
    monkeypatch.delenv("FIXPOINT_DATA")
    assert folder() == Path(pooch.os_cache("fixpoint"))


def test_find_gives_the_path(monkeypatch, path):
    monkeypatch.setenv("FIXPOINT_DATA", str(path.parent))
    assert find("toy.npz", REMEDY) == path


def test_a_missing_file_says_where_it_was_expected_and_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        find("toy.npz", REMEDY)
    assert line_of(error) == (
        f"toy.npz was expected in {tmp_path} (FIXPOINT_DATA is {tmp_path}); {REMEDY}, "
        "or set FIXPOINT_DATA to a folder that has toy.npz"
    )
    monkeypatch.delenv("FIXPOINT_DATA")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / project)
    with pytest.raises(FileNotFoundError) as error:
        find("toy.npz", REMEDY)
    assert f"expected in {tmp_path / 'fixpoint'} (FIXPOINT_DATA is not set)" in line_of(error)


def test_read_npz_reads_what_the_schema_names(path, arrays):
    result = read_npz(path, {"x": SCHEMA["x"]})
    assert list(result) == ["x"]
    np.testing.assert_array_equal(result["x"], arrays["x"])


def damage_truncate(data):
    return data[: len(data) // 2]


def damage_payload(data):  # a byte of x itself; headers and directory stay whole
    return data[:300] + bytes([data[300] ^ 0xFF]) + data[301:]


def damage_compression(data):  # all ones is no block type of deflate
    return data[:60] + b"\xff" * 100 + data[160:]


def damage_directory(data):
    at = data.index(b"PK\x01\x02")
    return data[:at] + b"XXXX" + data[at + 4 :]


def damage_all(data):
    return b"<html>404 Not Found</html>"


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_payload, damage_compression, damage_directory, damage_all]
)
def test_a_damaged_file_is_reported_in_one_line(path, damage):
    read_npz(path, SCHEMA)  # whole
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="is truncated or corrupt") as error:
        read_npz(path, SCHEMA)
    message = line_of(error)
    assert message.startswith(str(path))
    assert message.endswith("replace it by a fresh copy")


def test_files_without_plain_arrays_are_refused(path):
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        read_npz(path, SCHEMA)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        read_npz(path, SCHEMA)
    np.savez(path, x=np.array([{}, {}]), y=np.zeros(40, "uint8"))
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        read_npz(path, SCHEMA)


def test_a_missing_array_is_named(path, arrays):
    np.savez_compressed(path, x=arrays["x"])
    with pytest.raises(ValueError, match=r"toy\.npz lacks y; replace it") as error:
        read_npz(path, SCHEMA)
    line_of(error)


@pytest.mark.parametrize(
    ("changed", "got"),
    [(np.zeros((40, 6), "float32"), r"float32 \(40, 6\)"), (np.zeros((40, 5)), "float64")],
)
def test_another_shape_or_dtype_is_refused(path, arrays, changed, got):
    np.savez_compressed(path, **(arrays | {"x": changed}))
    with pytest.raises(ValueError, match=rf"x must be float32 \(40, 5\), got {got}"):
        read_npz(path, SCHEMA)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_STORED])
def test_any_damage_of_an_npz_file_gets_one_line(tmp_path, arrays, method):
    path = tmp_path / "toy.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    whole, chance, messages = path.read_bytes(), random.Random(0), []
    for _ in range(200):
        path.write_bytes(damaged(whole, chance))
        try:
            found = read_npz(path, SCHEMA)
        except ValueError as error:
            messages.append(str(error))
        else:
            for key, array in arrays.items():
                np.testing.assert_array_equal(found[key], array)
    assert len(messages) > 100
    for message in messages:
        assert "\n" not in message
        assert message.endswith("replace it by a fresh copy")


def test_a_folder_that_cannot_be_read_is_not_called_damage(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_npz(tmp_path, SCHEMA)
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "none.npz", SCHEMA)


def test_an_npz_file_is_written_atomically(tmp_path, arrays):
    path = tmp_path / "new" / "toy.npz"
    write_npz(path, arrays)
    np.testing.assert_array_equal(read_npz(path, SCHEMA)["x"], arrays["x"])
    assert [p.name for p in path.parent.iterdir()] == ["toy.npz"]
