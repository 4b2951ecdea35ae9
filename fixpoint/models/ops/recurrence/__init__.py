"""Recurrences as one operation: a pointwise step and its pullback, and one skeleton a backend."""
