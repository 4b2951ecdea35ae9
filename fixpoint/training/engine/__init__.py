"""The training loop and what it needs: tasks, optimizers, checkpoints, models."""
