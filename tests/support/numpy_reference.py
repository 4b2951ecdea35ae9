"""The maps and the recurrence of an ERNN in NumPy, from the paper's equations alone."""

from __future__ import annotations

from typing import Any

import numpy as np

SIGMA = {
    "relu": lambda a: np.maximum(a, 0),
    "tanh": np.tanh,
    "sigmoid": lambda a: 1 / (1 + np.exp(-a)),
    "identity": lambda a: a,
}


def weights(cell: Any) -> dict[str, np.ndarray]:
    """U, V, W, b of a cell in float64; U of a low-rank cell multiplied out."""
    w = {name: p.detach().double().numpy().copy() for name, p in cell.named_parameters()}
    if "U1" in w:
        w["U"] = w["U1"] @ w["U2"]
    elif hasattr(cell, "U"):
        w["U"] = cell.U.detach().double().numpy().copy()
    w.setdefault("b", np.zeros(len(w["W"])))
    return w


def phi(name: str, sigma: str, w: dict[str, np.ndarray], h, h_prev, x) -> np.ndarray:
    """phi(h, h_prev, x) of one sample: h, h_prev (n,), x (d,)."""
    W, b = w["W"], w["b"]
    if name == "manifold":  # gamma = 1
        return SIGMA[sigma](w["U"] @ (h + h_prev) + W @ x + b) - h_prev
    V, one = w["V"], np.eye(len(W))
    if name == "jordan":
        return SIGMA[sigma]((one + w["U"]) @ (V @ h + W @ x + b))
    past = V @ h_prev + W @ x + b
    if name == "self-feedback":
        return SIGMA[sigma](w["U"] @ h + past)
    if name == "identity-feedback":
        return SIGMA[sigma](h + past)
    if name == "linear":
        return w["U"] @ h + past
    if name == "linear exact":
        return np.linalg.solve(one - w["U"], past)
    assert name == "linear neumann"
    return (one + w["U"]) @ past


def recurrence(name: str, sigma: str, w: dict[str, np.ndarray], x, h0, eta) -> np.ndarray:
    """h_1 .. h_T, (T, B, n), by h <- h + eta[t, k] (phi(h) - h); x (T, B, d), h0 (B, n)."""
    output = np.empty((*x.shape[:2], h0.shape[1]))
    for row in range(x.shape[1]):
        h_prev = h0[row]
        for t in range(len(x)):
            h = h_prev
            for step in eta[t]:
                h = h + step * (phi(name, sigma, w, h, h_prev, x[t, row]) - h)
            output[t, row] = h_prev = h
    return output
