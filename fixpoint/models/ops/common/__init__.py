"""What the fused operations share."""
