"""Long recordings cut into windows: persons, classes, gaps, missing values, splits."""

import numpy as np
import pytest
import torch

from fixpoint.data import load
from fixpoint.data.registry import fingerprint


def recording(labels, *, subject=None, dt=0.02, seed=0, start=0.0):
    """Columns of a recording with a class for each sample."""
    draw = np.random.default_rng(seed)
    columns = {"timestamp": start + dt * np.arange(len(labels))}
    columns |= {name: draw.normal(size=len(labels)) for name in ("ax", "ay")}
    columns["activity"] = np.array(labels)
    if subject is not None:
        columns["person"] = np.array(subject)
    return columns


def write_csv(path, columns, separator=","):
    rows = zip(*columns.values(), strict=True)
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


TWO = ["walk"] * 50 + ["sit"] * 50


def two_people():
    parts = [recording(TWO, subject=[p] * 100, seed=i) for i, p in enumerate(("ann", "bob"))]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


OPTIONS = {"window": 10, "step": 5, "label": "activity", "subject": "person"}


def test_windows_hold_one_person_and_one_class(tmp_path):
    data = load(write_csv(tmp_path / "two.csv", two_people()), **OPTIONS)
    # 50 samples of each class and person: windows at 0, 5, .., 40
    assert data.channels == ("ax", "ay")
    assert data.classes == ("sit", "walk")
    assert len(data.x_train) == len(data.x_test) == 18
    assert set(data.groups_train.tolist()).isdisjoint(data.groups_test.tolist())
    assert data.y_train.bincount().tolist() == [9, 9]
    whole = np.stack([two_people()[name] for name in ("ax", "ay")], 1)
    windows = torch.cat([data.x_train, data.x_test])
    expected = [whole[s : s + 10] for at in (0, 50, 100, 150) for s in range(at, at + 41, 5)]
    order = sorted(windows.tolist())
    np.testing.assert_allclose(order, sorted(np.stack(expected).tolist()), rtol=1e-6)


def test_a_frame_and_a_file_give_the_same(tmp_path):
    columns = two_people()
    data = load(columns, **OPTIONS)
    read = load(write_csv(tmp_path / "two.csv", columns, ";"), **OPTIONS)
    assert torch.equal(data.x_train, read.x_train)
    assert torch.equal(data.y_test, read.y_test)


def test_persons_in_turn_are_those_one_after_the_other():
    columns = two_people()
    turn = np.argsort(columns["timestamp"], kind="stable")
    data = load({key: values[turn] for key, values in columns.items()}, **OPTIONS)
    assert torch.equal(data.x_train, load(columns, **OPTIONS).x_train)


def test_a_data_frame_of_pandas():
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    columns = two_people()
    assert torch.equal(
        load(pandas.DataFrame(columns), **OPTIONS).x_train, load(columns, **OPTIONS).x_train
    )


@pytest.mark.parametrize("kind", ["gap", "backwards", "dates"])
def test_no_window_lies_across_a_gap_in_time(kind):
    columns = two_people()
    if kind == "dates":
        columns["timestamp"] = np.datetime64("2026-01-31") + (
            columns["timestamp"] * 1e9
        ).round().astype("timedelta64[ns]")
        columns["timestamp"][23:] += np.timedelta64(1, "s")
    else:
        columns["timestamp"][23:] += 1.0 if kind == "gap" else -0.3
    data = load(columns, **OPTIONS)
    # 23 and 27 samples in the place of 50: 3 + 4 windows for 9
    assert len(data.x_train) + len(data.x_test) == 34
    assert any("1 gaps in time" in note for note in data.notes)


def test_without_persons_the_last_fifth_in_time_tests():
    data = load(recording(TWO * 2), window=10, step=5, label="activity")
    assert any("the last fifth in time" in note for note in data.notes)
    # 18 windows of each class: 4 test, the one that overlaps them belongs to none.
    assert data.y_test.bincount().tolist() == [4, 4]
    assert data.y_train.bincount().tolist() == [13, 13]
    seen = {tuple(v) for window in data.x_train.tolist() for v in window}
    assert not any(tuple(v) in seen for window in data.x_test.tolist() for v in window)


@pytest.mark.parametrize("how", ["hold", "linear"])
def test_missing_values_are_filled_where_asked(how, tmp_path):
    columns = two_people()
    columns["ax"][[3, 4, 70]] = np.nan
    with pytest.raises(ValueError, match="sample 4 has no ax, and 3 values are missing in all"):
        load(columns, **OPTIONS)
    data = load(columns, **OPTIONS, fill=how)
    assert any(f"3 missing values filled ({how})" in note for note in data.notes)
    first = torch.cat([data.x_train, data.x_test])
    a, b = columns["ax"][2], columns["ax"][5]
    expected = [a, a] if how == "hold" else [a + (b - a) / 3, a + 2 * (b - a) / 3]
    rows = [w for w in first.tolist() if w[2][0] == np.float32(a)]
    np.testing.assert_allclose([rows[0][3][0], rows[0][4][0]], expected, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.inf, -np.inf])
@pytest.mark.parametrize("text", [False, True])
def test_infinite_values_are_named_and_filled_where_asked(bad, text, tmp_path):
    columns = two_people()
    columns["ax"][[49, 50]] = columns["ay"][60] = bad
    source = write_csv(tmp_path / "two.csv", columns) if text else columns
    message = f"sample 50 has ax = {bad}, which is not finite, and 3 values are missing or not fin"
    with pytest.raises(ValueError, match=f"{message}.*: correct them, or fill them by --fill hold"):
        load(source, **OPTIONS)
    data = load(source, **OPTIONS, fill="hold")
    assert data.x_train.isfinite().all()
    assert "3 missing or infinite values filled (hold)" in data.notes


def test_a_missing_value_is_named_by_its_place_in_the_file():
    columns = {key: np.ravel(np.split(values, 2), "F") for key, values in two_people().items()}
    columns["ax"][101] = np.nan  # persons in turn: sample 151 of those in order
    with pytest.raises(ValueError, match="sample 102 has no ax, and 1 values are missing in all"):
        load(columns, **OPTIONS)


def test_a_mistyped_channel_gets_a_suggestion():
    message = "recording has no channel 'axx': its columns are .*; did you mean 'ax'?"
    with pytest.raises(ValueError, match=message):
        load(two_people(), **OPTIONS, channels=("axx",))


def test_an_infinite_time_is_refused():
    columns = two_people()
    columns["timestamp"][3] = np.inf
    with pytest.raises(ValueError, match="'timestamp' has no time in 1 lines"):
        load(columns, **OPTIONS)


@pytest.mark.parametrize("index", ["", "Unnamed: 0"])
def test_an_index_of_pandas_is_in_the_notes(index, tmp_path):
    columns = {index: np.arange(200)} | two_people()
    named = index or "the first column, which has no name"
    for source in (columns, write_csv(tmp_path / "two.csv", columns)):
        data = load(source, **OPTIONS)
        assert data.channels == ("ax", "ay")
        assert f"not read: {named}" in data.notes


def test_a_column_without_a_name_is_refused(tmp_path):
    columns = two_people()
    columns = {"" if key == "ay" else key: values for key, values in columns.items()}
    for source in (columns, write_csv(tmp_path / "two.csv", columns)):
        with pytest.raises(ValueError, match="column 3 has no name in the header: name it, or rem"):
            load(source, **OPTIONS)


@pytest.mark.parametrize("how", ["hold", "linear"])
def test_windows_with_missing_values_are_filled_too(how, tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 6, 2))
    x[3, 2, 1] = np.nan
    np.savez(tmp_path / "a.npz", X_train=x, y_train=np.arange(20) % 2)
    with pytest.raises(ValueError, match="x holds NaN"):
        load(tmp_path / "a.npz")
    data = load(tmp_path / "a.npz", fill=how)
    assert data.x_train.isfinite().all()
    assert f"1 missing values filled ({how})" in data.notes


def test_a_folder_of_people(tmp_path):
    for i, person in enumerate(("ann", "bob", "cid")):
        write_csv(tmp_path / f"{person}.csv", recording(TWO, seed=i))
    data = load(tmp_path, window=10, label="activity")
    assert len(data.groups_train.unique()) == 2
    assert len(data.groups_test.unique()) == 1
    assert fingerprint(str(tmp_path))


def test_a_folder_of_classes_with_long_files(tmp_path):
    for i, name in enumerate(("sit", "walk")):
        (tmp_path / name).mkdir()
        columns = recording(["-"] * 100, seed=i)
        del columns["activity"]
        write_csv(tmp_path / name / "a.csv", columns)
    data = load(tmp_path, window=10)
    assert data.classes == ("sit", "walk")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"label": "person"}, "--label, --subject and --time must name different columns"),
        ({}, {"label": "activty"}, "unknown column for --label 'activty'.*did you mean 'activity'"),
        (
            {},
            {"window": 60},
            "no stretch of one class and person without a gap has 60 samples, the longest has 50: "
            "take a shorter --window",
        ),
        ({}, {"label": None}, "has no classes: name the column of the class by --label"),
        ({"timestamp": ["noon"] * 200}, {}, "'timestamp' holds neither numbers nor dates"),
        ({}, {"channels": ("activity",)}, "the channel 'activity' holds text"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(change, options, message):
    with pytest.raises(ValueError, match=message):
        load(two_people() | change, **{**OPTIONS, **options})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activity": np.array([""] * 200)}, "the column of --label is empty"),
        (
            {"activity": np.array((["walk"] * 6 + [""]) * 28 + ["sit"] * 4)},
            "has 10 samples, the longest has 6; samples without a label: 28: take a shorter",
        ),
        ({"activity": np.array(["walk"] * 200)}, "at least two classes .* all windows are 'walk'"),
        ({"person": np.array(["ann"] * 200)}, "of the person 'ann': leave --subject out, so that"),
    ],
)
def test_classes_and_persons_that_do_not_do(changed, message):
    with pytest.raises(ValueError, match=message):
        load(two_people() | changed, **OPTIONS)


def test_a_folder_of_one_person_tests_by_time(tmp_path):
    write_csv(tmp_path / "ann.csv", recording(TWO * 2))
    data = load(tmp_path, window=10, step=5, label="activity")
    assert any("the last fifth in time" in note for note in data.notes)


def test_what_is_not_a_table_is_refused():
    with pytest.raises(TypeError, match="a data frame or a mapping of columns by name; got list"):
        load([1, 2], **OPTIONS)
    with pytest.raises(ValueError, match="recording has no samples"):
        load({key: values[:0] for key, values in two_people().items()}, **OPTIONS)


def test_columns_without_a_window_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 6, 2)), y=np.arange(20) % 2)
    with pytest.raises(ValueError, match="label cut recordings, and the length of a window is"):
        load(tmp_path / "a.npz", label="activity")
    with pytest.raises(ValueError, match="window cut recordings, and it has windows already"):
        load(tmp_path / "a.npz", window=3)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.linspace(0, 1, 20), "they are real numbers, as 0.05263, and regression is not offered"),
        (
            np.where(np.arange(20) == 7, np.nan, np.arange(20) % 2),
            "1 are NaN or inf, first number 7",
        ),
        (np.array(["a", "nan"] * 10), "y is 'nan' in 10 of 20 sequences, a missing value it seems"),
        (np.array(["a", "None"] * 10), "y is 'None' in 10 of 20 sequences, a missing value"),
        (np.arange(20) % 2 * 1e20, "they are beyond 2.53, where floats are not exact"),
        (np.arange(20) % 2 * 1.0, r"they are whole, save y.astype\(int\)"),
    ],
)
def test_advice_destroys_no_label(y, message, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 6, 2)), y=y)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.npz")


def test_a_pair_of_the_ucr_archive(tmp_path):
    for part, count in (("TRAIN", 6), ("TEST", 4)):
        lines = [f"{1 + i % 2}\t" + "\t".join(str(i + t) for t in range(5)) for i in range(count)]
        (tmp_path / f"Gun_{part}.tsv").write_text("\n".join(lines))
    for part in ("TRAIN", "TEST"):
        data = load(tmp_path / f"Gun_{part}.tsv")
        assert (len(data.x_train), len(data.x_test)) == (6, 4)
        assert data.classes == ("1", "2")
        assert data.x_train[2, :, 0].tolist() == [2, 3, 4, 5, 6]
    (tmp_path / "README.md").write_text("the folder of a data set")
    assert torch.equal(load(tmp_path).x_test, data.x_test)
    assert fingerprint(str(tmp_path)) == fingerprint(str(tmp_path / "Gun_TRAIN.tsv"))
    assert fingerprint(str(tmp_path / "Gun_TRAIN.tsv"))


def test_shorter_series_of_the_ucr_archive_have_lengths(tmp_path):
    lines = ["1\t1\t2\t3", "2\t1\tNaN\tNaN"] * 5
    for part in ("TRAIN", "TEST"):
        (tmp_path / f"A_{part}.tsv").write_text("\n".join(lines))
    assert load(tmp_path / "A_TRAIN.tsv").lengths_train.tolist() == [3, 1] * 5


TS = """#A comment
@problemName Basic
@timeStamps false
@univariate false
@classLabel true left right
@data
1,2,3:4,5,6:left
7,8,9:1,?,3:right
"""


def test_a_file_of_the_uea_archive(tmp_path):
    for part in ("TRAIN", "TEST"):
        (tmp_path / f"B_{part}.ts").write_text(TS)
    data = load(tmp_path / "B_TRAIN.ts", fill="linear")
    assert data.classes == ("left", "right")
    assert data.x_train[1].tolist() == [[7, 1], [8, 2], [9, 3]]
    (tmp_path / "C.ts").write_text(TS.replace("@timeStamps false", "@timeStamps true"))
    with pytest.raises(ValueError, match="has time stamps, which are not read"):
        load(tmp_path / "C.ts")


def test_times_of_whole_seconds_are_not_gaps():
    columns = two_people()
    columns["timestamp"] = np.floor(columns["timestamp"])
    data = load(columns, **OPTIONS)
    assert len(data.x_train) + len(data.x_test) == 36
    assert not any("gaps" in note for note in data.notes)
    assert any("samples have the time of the one before" in note for note in data.notes)


@pytest.mark.parametrize("zone", ["", "Z", "+02:00"])
def test_dates_with_a_time_zone(zone):
    columns = two_people()
    seconds = columns["timestamp"]
    columns["timestamp"] = np.array([f"2026-01-31T12:00:{s:05.2f}{zone}" for s in seconds])
    assert len(load(columns, **OPTIONS).notes) == len(load(two_people(), **OPTIONS).notes)


def test_a_missing_time_is_refused():
    columns = two_people()
    columns["timestamp"] = columns["timestamp"].astype("timedelta64[s]") + np.datetime64("2026")
    columns["timestamp"][5] = np.datetime64("NaT")
    with pytest.raises(ValueError, match="'timestamp' has no time in 1 lines"):
        load(columns, **OPTIONS)


@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_real_numbers_are_not_classes(kind, tmp_path):
    columns = two_people() | {"activity": np.linspace(0, 1, 200)}
    table = columns if kind == "numbers" else write_csv(tmp_path / "a.csv", columns)
    with pytest.raises(ValueError, match="'activity' holds real numbers, as 0.005025, and regress"):
        load(table, **OPTIONS)


def test_classes_that_are_numbers_have_one_name(tmp_path):
    columns = two_people() | {"activity": np.repeat([1.0, 2.0, 1.0, 2.0], 50)}
    columns["activity"][3] = np.nan  # as pandas writes whole numbers beside a missing one
    for table in (columns, write_csv(tmp_path / "a.csv", columns)):
        assert load(table, **OPTIONS).classes == ("1", "2")


def test_one_text_among_numbers_is_named(tmp_path):
    columns = two_people()
    columns["ax"] = columns["ax"].astype(object)
    columns["ax"][6] = "n.v."
    with pytest.raises(ValueError, match=r"'ax' holds text, not numbers: 'n\.v\.' in sample 7"):
        load(write_csv(tmp_path / "a.csv", columns), **OPTIONS)
    columns["note"] = np.array(["calm", "7"] * 100)
    data = load(columns | {"ax": two_people()["ax"]}, **OPTIONS)
    assert data.channels == ("ax", "ay")
    assert "not read: note" in data.notes


class Frame(dict):
    """Columns with an index, as a data frame of pandas."""

    def __init__(self, columns, index):
        super().__init__(columns)
        self.index = index


def test_the_index_of_a_frame_may_be_its_time():
    columns = two_people()
    seconds = columns.pop("timestamp")
    seconds[23:] += 1.0
    dates = np.datetime64("2026-01-31") + (seconds * 1e9).astype("timedelta64[ns]")

    class Index(np.ndarray):
        name = None

    for values, name, gaps in ((dates, None, 1), (seconds, "time", 1), (np.arange(200), None, 0)):
        index = values.view(Index)
        index.name = name
        data = load(Frame(columns, index), **OPTIONS)
        assert sum("1 gaps in time" in note for note in data.notes) == gaps
        assert data.channels == ("ax", "ay")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("D.ts", TS.replace("@classLabel true left right", "@targetLabel true"), "has no classes"),
        ("D.ts", TS.replace(":left", ":0.25"), "real numbers in the place of classes, as 0.25"),
        ("D_TRAIN.tsv", "0.5\t1\t2\n1.5\t1\t2\n", "real numbers in the place of classes, as 0.5"),
        ("D_TRAIN.arff", "@data", "take NAME_TRAIN.ts or .tsv of the same archive"),
    ],
)
def test_files_of_archives_that_are_not_read(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / name, fill="linear")
