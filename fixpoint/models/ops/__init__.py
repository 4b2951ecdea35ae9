"""Recurrences over whole sequences as single operations."""
