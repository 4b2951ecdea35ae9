"""Solvers of SciPy and torchdeq behind the interface of ours, and ours behind torchdeq's."""
