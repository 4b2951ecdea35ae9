"""A user's own data: what is read, and one clear line for what cannot be."""

import numpy as np
import pytest
import torch

from fixpoint.data import check_image, fingerprint, load, load_dataset, normalize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 7, 3)).astype(np.float32)
Y = np.arange(20) % 2


def save(path, **arrays):
    np.savez(path / "mine.npz", **arrays)
    return path / "mine.npz"


def has_one_line(error):
    assert "\n" not in str(error.value)


def test_a_given_test_part_is_used_unchanged(tmp_path):
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
def test_small_types_are_stored_as_they_are(tmp_path, dtype, stored):
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
    "times": ({"x": X.astype("m8[s]"), "y": Y}, "x must be numbers .* got timedelta64"),
    "ragged": (
        {"x": np.array([X[0], X[1, :3]], object), "y": Y[:2]},
        r"x is an array of Python objects \(2,\), as sequences of different .* give lengths \(N,\)",
    ),
    "ragged test": (
        {"x": X, "y": Y, "x_test": np.array([X[0], X[1, :3]], object), "y_test": Y[:2]},
        r"x_test is an array of Python objects .* give lengths_test",
    ),
    "numbers as objects": ({"x": X.astype(object), "y": Y}, r"save it as numbers, x.astype\(float"),
    "strings of pandas": (
        {"x": X, "y": np.where(Y == 0, "up", "down").astype(object)},
        r"y is an array of Python objects \(20,\), as strings of pandas are: .*y.astype\(str\)",
    ),
    "lengths as objects": (
        {"x": X, "y": Y, "lengths": (Y + 1).astype(object)},
        r"lengths is an array of Python objects .* save it as lengths.astype\(int\)",
    ),
    "unknown": ({"x": X, "y": Y, "groups": Y}, "unknown array 'groups': expected one of x, y, sub"),
    "misspelt": ({"x": X, "y": Y, "lenghts": Y}, "did you mean 'lengths'"),
    "no names": ({"arr_0": X, "arr_1": Y}, r"unknown array 'arr_0': .*numpy.savez\(path, x="),
    "twice": ({"x": X, "x_train": X, "y": Y}, "both x_train and x, the same array"),
    "no y_valid": ({"x": X, "y": Y, "x_valid": X}, "has no y_valid"),
    "lengths alone": ({"x": X, "y": Y, "lengths_test": Y}, "has no x_test"),
    "lengths 0": ({"x": X, "y": Y, "lengths": Y}, "lengths must be .* from 1 to 7, got 0 to 1"),
    "lengths 8": ({"x": X, "y": Y, "lengths": Y + 7}, "lengths must be .* from 1 to 7, got 7 to 8"),
    "float lengths": ({"x": X, "y": Y, "lengths": Y + 1.5}, "lengths must be .* got float64"),
    "lengths of one part": (
        {"x": X, "y": Y, "x_test": X, "y_test": Y, "lengths": Y + 1},
        "has no lengths_test: give lengths of each part, or of none",
    ),
    "padded with NaN": (
        {"x": np.where(np.arange(7)[:, None] > 4, np.nan, X), "y": Y},
        r"20 of 20 sequences.*where they pad shorter sequences, give lengths \(N,\)",
    ),
    "large mean": (
        {"x": X.astype(float) + 1e13, "y": Y},
        r"varies by less than .*: subtract .*x.mean\(0\)",
    ),
    "tiny": ({"x": X.astype(float) * 1e-35, "y": Y}, "varies by less than 1e-30, which float32"),
    "labels": ({"x": X, "y": Y[:-1]}, r"y must be \(20,\) whole numbers or strings"),
    "float labels": (
        {"x": X, "y": Y.astype(float)},
        r"they are whole, save y.astype\(int\)",
    ),
    "one hot": (
        {"x": X, "y": np.eye(2, dtype=int)[Y]},
        r"y must be \(20,\) .*: it is one-hot, save y.argmax\(1\)",
    ),
    "row": ({"x": X, "y": Y[None]}, r"y must be \(20,\) .*: save y.reshape\(-1\)"),
    "column": ({"x": X, "y": Y[:, None]}, r"y must be \(20,\) .*: save y\[:, 0\]"),
    "soft": (
        {"x": X, "y": np.random.default_rng(0).uniform(size=(20, 2))},
        r"y must be \(20,\) .*\(20, 2\): save one value for each sequence",
    ),
    "halves": ({"x": X, "y": Y / 2}, "y must be .* whole numbers"),
    "one class": ({"x": X, "y": 0 * Y}, "at least two classes, got only '0'"),
    "subject": ({"x": X, "y": Y, "subject": Y[:3]}, r"subject must be \(20,\)"),
    "one subject": (
        {"x": X, "y": Y, "subject": 0 * Y},
        "of one group, which cannot be split.* or give x_test and y_test",
    ),
    "T": ({"x": X, "y": Y, "x_test": X[:, 1:], "y_test": Y}, r"one \(T, d\), got \(7, 3\) and \(6"),
    "d": ({"x": X, "y": Y, "x_test": X[..., 1:], "y_test": Y}, r"got \(7, 3\) and \(7, 2\)$"),
    "class": ({"x": X, "y": Y, "x_test": X, "y_test": Y + 1}, "y_test has the class '2', which y"),
    "NaN": (
        {"x": np.where(X[3, 2, 1] == X, np.nan, X), "y": Y},
        "1 of 20 sequences, first in number 3: correct them, leave them out, or fill them",
    ),
    "inf": ({"x": X, "y": Y, "x_test": X * np.inf, "y_test": Y}, "x_test holds NaN, inf"),
    "large": ({"x": X.astype(float) * 1e300, "y": Y}, "numbers beyond float32 in 20 of 20"),
    "image of other pixels": (
        {"x": X, "y": Y, "image": [8, 8]},
        r"image must be rows and columns, 7 pixels for as many time steps, got array\(\[8, 8\]\)",
    ),
    "image in rows": (
        {"x": X, "y": Y, "image": [7, 3]},
        r"image \(7, 3\) needs x \(N, 21, d\), .* x is \(20, 7, 3\): reshape x to \(N, 21, 1\)",
    ),
    "image in rows with colors": (
        {"x": np.zeros((20, 7, 3, 2)), "y": Y, "image": [7, 3]},
        r"but x is \(20, 7, 3, 2\): reshape x to \(N, 21, 2\)",
    ),
    "image with colors first": (
        {"x": np.zeros((20, 2, 7, 3)), "y": Y, "image": [7, 3]},
        r"image \(7, 3\) needs x \(N, 21, d\), .*, but x is \(20, 2, 7, 3\)$",
    ),
    "image without channels": (
        {"x": X[..., 0], "y": Y, "image": [7, 1]},
        r"but x is \(20, 7\): reshape x to \(N, 7, 1\)",
    ),
    "image of floats": ({"x": X, "y": Y, "image": [7.0, 1.0]}, "image must be rows and columns"),
    "image of objects": (
        {"x": X, "y": Y, "image": np.array([7, 1], object)},
        r"Python objects \(2,\): save it as \[rows, columns\]",
    ),
    "image and lengths": ({"x": X, "y": Y, "lengths": Y + 1, "image": [7, 1]}, "has all pixels"),
    "image on a background": (
        {"x": X.astype(float) + 1e9, "y": Y, "image": [7, 1]},
        "an image needs a background of 0, and .* subtract it before saving",
    ),
    "few": ({"x": X[:2], "y": Y[:2]}, "no class has 3 sequences"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_bad_npz_file_gets_one_line(tmp_path, name):
    arrays, message = BAD[name]
    path = save(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    has_one_line(error)
    assert str(path) in str(error.value)


def test_rows_and_columns_of_an_image(tmp_path):
    data = load(save(tmp_path, x=X[:, :6], y=Y, image=[2, 3]))
    assert data.image == (2, 3)
    assert [type(n) for n in data.image] == [int, int]
    check_image(data)
    assert load(save(tmp_path, x=X[:, :6], y=Y)).image is None


def test_no_file_and_no_archive(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load(tmp_path / "none.npz")
    (tmp_path / "a.npz").write_text("x, y")
    with pytest.raises(ValueError, match="is truncated or corrupt") as error:
        load(tmp_path / "a.npz")
    has_one_line(error)
    np.save(tmp_path / "b.npy", X)
    torch.save({"x": X}, tmp_path / "b.pt")
    (tmp_path / "b.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    for name in ("b.npy", "b.pt", "b.mat"):
        with pytest.raises(ValueError, match=f"{name} is not an .npz file: give what it holds to"):
            load(tmp_path / name)
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


def test_columns_of_a_folder_are_in_the_order_of_the_first_header(tmp_path):
    labels = ["b" if y else "a" for y in Y]
    csv_folder(tmp_path, zip(labels, X, strict=True), "x,y,z\n")
    plain = load(tmp_path)
    assert plain.channels == ("x", "y", "z")
    file = tmp_path / labels[1] / "001.csv"
    np.savetxt(file, X[1][:, [2, 0, 1]], "%.9g", ",", header="z,x,y", comments="")
    file = tmp_path / labels[2] / "002.csv"
    np.savetxt(file, X[2], "%.9g", ",")
    mixed = load(tmp_path)
    assert torch.equal(mixed.x_train, plain.x_train)
    assert torch.equal(mixed.x_test, plain.x_test)
    file.write_text("x,y,w\n1,2,3\n")
    with pytest.raises(ValueError, match=r"002.csv has the columns x, y, w, but .*x, y, z: ren"):
        load(tmp_path)


BAD_CSV = {
    "ragged": (
        "1,2,3\n4,5\n",
        r"000.csv is not a valid numeric table: .*columns changed from 3 in line 1 to 2 in line 2",
    ),
    "word": ("1,2,3\n4,five,6\n", "000.csv is not a valid numeric table: could not convert"),
    "gap": ("1,2,3\n4,,6\n", "000.csv is not a valid numeric table"),
    "NaN": ("1,2,3\n4,nan,6\n", "000.csv holds NaN or inf in 1 lines, first in line 2"),
    "empty": ("", "000.csv is empty"),
    "header": ("a,b,c\n", "000.csv is empty"),
    "channels": ("1,2\n3,4\n", "001.csv has 3 columns, but .*000.csv has 2: all sequences need"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_a_bad_csv_file_gets_one_line(tmp_path, name):
    text, message = BAD_CSV[name]
    csv_folder(tmp_path, [("a", X[0]), ("a", X[1]), ("b", X[2])])
    (tmp_path / "a" / "000.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path)
    has_one_line(error)


def test_a_folder_without_csv_files(tmp_path):
    with pytest.raises(ValueError, match="has no CSV files: it needs a folder for each class"):
        load(tmp_path)
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / ".hidden").touch()
    (tmp_path / "up" / "0.tsv").write_text("1\t2\n")
    with pytest.raises(ValueError, match="no CSV files in folders of classes, but up/0.tsv: it ne"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", [".npz", ".NPZ"])
def test_the_name_is_that_of_the_file_or_folder(tmp_path, suffix, monkeypatch):
    path = save(tmp_path, x=X, y=Y)
    assert load(path.rename(tmp_path / f"my.v1{suffix}")).name == "my.v1"
    csv_folder(tmp_path / "own", zip(["a", "b"] * 10, X, strict=True))
    monkeypatch.chdir(tmp_path / "own" / "a")
    assert load("..").name == "own"


def test_a_validation_part_is_used(tmp_path):
    path = save(
        tmp_path, x=X, y=Y, x_valid=X[:6] + 1, y_valid=Y[:6], subject=Y, subject_valid=Y[:6]
    )
    data = load(path.with_suffix(".npz"))
    assert torch.equal(data.x_valid, torch.from_numpy(X[:6] + 1))
    assert data.y_valid.tolist() == Y[:6].tolist()
    assert data.groups_valid.tolist() == Y[:6].tolist()
    assert (len(data.x_train), len(data.x_test)) == (10, 10)  # one of two subjects is the test part
    named = save(tmp_path, x_train=X, y_train=Y, x_valid=X[:6], y_valid=Y[:6], x_test=X, y_test=Y)
    assert [len(getattr(load(named), f"x_{part}")) for part in ("train", "valid", "test")] == [
        20,
        6,
        20,
    ]


def test_names_of_subjects_are_one_numbering_of_all_parts(tmp_path):
    names = np.array(["b", "a"] * 10)
    data = load(save(tmp_path, x=X, y=Y, x_test=X[:2], y_test=Y[:2], subject=names,
                     subject_test=["c", "a"], x_valid=X[:1], y_valid=Y[:1],
                     subject_valid=["d"]))  # fmt: skip
    assert data.groups_train[:2].tolist() == [1, 0]
    assert (data.groups_test.tolist(), data.groups_valid.tolist()) == ([2, 0], [3])


@pytest.mark.parametrize("padding", [0.0, 7.0, np.nan])
def test_lengths_end_sequences(tmp_path, padding):
    lengths = 1 + np.arange(20) % 7
    x = np.where(np.arange(7)[:, None] < lengths[:, None, None], X, np.float32(padding))
    data = load(save(tmp_path, x=x, y=Y, lengths=lengths, x_test=x[:, :6][lengths < 7],
                     y_test=Y[lengths < 7], lengths_test=lengths[lengths < 7]))  # fmt: skip
    assert data.lengths_train.tolist() == lengths.tolist()
    assert data.lengths_test.tolist() == lengths[lengths < 7].tolist()
    assert data.x_test.shape[1] == 7
    assert torch.equal(data.x_train, torch.from_numpy(np.nan_to_num(x) * (x != 7)))
    assert "of at most 7 steps" in repr(data)
    split = load(save(tmp_path, x=x, y=Y, lengths=lengths))
    for part in ("train", "test"):
        rows = getattr(split, f"x_{part}")
        real = (rows != 0).any(2).sum(1)
        assert real.tolist() == getattr(split, f"lengths_{part}").tolist()


def test_csv_files_of_different_length_are_padded(tmp_path):
    labels = ["a", "b"] * 4
    steps = [2, 5, 3, 3, 7, 1, 2, 4]
    csv_folder(
        tmp_path, [(a, X[i, :n]) for i, (a, n) in enumerate(zip(labels, steps, strict=True))]
    )
    data = load(tmp_path)
    found = {}
    for part in ("train", "test"):
        for x, n in zip(*(getattr(data, f"{k}_{part}") for k in ("x", "lengths")), strict=True):
            (i,) = (i for i in range(8) if np.allclose(x[0], X[i, 0], rtol=1e-6))
            np.testing.assert_allclose(x[:n], X[i, :n], rtol=1e-6)
            assert not x[n:].any()
            found[i] = int(n)
    assert found == dict(enumerate(steps))


@pytest.mark.parametrize("names", [("train", "valid", "test"), ("Train", "val", "Test")])
def test_a_folder_of_three_parts(tmp_path, names):
    for name, rows in zip(names, (X[:3], X[3:5], X[5:6]), strict=True):
        csv_folder(tmp_path / name, [("ab"[i % 2], row) for i, row in enumerate(rows)])
    data = load(tmp_path)
    assert [len(getattr(data, f"x_{part}")) for part in ("train", "valid", "test")] == [3, 2, 1]
    np.testing.assert_allclose(data.x_valid[1], X[4], rtol=1e-6)


def test_train_and_test_may_be_classes(tmp_path):
    data = load(csv_folder(tmp_path, [("train", X[i]) for i in range(3)] +
                           [("test", X[i]) for i in range(3)]))  # fmt: skip
    assert data.classes == ("test", "train")


def test_train_alone_is_all_and_a_fifth_is_held_out(tmp_path):
    csv_folder(tmp_path / "training", zip(["a", "b"] * 10, X, strict=True))
    data = load(tmp_path)
    assert (data.classes, len(data.x_train), len(data.x_test)) == (("a", "b"), 16, 4)


def test_hidden_files_are_not_read_and_others_are_named(tmp_path):
    labels = ["up" if y else "down" for y in Y]
    csv_folder(tmp_path / "mine", zip(labels, X, strict=True))
    plain = load(tmp_path / "mine")
    known = fingerprint(str(tmp_path / "mine"))
    for name in (".ipynb_checkpoints/1.csv", "__MACOSX/1.csv", "up/.1.csv", "up/._001.csv",
                 "up/.hidden/1.csv", "up/~$001.csv"):  # fmt: skip
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_bytes(b"\0\5\x16")
    data = load(tmp_path / "mine")
    assert (repr(data), data.classes) == (repr(plain), ("down", "up"))
    assert fingerprint(str(tmp_path / "mine")) == known
    (tmp_path / "mine" / "up" / "001.csv").rename(tmp_path / "mine" / "up" / "001.CSV")
    assert torch.equal(load(tmp_path / "mine").x_train, plain.x_train)
    assert fingerprint(str(tmp_path / "mine")) != known
    (tmp_path / "mine" / "up" / "001.txt").write_text("1,2,3")
    (tmp_path / "mine" / "empty").mkdir()
    assert repr(load(tmp_path / "mine")).endswith("2 classes; not read: empty, up/001.txt)")


def test_the_header_of_pandas_is_not_a_time_step(tmp_path):
    csv_folder(tmp_path, zip(["a", "b"] * 10, X, strict=True), header="0,1,2\n")
    assert load(tmp_path).x_train.shape == (16, 7, 3)
    (tmp_path / "a" / "000.csv").write_text(
        "1.5,2,3\n" * 8
    )  # one without: a line of numbers in all
    assert load(tmp_path).x_train.shape == (16, 8, 3)


@pytest.mark.parametrize("name", ["data.csv", "data.CSV", "data.txt", "data.tsv"])
def test_one_table_alone_gets_its_own_line(tmp_path, name):
    (tmp_path / name).write_text("1,2\n")
    with pytest.raises(
        ValueError, match="is one table: to cut a recording into windows give window and label"
    ):
        load(tmp_path / name)


@pytest.mark.parametrize("per", ["column", "channel"])
@pytest.mark.parametrize(
    ("scale", "offset"),
    [(1.0, 0.0), (1e-13, 0.0), (1e-25, 0.0), (1e20, 0.0), (1.0, 1e9), (1e-3, 1e6), (1e-6, -4e5)],
)
def test_units_and_offsets_do_not_change_what_is_learned(tmp_path, per, scale, offset):
    x = RNG.normal(size=(40, 6, 3))
    path = save(tmp_path, x=offset + scale * x, y=np.arange(40) % 2, x_test=offset + scale * x[:5],
                y_test=np.arange(5) % 2)  # fmt: skip
    data = normalize(load(path), per)
    axes = (0,) if per == "column" else (0, 1)
    mean, sd = x.mean(axes), x.std(axes)
    # float64 rounds at 1e-16 of the offset
    atol = 1e-6 + 4e-16 * abs(offset) / scale
    np.testing.assert_allclose(data.x_train, (x - mean) / sd, rtol=1e-6, atol=atol)
    np.testing.assert_allclose(data.x_test, (x[:5] - mean) / sd, rtol=1e-6, atol=atol)
    assert data.notes == ()


def test_a_mean_that_hides_the_differences_is_said_until_it_is_subtracted(tmp_path):
    x = 1e9 + RNG.normal(size=(40, 6, 3))
    x[:, 2, 1] = 1e9  # constant
    data = load(save(tmp_path, x=x, y=np.arange(40) % 2, x_test=x, y_test=np.arange(40) % 2))
    assert "below the resolution of float32" in repr(data)
    np.testing.assert_allclose(data.inputs(data.x_train), x, rtol=1e-7)
    assert repr(normalize(data)).endswith("; 1 of 18 columns (time step, channel) are constant)")
