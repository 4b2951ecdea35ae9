"""Generated C programs."""
