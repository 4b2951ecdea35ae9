"""Log mel energies of one second of speech, as EdgeML computes them.

Windows of 25 ms every 10 ms of 16 kHz sound, pre-emphasis 0.97, symmetric Hamming window, FFT of
512 points, 32 triangular filters whose corners lie evenly in mel from 0 to 8 kHz and are rounded
down to a frequency of the FFT. The maintained libraries, librosa and torchaudio, use exact corners:
their features differ by 0.3 (RMS, of a noisy chirp), most in the lowest filters. The package
that the authors used has had no release since 2017.

Source: Kusupati et al., 2018, FastGRNN: A Fast, Accurate, Stable and Tiny Kilobyte Sized Gated
Recurrent Neural Network, and its EdgeML code, which calls `fbank` of python_speech_features 0.6.
"""

from __future__ import annotations

import functools

import numpy as np

RATE = 16_000  # samples a second
FILTERS = 32
FRAMES = 99

_WINDOW, _STEP, _FFT = 400, 160, 512  # samples
_PRE_EMPHASIS = 0.97
_FLOOR = 1e-10


def log_mel(clip: np.ndarray) -> np.ndarray:
    """Log energies (99, 32), float64, of one second of sound.

    Args:
        clip: at most 16,000 samples; shorter clips are padded with silence at the start.

    Raises:
        ValueError: the clip is not one-dimensional, or longer than a second.

    >>> log_mel(np.zeros(16_000, np.int16)).shape
    (99, 32)
    """
    if clip.ndim != 1 or len(clip) > RATE:
        raise ValueError(
            f"a clip is a row of at most {RATE} samples, got {clip.shape}: cut it to one second"
        )
    sound = np.zeros((FRAMES - 1) * _STEP + _WINDOW)  # the last frame is 80 samples short
    sound[RATE - len(clip) : RATE] = clip
    sound[1:RATE] -= _PRE_EMPHASIS * sound[: RATE - 1]
    frames = np.lib.stride_tricks.sliding_window_view(sound, _WINDOW)[::_STEP]
    power = np.abs(np.fft.rfft(frames * np.hamming(_WINDOW), _FFT)) ** 2 / _FFT
    return np.log(power @ mel_filters().T + _FLOOR)


@functools.cache
def mel_filters() -> np.ndarray:
    """Return the filters (32, 257): the weight of each frequency of the FFT in each filter.

    >>> mel_filters().shape
    (32, 257)
    """
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), FILTERS + 2)
    corners = np.floor((_FFT + 1) * 700 * (10 ** (mel / 2595) - 1) / RATE)
    low, peak, high = (corners[i : FILTERS + i, None] for i in range(3))
    frequency = np.arange(_FFT // 2 + 1)
    rising, falling = (frequency - low) / (peak - low), (high - frequency) / (high - peak)
    return np.clip(np.minimum(rising, falling), 0, None)
