"""Differentiation of z*: through the updates, or by the implicit function theorem."""

from fixpoint.backward.base import Backward
from fixpoint.backward.implicit import Implicit
from fixpoint.backward.phantom import Phantom
from fixpoint.backward.reversible import Reversible
from fixpoint.backward.unrolled import Unrolled

__all__ = ["Backward", "Implicit", "Phantom", "Reversible", "Unrolled"]
