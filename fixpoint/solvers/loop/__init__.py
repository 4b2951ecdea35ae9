"""The loop that every solve runs in.

    norms.py   sizes of states and residuals, of each sample or leaf, read by the host at once
    rules.py   how each sample stands after an update: pure functions of NumPy arrays or tensors
    course.py  one solve on the host: asks the rules, freezes samples, keeps the best states
    gauge.py   the residual of single evaluations, for SciPy's and torchdeq's solvers
    eager.py   evaluates phi, lets the solver update, and stops; also a fixed number of updates,
               and first updates from a solution
    noise.py   random numbers added to updates, where they are asked for
    watch.py   what watches a fixed number of updates: a record, or the samples that settle
    whole.py   a batch whose rows depend on each other, as one sample
    graph.py   the same loop as one operation of a graph, by the same rules

A solver gives `init` and a pure `update`; it does not know of tolerances, frozen samples or
statuses. The rules do not know of states. `Course` is the only place where both meet.
"""
