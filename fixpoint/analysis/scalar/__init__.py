"""Equilibria of scalar maps, Phi(alpha) among them."""
