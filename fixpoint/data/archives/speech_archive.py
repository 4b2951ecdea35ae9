"""Archive of Google speech commands: the clips of Google-30 and Google-12, as features."""

from __future__ import annotations

import hashlib
import io
import math
import wave
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

import numpy as np

from fixpoint.data.archives.archive import files, read
from fixpoint.data.archives.log_mel import RATE, log_mel
from fixpoint.data.dataset import PARTS

URL = "http://download.tensorflow.org/data/speech_commands_v0.01.tar.gz"
SILENCE, UNKNOWN = "_silence_", "_unknown_"
COMMANDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_OTHERS = (
    *("bed", "bird", "cat", "dog", "eight", "five", "four", "happy", "house", "marvin"),
    *("nine", "one", "seven", "sheila", "six", "three", "tree", "two", "wow", "zero"),
)
WORDS = tuple(sorted(COMMANDS + _OTHERS))
STEP = np.float32(0.002)  # of the log energies

_NOISE = "_background_noise_"
_FRACTIONS = {
    "train": (0.0, 0.8),
    "valid": (0.8, 0.9),
    "test": (0.9, 1.0),
}  # of each noise recording
_CLIP = 2**20  # bytes of a clip's file at most

Clips = Mapping[str, tuple[str, str]]
"""Part and class of each clip, by its path word/file.wav."""


def parse(name: str, paths: Sequence[Path]) -> dict[str, np.ndarray]:
    """Return arrays of google12.npz or google30.npz from the official archive.

    Args:
        name: "google12" or "google30".
        paths: the archive, with word/file.wav, validation_list.txt and testing_list.txt.

    Raises:
        ValueError: a list is missing, or a file is not a clip of at most a second at 16 kHz.
    """
    clips = split(_paths_and_lists(paths))
    classes = WORDS if name == "google30" else (SILENCE, UNKNOWN, *COMMANDS)
    if name == "google12":
        clips = commands(clips)
    features: dict[str, np.ndarray] = {}
    noise: dict[str, np.ndarray] = {}
    for path, file in files(paths):
        short = _short(path)
        if short in clips:
            features[short] = _steps(_samples(read(file, path, at_most=_CLIP), path), path)
        elif name == "google12" and short.startswith(f"{_NOISE}/") and short.endswith(".wav"):
            noise[short] = _samples(read(file, path), path)
    if name == "google12":
        counts = {part: sum(c == (part, UNKNOWN) for c in clips.values()) for part in PARTS}
        silence = _silence(noise, counts)
        features |= silence
        clips = {**clips, **{key: (key.split("#")[1], SILENCE) for key in silence}}
    return _arrays(clips, features, classes)


def split(
    found: tuple[Iterable[str], Set[str], Set[str]],
) -> dict[str, tuple[str, str]]:
    """Return part and word of each clip, by the lists of the archive.

    Args:
        found: paths of the clips, those of validation_list.txt and those of testing_list.txt.

    Raises:
        ValueError: a path is on both lists, or a list names a clip that is not there.

    >>> split((["up/a_nohash_0.wav", "up/b_nohash_0.wav"], frozenset(), {"up/b_nohash_0.wav"}))
    {'up/a_nohash_0.wav': ('train', 'up'), 'up/b_nohash_0.wav': ('test', 'up')}
    """
    paths, valid, test = found
    clips = {}
    for path in sorted(paths):
        part = "valid" if path in valid else "test" if path in test else "train"
        clips[path] = part, path.split("/")[0]
    lost = (valid | test) - set(clips)
    if lost or valid & test:
        some = min(lost or valid & test)
        problem = "is listed but not there" if lost else "is on both lists"
        raise ValueError(f"the archive's clip {some} {problem}: give the official one, {URL}")
    return clips


def commands(clips: Clips) -> dict[str, tuple[str, str]]:
    """Return the clips of Google-12 without silence: ten words, and some of the others as unknown.

    >>> commands({"up/a.wav": ("train", "up"), "bed/b.wav": ("train", "bed")})
    {'up/a.wav': ('train', 'up'), 'bed/b.wav': ('train', '_unknown_')}
    """
    chosen = {path: clip for path, clip in clips.items() if clip[1] in COMMANDS}
    for part in PARTS:
        others = [path for path, clip in clips.items() if clip[0] == part and path not in chosen]
        others.sort(key=lambda path: hashlib.sha1(path.encode(), usedforsecurity=False).digest())
        count = math.ceil(
            sum(clip[0] == part for clip in chosen.values() if clip[1] != UNKNOWN) / 10
        )
        chosen |= dict.fromkeys(others[:count], (part, UNKNOWN))
    return chosen


def _paths_and_lists(paths: Sequence[Path]) -> tuple[list[str], Set[str], Set[str]]:
    clips: list[str] = []
    lists: dict[str, Set[str]] = {}
    for path, file in files(paths):
        short = _short(path)
        name = short.split("/")[-1]
        if name in ("validation_list.txt", "testing_list.txt"):
            lines = read(file, path).decode("utf-8-sig").splitlines()
            lists[name] = frozenset(_short(line.strip()) for line in lines if line.strip())
        elif name.endswith(".wav") and short.split("/")[0] in WORDS:
            clips.append(short)
    for name in ("validation_list.txt", "testing_list.txt"):
        if name not in lists:
            raise ValueError(f"the archive lacks {name}: give the official one, {URL}")
    return clips, lists["validation_list.txt"], lists["testing_list.txt"]


def _short(path: str) -> str:
    """Return word/file.wav of a path with ./ in front, backslashes or capital letters."""
    return "/".join(path.replace("\\", "/").lower().split("/")[-2:])


def _samples(data: bytes, path: str) -> np.ndarray:
    try:
        with wave.open(io.BytesIO(data)) as sound:
            form = sound.getframerate(), sound.getnchannels(), sound.getsampwidth()
            frames = sound.readframes(sound.getnframes())
            whole = len(frames) == 2 * sound.getnframes()
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{path} is not a valid WAV file ({str(error) or 'it is empty'})"
        ) from None
    if form != (RATE, 1, 2) or not whole or not frames:
        raise ValueError(
            f"{path} must be one channel of 16 bits at {RATE} Hz and whole, got {form[1]} of "
            f"{8 * form[2]} bits at {form[0]} Hz, {len(frames)} bytes"
        )
    return np.frombuffer(frames, "<i2")


def _steps(clip: np.ndarray, path: str) -> np.ndarray:
    """Log energies (99, 32) in steps, int16."""
    if len(clip) > RATE:
        raise ValueError(f"{path} must have at most {RATE} samples, one second, got {len(clip)}")
    return np.rint(log_mel(clip) / np.float64(STEP)).astype(np.int16)


def _silence(noise: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return excerpts of the noise recordings, as many in each part as clips of unknown."""
    names = sorted(noise)
    if not names or min(len(sound) for sound in noise.values()) < 10 * RATE:
        raise ValueError(
            f"the archive lacks recordings of at least 10 s in {_NOISE}: give the official one, "
            f"{URL}"
        )
    pieces = {}
    for number, part in enumerate(PARTS):
        draw = np.random.RandomState(number)  # the same in every version of NumPy
        for i in range(counts[part]):
            name = names[i % len(names)]
            first, end = (int(fraction * len(noise[name])) for fraction in _FRACTIONS[part])
            start = draw.randint(first, end - RATE + 1)
            pieces[f"{name}#{part}#{i}"] = _steps(noise[name][start : start + RATE], name)
    return pieces


def _arrays(
    clips: Clips, features: Mapping[str, np.ndarray], classes: Sequence[str]
) -> dict[str, np.ndarray]:
    arrays = {"scale": np.array([STEP]), "classes": np.array(classes)}
    for part in PARTS:
        paths = [path for path, clip in clips.items() if clip[0] == part]
        if not paths:
            raise ValueError(f"the archive has no {part} clip: give the official one, {URL}")
        labels = [clips[path][1] for path in paths]
        arrays[f"x_{part}"] = np.stack([features[path] for path in paths])
        arrays[f"y_{part}"] = np.array([classes.index(label) for label in labels], np.uint8)
        arrays[f"speaker_{part}"] = np.array(
            [
                "" if label == SILENCE else path.split("/")[-1].split("_nohash_")[0]
                for path, label in zip(paths, labels, strict=True)
            ]
        )
        arrays[f"file_{part}"] = np.array(paths)
    return arrays
