"""Recurrences of the tests, and their states by the plain loop."""

import torch


def leaky(n, *, eta=0.05, scale=1.0, dtype=torch.float64, seed=0):
    """A leaky tanh recurrence with its parameter and its decay."""
    generator = torch.Generator().manual_seed(seed)
    A = scale * torch.randn(n, n, generator=generator, dtype=dtype) / n**0.5
    A.requires_grad_()

    def f(h, x):
        return (1 - eta) * h + eta * torch.tanh(h @ A.T + x)

    return f, A, 1 - eta


def gated(n, *, dtype=torch.float64, seed=0):
    """A GRU-like recurrence, which is no leaky one."""
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(2 * n, n, generator=generator, dtype=dtype) / (2 * n**0.5)
    V.requires_grad_()

    def f(h, x):
        z, c = (h @ V.T + torch.cat([x, x], 1)).chunk(2, 1)
        z = torch.sigmoid(z + 1)
        return z * h + (1 - z) * torch.tanh(c)

    return f, V


def loop(f, x, h):
    states = []
    for x_t in x:
        h = f(h, x_t)
        states.append(h)
    return torch.stack(states)


def inputs(T, B, n, *, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, n, generator=generator, dtype=dtype)
    return x, torch.randn(B, n, generator=generator, dtype=dtype)
