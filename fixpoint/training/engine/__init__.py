"""Training loop and its parts: tasks, optimizers, checkpoints, models."""
