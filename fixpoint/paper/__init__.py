"""Tables, figures and experiments of the ERNN paper alone."""
