"""Equilibria through time: h_t solves h = sigma(U h + V h_{t-1} + W x_t + b)."""
