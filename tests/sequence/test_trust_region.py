"""The Kalman filter as a scan against the loop, and against NumPy's textbook filter."""

import numpy as np
import pytest
import torch

from fixpoint.sequence.trust_region import kalman_filter, kalman_scan


def problem(T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a, c, y = torch.randn(3, T, 2, 3, generator=generator, dtype=torch.float64)
    return 1.5 * a, c, y, torch.randn(2, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("T", [1, 2, 3, 31, 128, 1000])
@pytest.mark.parametrize("s2", [0.01, 1.0, 1e4])
def test_the_scan_equals_the_filter(T, s2):
    a, c, y, first = problem(T)
    torch.testing.assert_close(
        kalman_scan(a, c, y, first, s2), kalman_filter(a, c, y, first, s2), rtol=1e-10, atol=1e-12
    )


def test_against_the_textbook_filter():
    """Joseph form in NumPy, which shares no line with either."""
    a, c, y, first = problem(50)
    s2 = 0.3
    got = kalman_filter(a, c, y, first, s2).numpy()
    A, C, Y = a.numpy(), c.numpy(), y.numpy()
    mean, variance = first.numpy(), np.ones((2, 3))
    for t in range(50):
        if t:
            mean, variance = A[t] * mean + C[t], A[t] * variance * A[t] + 1.0
        gain = variance / (variance + s2)
        mean = mean + gain * (Y[t] - mean)
        variance = (1 - gain) * variance * (1 - gain) + gain * s2 * gain
        np.testing.assert_allclose(got[t], mean, rtol=1e-12)


def test_the_limits():
    """No observation: Newton's step. An exact one: the iterate itself."""
    a, c, y, first = problem(9)
    free = kalman_filter(a, c, y, first, 1e18)
    state = first
    for t in range(1, 9):
        state = a[t] * state + c[t]
    torch.testing.assert_close(free[8], state, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kalman_filter(a, c, y, first, 1e-18), y)
