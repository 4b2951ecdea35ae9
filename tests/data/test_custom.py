"""A user's own data: what is read, and one clear line for what cannot be."""

import numpy as np
import pytest
import torch

from fixpoint.data import load, load_dataset, normalize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 7, 3)).astype(np.float32)
Y = np.arange(20) % 2


def save(path, **arrays):
    np.savez(path / "mine.npz", **arrays)
    return path / "mine.npz"


def one_line(error):
    assert "\n" not in str(error.value)


def test_given_parts_stay_as_they_are(tmp_path):
    data = load(save(tmp_path, x=X, y=Y, x_test=X[:4] + 1, y_test=Y[:4]))
    assert (data.name, data.classes) == ("mine", ("0", "1"))
    assert torch.equal(data.x_train, torch.from_numpy(X))
    assert torch.equal(data.x_test, torch.from_numpy(X[:4] + 1))
    assert data.y_test.tolist() == [0, 1, 0, 1]
    assert data.groups_train is None


def test_a_fifth_of_each_class_is_held_out(tmp_path):
    path = save(tmp_path, x=X, y=Y)
    data = load(path)
    assert (len(data.x_train), len(data.x_test)) == (16, 4)
    assert data.y_test.bincount().tolist() == [2, 2]
    rows = {tuple(row) for part in (data.x_train, data.x_test) for row in part.flatten(1).tolist()}
    assert rows == {tuple(row) for row in X.reshape(20, -1).tolist()}
    assert torch.equal(load(str(path)).x_test, data.x_test)
    assert torch.equal(load_dataset(str(path)).x_test, data.x_test)


@pytest.mark.parametrize("names", [False, True])
def test_with_subjects_whole_subjects_are_held_out(tmp_path, names):
    subject = np.arange(20) // 4
    given = np.array([f"person {s}" for s in subject]) if names else subject
    data = load(save(tmp_path, x=X, y=Y, subject=given))
    train, test = set(data.groups_train.tolist()), set(data.groups_test.tolist())
    assert (len(train), len(test)) == (4, 1)
    assert train | test == {0, 1, 2, 3, 4}


def test_classes_may_have_names_and_numbers_gaps(tmp_path):
    named = load(
        save(tmp_path, x=X, y=np.where(Y == 0, "walk", "run"), x_test=X, y_test=["run"] * 20)
    )
    assert named.classes == ("run", "walk")
    assert named.y_train[:2].tolist() == [1, 0]
    assert named.y_test.tolist() == [0] * 20
    gaps = load(save(tmp_path, x=X, y=np.where(Y == 0, 10, 9), x_test=X[:1], y_test=[10]))
    assert gaps.classes == ("9", "10")
    assert gaps.y_train[:2].tolist() == [1, 0]
    assert gaps.y_test.tolist() == [1]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("float64", torch.float32),
        (">f4", torch.float32),
        ("float16", torch.float16),
        ("int16", torch.int16),
        (">i2", torch.int16),
        ("uint8", torch.uint8),
        ("int64", torch.float32),
    ],
)
def test_small_numbers_stay_small(tmp_path, dtype, stored):
    x = RNG.integers(0, 100, (20, 7, 3)).astype(dtype)
    data = load(save(tmp_path, x=x, y=Y, x_test=x, y_test=Y))
    assert data.x_train.dtype == stored
    assert torch.equal(data.inputs(data.x_test), torch.from_numpy(x.astype(np.float32)))
    scaled = normalize(data)
    assert scaled.inputs(scaled.x_train).mean(0).abs().max() < 1e-5


BAD = {
    "no x": ({"y": Y}, "has no x: it needs x"),
    "no y": ({"x": X}, "has no y"),
    "no y_test": ({"x": X, "y": Y, "x_test": X}, "has no y_test"),
    "two axes": ({"x": X[:, :, 0], "y": Y}, r"x must be numbers \(N, T, d\) .*x\[..., None\]"),
    "no rows": ({"x": X[:0], "y": Y[:0]}, "not empty, got float32"),
    "strings": ({"x": X.astype(str), "y": Y}, "x must be numbers"),
    "complex": ({"x": X + 0j, "y": Y}, "x must be numbers"),
    "objects": (
        {"x": np.array([{}]), "y": Y},
        "is truncated or corrupt .*pickle.*; save it by numpy.savez",
    ),
    "labels": ({"x": X, "y": Y[:-1]}, r"y must be \(20,\) whole numbers or strings"),
    "float labels": (
        {"x": X, "y": Y.astype(float)},
        r"convert it before saving, as by y.astype\(int\)",
    ),
    "one hot": ({"x": X, "y": np.eye(20)}, r"y must be \(20,\)"),
    "halves": ({"x": X, "y": Y / 2}, "y must be .* whole numbers"),
    "one class": ({"x": X, "y": 0 * Y}, "at least two classes, got only '0'"),
    "subject": ({"x": X, "y": Y, "subject": Y[:3]}, r"subject must be \(20,\)"),
    "one subject": ({"x": X, "y": Y, "subject": 0 * Y}, "of one group, which cannot be split"),
    "T": ({"x": X, "y": Y, "x_test": X[:, 1:], "y_test": Y}, r"one \(T, d\), got \(7, 3\) and \(6"),
    "class": ({"x": X, "y": Y, "x_test": X, "y_test": Y + 1}, "y_test has the class '2', which y"),
    "NaN": (
        {"x": np.where(X[3, 2, 1] == X, np.nan, X), "y": Y},
        "1 of 20 sequences, first in numb",
    ),
    "inf": ({"x": X, "y": Y, "x_test": X * np.inf, "y_test": Y}, "x_test holds NaN, inf"),
    "large": ({"x": X.astype(float) * 1e300, "y": Y}, "numbers beyond float32 in 20 of 20"),
    "few": ({"x": X[:2], "y": Y[:2]}, "no class has 3 sequences"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_npz_file_gets_one_line(tmp_path, name):
    arrays, message = BAD[name]
    path = save(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    one_line(error)
    assert str(path) in str(error.value) or name == "one subject"


def test_no_file_and_no_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load(tmp_path / "none.npz")
    (tmp_path / "a.npz").write_text("x, y")
    with pytest.raises(ValueError, match="is truncated or corrupt") as error:
        load(tmp_path / "a.npz")
    one_line(error)
    np.save(tmp_path / "b.npy", X)
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        load(tmp_path / "b.npy")
    whole = save(tmp_path, x=X, y=Y)
    whole.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        load(whole)


def csv_folder(path, sequences, header=""):
    for i, (label, sequence) in enumerate(sequences):
        (path / label).mkdir(parents=True, exist_ok=True)
        rows = [",".join(f"{v:.9g}" for v in row) for row in sequence]
        (path / label / f"{i:03}.csv").write_text(header + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("header", ["", "acc x,acc y,acc z\n"])
def test_a_folder_of_csv_files(tmp_path, header):
    labels = ["walk" if y else "run" for y in Y]
    path = csv_folder(tmp_path / "mine", zip(labels, X, strict=True), header)
    (path / "notes.txt").write_text("not read")
    data = load(path)
    assert (data.name, data.classes) == ("mine", ("run", "walk"))
    assert (len(data.x_train), len(data.x_test)) == (16, 4)
    for part in ("train", "test"):
        x, y = getattr(data, f"x_{part}"), getattr(data, f"y_{part}")
        for row, label in zip(x, y, strict=True):
            (at,) = (np.abs(X - row.numpy()) < 1e-6).all((1, 2)).nonzero()[0]
            assert Y[at] == label


def test_a_folder_with_train_and_test(tmp_path):
    csv_folder(tmp_path / "train", [("a", X[0]), ("b", X[1]), ("b", X[2])])
    csv_folder(tmp_path / "test", [("b", X[3])])
    data = load(tmp_path)
    assert data.y_train.tolist() == [0, 1, 1]
    assert data.y_test.tolist() == [1]
    np.testing.assert_allclose(data.x_test[0], X[3], rtol=1e-6)


BAD_CSV = {
    "ragged": ("1,2,3\n4,5\n", r"000.csv is no table of numbers: .*columns changed from 3 to 2"),
    "word": ("1,2,3\n4,five,6\n", "000.csv is no table of numbers: could not convert"),
    "gap": ("1,2,3\n4,,6\n", "000.csv is no table of numbers"),
    "NaN": ("1,2,3\n4,nan,6\n", "000.csv holds NaN or inf in 1 lines, first in line 2"),
    "empty": ("", "000.csv is empty"),
    "header": ("a,b,c\n", "000.csv is empty"),
    "short": ("1,2,3\n", "001.csv has 7 lines of 3 numbers, but .*000.csv has 1 lines of 3"),
    "semicolons": ("1;2;3\n4;5;6\n", "000.csv is no table of numbers"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_a_bad_csv_file_gets_one_line(tmp_path, name):
    text, message = BAD_CSV[name]
    csv_folder(tmp_path, [("a", X[0]), ("a", X[1]), ("b", X[2])])
    (tmp_path / "a" / "000.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    one_line(error)


def test_a_folder_without_csv_files(tmp_path):
    with pytest.raises(ValueError, match="has no CSV files: it needs a folder for each class"):
        load(tmp_path)
