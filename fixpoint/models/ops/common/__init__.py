"""Parts common to the fused operations."""
