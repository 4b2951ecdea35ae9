"""Trained networks as programs for other machines: C for small devices, ONNX."""

from fixpoint.export.network import Network, read_network
from fixpoint.export.normalization import InputScale
from fixpoint.export.recurrence import Recurrence

__all__ = ["InputScale", "Network", "Recurrence", "read_network"]
