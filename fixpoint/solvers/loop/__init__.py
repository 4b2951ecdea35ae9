"""The loop that every solve runs in.

    norms.py   sizes of states and residuals, of each sample or leaf, read by the host at once
    rules.py   how each sample stands after an update: pure functions of NumPy arrays or tensors
    course.py  one solve on the host: asks the rules, freezes samples, keeps the best states
    gauge.py   the residual of single evaluations, for SciPy's and torchdeq's solvers
    eager.py   evaluates phi, lets the solver update, and stops
    graph.py   the same as one operation of a graph, which reads nothing

A solver gives `init` and a pure `update`; it does not know of tolerances, frozen samples or
statuses. The rules do not know of states. `Course` is the only place where both meet.
"""

from fixpoint.solvers.loop.eager import Problem, iterate
from fixpoint.solvers.loop.gauge import Gauge
from fixpoint.solvers.loop.graph import iterate_in_graph
from fixpoint.solvers.loop.norms import Norm, Norms, Tolerance, resolution
from fixpoint.solvers.loop.rules import classify, has_stalled

__all__ = [
    "Gauge",
    "Norm",
    "Norms",
    "Problem",
    "Tolerance",
    "classify",
    "has_stalled",
    "iterate",
    "iterate_in_graph",
    "resolution",
]
