"""load_dataset."""

import pytest

from fixpoint.data import DATASETS, SOURCES, fingerprint, load_dataset


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "dsa19"])
def test_each_data_set_carries_its_registered_name(name):
    try:
        data = load_dataset(name)
    except FileNotFoundError as error:
        pytest.skip(f"needs the full data: {error}")
    assert data.name == name
    assert data.license
    assert data.citation


def test_each_data_set_has_a_source_or_needs_none():
    assert set(DATASETS) - set(SOURCES) == {"har2-sample", "toy-walks"}
    assert set(SOURCES) < set(DATASETS)
    for source in SOURCES.values():
        assert SOURCES[source.name] is source


def test_names_go_before_paths_and_lost_paths_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy-walks").mkdir()
    assert load_dataset("toy-walks").name == "toy-walks"
    for path in ("./mine", "mine.npz", "mine.csv", "folder/mine"):
        with pytest.raises(FileNotFoundError, match=f"no file or folder {path}: .*har2-sample"):
            load_dataset(path)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"expected one of .*; did you mean 'har2-sample'\?"
    ) as error:
        load_dataset("har2_sample")
    assert all(name in str(error.value) for name in DATASETS)
    with pytest.raises(ValueError, match="unknown data set 'zzz'") as error:
        load_dataset("zzz")
    assert "did you mean" not in str(error.value)


def test_own_data_are_known_by_their_content(tmp_path):
    def digest(path):
        return fingerprint(str(path))

    assert {digest(name) for name in DATASETS} == {""}
    (tmp_path / "a.npz").write_bytes(b"one")
    first = digest(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"two")
    second = digest(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"one")
    assert first != second
    assert first == digest(tmp_path / "a.npz")
    (tmp_path / "up").mkdir()
    seen = [digest(tmp_path)]
    for name, text in (("up/1.csv", "1,2"), ("up/2.csv", "1,2"), ("up/2.csv", "1,3")):
        (tmp_path / name).write_text(text)
        seen.append(digest(tmp_path))
    assert len(set(seen)) == 4
