"""Log mel energies, beside python_speech_features 0.6."""

import numpy as np
import pytest

from fixpoint.data.archives.log_mel import RATE, log_mel, mel_filters

T = np.arange(RATE)
CLIP = np.rint(3000 * np.sin(2e-6 * T**2) * np.cos(0.01 * T) + (T * 7919 % 401 - 200))
# log(1e-10 + fbank(CLIP, 16000, 0.025, 0.01, 32, winfunc=numpy.hamming)[0]) of that package
REFERENCE = {
    (0, 0): 8.403223945111186,
    (0, 31): 11.637916236039585,
    (17, 5): 4.1304529867504485,
    (50, 12): 4.924963575471861,
    (98, 0): 8.293344188379189,
    (98, 31): 11.652827697494356,
}
SUM, SD = 23421.410206631073, 2.834283364165847


def test_the_features_are_those_of_the_authors_package():
    features = log_mel(CLIP.astype(np.int16))
    assert features.shape == (99, 32)
    for place, value in REFERENCE.items():
        assert features[place] == pytest.approx(value, rel=1e-12)
    assert features.sum() == pytest.approx(SUM, rel=1e-12)
    assert features.std() == pytest.approx(SD, rel=1e-12)


def test_a_short_clip_ends_the_second():
    features = log_mel(CLIP[:10_000].astype(np.int16))
    np.testing.assert_allclose(features[:30], np.log(1e-10), rtol=1e-12)
    assert features[40, 3] == pytest.approx(4.420597200376656, rel=1e-12)


def test_filters_overlap_to_a_sum_of_one_between_the_first_and_last_peak():
    weights = mel_filters()
    first, last = weights[0].argmax(), weights[-1].argmax()
    np.testing.assert_allclose(weights[:, first : last + 1].sum(0), 1, rtol=1e-12)
    assert (weights.max(1) == 1).all()


@pytest.mark.parametrize("clip", [np.zeros(RATE + 1), np.zeros((100, 2))])
def test_arrays_that_are_not_a_clip_are_refused(clip):
    with pytest.raises(ValueError, match="a clip is a row of at most 16000 samples"):
        log_mel(clip)
