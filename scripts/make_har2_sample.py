"""Make the bundled HAR-2 sample from the full har.npz.

    python scripts/make_har2_sample.py [har.npz]

Without an argument har.npz is read from the folder FIXPOINT_DATA. The result is deterministic.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fixpoint.data.sources.har import ACTIVITIES, CHANNELS, read_har

TARGET = Path(__file__).parents[1] / "fixpoint" / "data" / "samples" / "har2_sample.npz"
WINDOWS = 6  # of each subject and activity
STEP = np.array([0.001] * 3 + [0.002] * 3 + [0.001] * 3, dtype=np.float32)  # g, rad/s, g


def make_sample(har: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of har.npz at the chosen rows, x as int16 (N, 9, 128)."""
    sample = {"scale": STEP, "channels": np.array(CHANNELS), "activities": np.array(ACTIVITIES)}
    for part in ("train", "test"):
        rows = choose(har[f"subject_{part}"], har[f"y_{part}"])
        steps = np.rint(har[f"x_{part}"][rows] / STEP.astype(np.float64))
        # time last: adjacent values are similar, so the file is 8 % smaller
        sample[f"x_{part}"] = np.ascontiguousarray(steps.transpose(0, 2, 1)).astype(np.int16)
        for key in ("y", "y2", "subject"):
            sample[f"{key}_{part}"] = har[f"{key}_{part}"][rows]
        sample[f"row_{part}"] = rows.astype(np.int16)
    return sample


def choose(subject: np.ndarray, activity: np.ndarray) -> np.ndarray:
    """Rows of WINDOWS windows of each subject and activity, evenly spaced over it, sorted."""
    centers = (np.arange(WINDOWS) + 0.5) / WINDOWS
    chosen = []
    for s in np.unique(subject):
        for a in np.unique(activity):
            rows = np.flatnonzero((subject == s) & (activity == a))
            chosen.append(rows[(centers * len(rows)).astype(int)])
    return np.sort(np.concatenate(chosen))


def main() -> None:
    har = read_har(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    sample = make_sample(har)
    np.savez_compressed(TARGET, **sample)  # type: ignore[arg-type]
    print(f"{TARGET}: {TARGET.stat().st_size} bytes")
    for key, array in sample.items():
        print(f"  {key}: {array.dtype} {array.shape}")


if __name__ == "__main__":
    main()
