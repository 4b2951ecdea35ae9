"""What the commands `train`, `compare` and `diagnose` do."""
