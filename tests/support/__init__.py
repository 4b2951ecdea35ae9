"""Helpers of the tests: problems with known answers, references, makers of files."""
