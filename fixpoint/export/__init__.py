"""Trained networks as programs for other machines: C for small devices, ONNX."""

from fixpoint.export.layers import Recurrence
from fixpoint.export.network import Network, read_network

__all__ = ["Network", "Recurrence", "read_network"]
