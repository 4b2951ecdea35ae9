"""Work of the commands `train`, `compare` and `diagnose`."""
