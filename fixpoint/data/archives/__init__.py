"""Official archives: downloads, and the files inside."""
