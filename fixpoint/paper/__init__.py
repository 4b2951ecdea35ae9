"""What belongs to the ERNN paper alone: its tables, its figures, its experiments."""
