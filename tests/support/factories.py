"""Small data sets, and small archives in the official layouts."""

import io
import tarfile
import wave
import zipfile

import numpy as np
import torch

from fixpoint.data import Dataset

N, T, D = 50, 6, 3


def make(seed=0, **changes):
    g = torch.Generator().manual_seed(seed)
    fields = {
        "name": "toy",
        "x_train": 5 + 3 * torch.randn(N, T, D, generator=g),
        "y_train": torch.arange(N) % 2,
        "x_test": torch.randn(20, T, D, generator=g),
        "y_test": torch.arange(20) % 2,
        "classes": ("a", "b"),
        "groups_train": torch.arange(N),
        "license": "none",
        "citation": "none",
    }
    return Dataset(**(fields | changes))


def write_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def table(values, *, delimiter=" ", form="%.9e"):
    text = io.StringIO()
    np.savetxt(text, values, delimiter=delimiter, fmt=form)
    return text.getvalue().encode()


def sound(samples, *, rate=16_000, channels=1, width=2):
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setframerate(rate)
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.writeframes(np.asarray(samples, "<i2").tobytes())
    return data.getvalue()


def damaged(data, random):
    """The data with a fraction cut off, or some bytes changed, mostly near the end."""
    if random.random() < 0.3:
        return data[: random.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(random.randrange(1, 20)):
        back = random.randrange(min(200, len(data)) if random.random() < 0.7 else len(data))
        changed[-1 - back] = random.randrange(256)
    return bytes(changed)


def truncated(path, fraction=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(fraction * len(data))])
    return path
