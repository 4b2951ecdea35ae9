"""Deep equilibrium models."""
