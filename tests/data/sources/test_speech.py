"""Speech commands: the archive, made small, and the subset where it is at hand."""

import math
import tarfile

import numpy as np
import pytest
import torch
from support.factories import sound, truncated, write_tar, write_zip

from fixpoint.data import load_dataset, validation_split
from fixpoint.data.archives import speech_archive
from fixpoint.data.archives.log_mel import log_mel
from fixpoint.data.sources import speech

RATE = 16_000
WORDS = speech_archive.WORDS


def clip(word, speaker):
    """Ten tones of a length that depends on the speaker."""
    n = RATE - 40 * (speaker % 3)
    return np.rint(3000 * np.sin(np.arange(n) * (0.02 + 0.01 * WORDS.index(word) + 1e-3 * speaker)))


@pytest.fixture(scope="module")
def members():
    """Of each word four clips for train, one for valid, one for test."""
    made, lists = {}, {"validation": [], "testing": []}
    for word in WORDS:
        for speaker in range(6):
            path = f"{word}/{speaker:08x}_nohash_0.wav"
            made[f"./{path}"] = sound(clip(word, speaker))
            if speaker > 3:
                lists["validation" if speaker == 4 else "testing"].append(path)
    for name, paths in lists.items():
        made[f"./{name}_list.txt"] = "\n".join(paths).encode()
    rng = np.random.default_rng(0)
    for i in range(2):
        samples = rng.integers(-900, 900, 11 * RATE + i)
        made[f"./_background_noise_/noise_{i}.wav"] = sound(samples)
    made["./_background_noise_/README.md"] = b"read me"
    made["./LICENSE"] = b"CC BY 4.0"
    return made


@pytest.fixture(scope="module")
def archive(members, tmp_path_factory):
    return write_tar(tmp_path_factory.mktemp("speech") / "a.tar.gz", members)


def test_the_words_of_speech():
    assert len(WORDS) == 30
    assert set(speech_archive.COMMANDS) < set(WORDS)


def test_google30_takes_every_clip_by_the_lists(archive):
    arrays = speech_archive.parse("google30", [archive])
    for part, speakers in (("train", 4), ("valid", 1), ("test", 1)):
        assert arrays[f"x_{part}"].shape == (30 * speakers, 99, 32)
        assert arrays[f"x_{part}"].dtype == np.int16
        assert np.bincount(arrays[f"y_{part}"]).tolist() == [speakers] * 30
    assert arrays["classes"].tolist() == list(WORDS)
    row = arrays["file_test"].tolist().index("happy/00000005_nohash_0.wav")
    assert arrays["speaker_test"][row] == "00000005"
    energies = arrays["x_test"][row] * arrays["scale"].astype(float)
    expected = log_mel(clip("happy", 5).astype(np.int16))
    assert np.abs(energies - expected).max() <= 0.0010001  # half a step


@pytest.mark.parametrize(
    "change",
    [
        lambda path: f"./{path}",
        lambda path: path.replace("/", "\\"),
        lambda path: f"speech/{path}  ",
        str.upper,
    ],
)
def test_lists_name_clips_in_other_forms(change, members, archive, tmp_path):
    changed = {
        name: "\r\n".join(map(change, data.decode().split())).encode() + b"\r\n"
        if name.endswith("_list.txt")
        else data
        for name, data in members.items()
    }
    expected = speech_archive.parse("google30", [archive])
    found = speech_archive.parse("google30", [write_tar(tmp_path / "b.tar.gz", changed)])
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)


def test_google12_adds_a_tenth_of_unknown_and_of_silence(archive):
    arrays = speech_archive.parse("google12", [archive])
    again = speech_archive.parse("google12", [archive])
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, again[key])
    for part, speakers in (("train", 4), ("valid", 1), ("test", 1)):
        y = arrays[f"y_{part}"]
        tenth = math.ceil(10 * speakers / 10)
        assert np.bincount(y).tolist() == [tenth, tenth] + [speakers] * 10
        for label, path, speaker in zip(
            y, arrays[f"file_{part}"], arrays[f"speaker_{part}"], strict=True
        ):
            word = path.split("/")[0]
            name = arrays["classes"][label]
            assert name == {"_background_noise_": "_silence_"}.get(
                word, word if word in speech_archive.COMMANDS else "_unknown_"
            )
            assert bool(speaker) == (name != "_silence_")
    # pieces of the parts of a recording have nothing in common
    silence = [arrays[f"x_{part}"][arrays[f"y_{part}"] == 0] for part in ("train", "valid", "test")]
    assert len(np.unique(np.concatenate(silence), axis=0)) == sum(map(len, silence))


def test_the_sizes_of_the_full_data_follow():
    # 18,538 and 2567 clips of the ten words, as published for version 0.01
    clips = {f"up/{i}.wav": ("train", "up") for i in range(18_538)}
    clips |= {f"go/{i}.wav": ("test", "go") for i in range(2567)}
    clips |= {f"bed/{i}.wav": ("train" if i % 2 else "test", "bed") for i in range(6000)}
    chosen = list(speech_archive.commands(clips).values())
    for part, words, published in (("train", 18_538, 22_246), ("test", 2567, 3081)):
        unknown = chosen.count((part, "_unknown_"))
        assert words + 2 * unknown == published  # with as many pieces of silence


@pytest.mark.parametrize("name", ["google12", "google30"])
def test_a_small_archive_is_not_the_whole_data(archive, name):
    with pytest.raises(ValueError, match=r"x_train must be int16 \((22246|51088), 99, 32\), got"):
        speech.SOURCES[name].make([archive])


CLIP = "./go/00000001_nohash_0.wav"
TWO = sound(np.zeros(2 * RATE), channels=2)
DAMAGE = {
    "list": ("./testing_list.txt", None, "the archive lacks testing_list.txt"),
    "listed": ("./go/00000005_nohash_0.wav", None, "is listed but not there"),
    "both": ("./validation_list.txt", b"go/00000005_nohash_0.wav", "is on both lists"),
    "rate": (CLIP, sound(np.zeros(8000), rate=8000), "one channel of 16 bits at 16000 Hz"),
    "stereo": (CLIP, TWO, "got 2 of 16 bits"),
    "long": (CLIP, sound(np.zeros(RATE + 1)), "at most 16000 samples, one second, got 16001"),
    "cut": (CLIP, sound(np.zeros(RATE))[:-100], "one channel .* and whole"),
    "none": (CLIP, sound([]), "one channel .* and whole, got .* 0 bytes"),
    "no sound": (CLIP, b"ID3", "is not a valid WAV file"),
    "noise": ("./_background_noise_/noise_1.wav", sound(np.zeros(RATE)), "recordings of at least"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_wrong_clip_is_named(members, tmp_path, name):
    path, data, message = DAMAGE[name]
    few = {k: v for k, v in members.items() if "0000000" not in k or k.split("/")[1] in "go bed"}
    lists = {
        key: b"\n".join(line for line in few[key].split() if line[:3] in (b"go/", b"bed"))
        for key in ("./testing_list.txt", "./validation_list.txt")
    }
    changed = {**few, **lists, path: data}
    changed = {key: content for key, content in changed.items() if content is not None}
    with pytest.raises(ValueError, match=message) as error:
        speech.SOURCES["google12"].make([write_zip(tmp_path / "a.zip", changed)])
    assert "\n" not in str(error.value)


def test_a_truncated_archive_and_a_link(archive, tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(archive.read_bytes())
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        speech.SOURCES["google30"].make([truncated(path)])
    with tarfile.open(tmp_path / "b.tgz", "w:gz") as file:
        entry = tarfile.TarInfo("./go/1.wav")
        entry.type, entry.linkname = tarfile.LNKTYPE, "/etc/hostname"
        file.addfile(entry)
    with pytest.raises(ValueError, match="is a link or a device"):
        speech.SOURCES["google30"].make([tmp_path / "b.tgz"])


def test_the_made_file_is_a_data_set(archive, tmp_path, monkeypatch):
    arrays = speech_archive.parse("google12", [archive])
    np.savez(tmp_path / "google12.npz", **arrays)
    monkeypatch.setenv("FIXPOINT_DATA", str(tmp_path))
    sizes = dict.fromkeys(("train", "valid", "test"))
    monkeypatch.setitem(speech._SIZES, "google12", sizes)
    data = load_dataset("google12")
    assert data.subset == ""
    assert data.parts == ("train", "valid", "test")
    assert validation_split(data) is data
    groups = [set(getattr(data, f"groups_{part}").tolist()) for part in data.parts]
    assert {g for g in groups[0] if g >= 0} == {0, 1, 2, 3}
    assert len([g for g in groups[0] if g < 0]) == 4  # each piece of silence by itself


def test_the_subset_of_speech(full):
    arrays = full("gsc12_v002_testset_logmel.npz")
    if (speech.SOURCES["google12"].find())[1]:
        pytest.skip("google12.npz, the whole data, is read instead")
    data = load_dataset("google12")
    assert "test archive" in data.subset
    assert (data.x_train.shape, data.x_test.shape) == ((3956, 99, 32), (934, 99, 32))
    assert data.classes[:3] == ("_silence_", "_unknown_", "yes")
    energies = data.inputs(data.x_test[:9])
    np.testing.assert_allclose(energies, arrays["x_test"][:9] * np.float64(0.002), rtol=1e-6)
    speakers = [set(getattr(data, f"groups_{part}").tolist()) for part in ("train", "test")]
    assert not {g for g in speakers[0] & speakers[1] if g >= 0}
    split = validation_split(data)
    assert not set(split.groups_train.tolist()) & set(split.groups_valid.tolist())
    assert torch.equal(data.x_train.min().long(), torch.tensor(round(math.log(1e-10) / 0.002)))


def test_frames_of_digital_silence_have_the_floor_of_the_features(full):
    x = full("gsc12_v002_testset_logmel.npz")["x_train"]
    floor = np.rint(log_mel(np.zeros(RATE)) / 0.002).astype(np.int16)[0]
    frames = x.reshape(-1, 32)
    silent = (frames == frames.min()).any(1)
    assert silent.sum() > 1000
    np.testing.assert_array_equal(frames[silent], np.broadcast_to(floor, (silent.sum(), 32)))
