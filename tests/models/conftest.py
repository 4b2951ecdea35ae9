import pytest
import torch

from fixpoint.models import (
    IdentityFeedbackMap,
    JordanMap,
    LinearMap,
    ManifoldMap,
    SelfFeedbackMap,
)

CELLS = {
    "jordan": ("jordan", lambda d, n, **o: JordanMap(d, n, **o)),
    "jordan rank 2": ("jordan", lambda d, n, **o: JordanMap(d, n, rank=2, **o)),
    "self-feedback": ("self-feedback", lambda d, n, **o: SelfFeedbackMap(d, n, **o)),
    "bounded": ("self-feedback", lambda d, n, **o: SelfFeedbackMap(d, n, bound=0.5, **o)),
    "identity-feedback": ("identity-feedback", lambda d, n, **o: IdentityFeedbackMap(d, n, **o)),
    "linear": ("linear", lambda d, n, **o: LinearMap(d, n, **o)),
    "linear exact": ("linear exact", lambda d, n, **o: LinearMap(d, n, inverse="exact", **o)),
    "linear neumann": (
        "linear neumann",
        lambda d, n, **o: LinearMap(d, n, inverse="neumann", **o),
    ),
    "manifold": ("manifold", lambda d, n, **o: ManifoldMap(d, n, **o)),
}
"""Every cell by a name: its name in the NumPy reference, and how to make it."""


@pytest.fixture(params=CELLS)
def named_cell(request):
    """(name in the reference, cell) with d = 3, n = 5 in float64 and a random bias."""
    name, make = CELLS[request.param]
    torch.manual_seed(0)
    return name, ready(make(3, 5))


@pytest.fixture
def make_ready():
    return ready


def ready(cell):
    """The cell in float64 with a random bias; in eval mode a bounded U stays as it is."""
    if cell.b is not None:
        torch.nn.init.normal_(cell.b, std=0.5)
    return cell.double().eval()
