"""Heads: models built on a recurrent layer."""
