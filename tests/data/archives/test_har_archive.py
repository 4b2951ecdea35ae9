"""The official archive of HAR, made small."""

import io

import numpy as np
import pytest
from support.factories import table, truncated, write_zip

from fixpoint.data.archives import har_archive as har
from fixpoint.data.sources.har import SOURCE

ROWS = {"train": 5, "test": 3}
TOP = "UCI HAR Dataset"


@pytest.fixture
def members():
    """Text files in the official layout, with windows of whole numbers."""
    rng = np.random.default_rng(0)
    made = {f"{TOP}/README.txt": b"read me", "__MACOSX/._y_train.txt": b"\0\0"}
    for part, rows in ROWS.items():
        folder = f"{TOP}/{part}"
        made[f"{folder}/y_{part}.txt"] = table(np.arange(rows) % 6 + 1, form="%d")
        made[f"{folder}/subject_{part}.txt"] = table(np.arange(rows) + 7, form="%d")
        made[f"{folder}/X_{part}.txt"] = b"features that are not read"
        for channel in har.CHANNELS:
            made[f"{folder}/Inertial Signals/{channel}_{part}.txt"] = table(
                rng.normal(size=(rows, 128)), form=" % .7e"
            )
    return made


def nested(path, members):
    inner = io.BytesIO()
    write_zip(inner, members)
    return write_zip(path, {f"{TOP}.zip": inner.getvalue(), f"{TOP}.names": b"names"})


@pytest.mark.parametrize("write", [write_zip, nested])
def test_windows_labels_and_subjects_are_read(write, members, tmp_path):
    arrays = har.parse([write(tmp_path / "a.zip", members)])
    for part, rows in ROWS.items():
        x = arrays[f"x_{part}"]
        assert (x.shape, x.dtype) == ((rows, 128, 9), np.float32)
        for i, channel in enumerate(har.CHANNELS):
            text = members[f"{TOP}/{part}/Inertial Signals/{channel}_{part}.txt"]
            expected = [[float(n) for n in line.split()] for line in text.splitlines()]
            np.testing.assert_array_equal(x[:, :, i], np.float32(expected))
        assert arrays[f"y_{part}"].tolist() == [i % 6 for i in range(rows)]
        assert arrays[f"y2_{part}"].tolist() == [har.HAR2_CLASS[i % 6] for i in range(rows)]
        assert arrays[f"subject_{part}"].tolist() == [i + 7 for i in range(rows)]


def test_the_counts_are_those_of_the_whole_data(members, tmp_path, full_har):
    arrays = har.parse([write_zip(tmp_path / "a.zip", members)])
    with pytest.raises(ValueError, match=r"x_train must be float32 \(7352, 128, 9\), got"):
        har.verify(arrays)
    har.verify(full_har)
    with pytest.raises(ValueError, match="the classes of y_test must have"):
        har.verify({**full_har, "y_test": full_har["y_test"][::-1] // 2})
    for key in ("x_test", "y_train", "subject_train"):  # the right counts, but other rows
        with pytest.raises(ValueError, match=f"has other numbers in {key} than published"):
            har.verify({**full_har, key: full_har[key][::-1]})


CHANNEL = f"{TOP}/test/Inertial Signals/body_gyro_y_test.txt"
SUBJECTS = f"{TOP}/test/subject_test.txt"
LABELS = f"{TOP}/train/y_train.txt"


def without_last(text):
    return text[: text.rstrip().rindex(b"\n") + 1]


DAMAGE = {
    "channel": (CHANNEL, lambda t: None, "lacks body_gyro_y_test.txt"),
    "rows": (CHANNEL, without_last, r"body_gyro_y_test.txt must have 3 lines, .* got 2"),
    "columns": (CHANNEL, lambda t: table(np.zeros((3, 127))), "must have 128 numbers a line"),
    "ragged": (CHANNEL, lambda t: t.rstrip() + b" 1\n", "is not a valid numeric table"),
    "word": (CHANNEL, lambda t: b"none " + t, "is not a valid numeric table"),
    "empty": (CHANNEL, lambda t: b"", "is empty"),
    "NaN": (CHANNEL, lambda t: t.replace(t.split()[200], b"NaN", 1), "NaN or inf in 1 lines, "),
    "label": (LABELS, lambda t: t.replace(b"3", b"7"), "must hold activities 1 to 6"),
    "subject": (SUBJECTS, lambda t: t.replace(b"7", b"31"), "must hold subjects 1 to 30"),
    "half": (LABELS, lambda t: t.replace(b"3", b"2.5"), "must hold activities 1 to 6"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_file_of_har_is_named(members, tmp_path, name):
    path, damage, message = DAMAGE[name]
    members[path] = damage(members[path])
    members = {key: data for key, data in members.items() if data is not None}
    with pytest.raises(ValueError, match=message) as error:
        SOURCE.make([write_zip(tmp_path / "a.zip", members)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("write", [write_zip, nested])
def test_a_truncated_archive(write, members, tmp_path):
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        SOURCE.make([truncated(write(tmp_path / "a.zip", members))])


def test_an_archive_inside_that_is_damaged(members, tmp_path):
    path = write_zip(tmp_path / "a.zip", {f"{TOP}.zip": b"PK\x03\x04 no archive"})
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        SOURCE.make([path])
