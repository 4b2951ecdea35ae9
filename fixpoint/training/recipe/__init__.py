"""Recipes: every hyper-parameter of a training run."""
