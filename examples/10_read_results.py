"""
Read the results of a comparison
================================

Each line of the runs.jsonl of `fixpoint compare` is one run in JSON, ready for any tool.

Without such a file two short runs take its place.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from fixpoint.data import load_dataset, normalize
from fixpoint.training import Recipe, run_experiment

RUNS = Path("runs/compare/runs.jsonl")
EPOCHS = 3

if RUNS.exists():
    records = [json.loads(line) for line in RUNS.read_text().splitlines()]
else:
    data = normalize(load_dataset("har2-sample"))
    recipe = Recipe().changed(
        dataset="har2-sample", solver="inexact-newton", hidden=16, rank=4, epochs=EPOCHS
    )
    records = [run_experiment(recipe.changed(max_iter=K), data) for K in (1, 2)]

_, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
for record in sorted(records, key=lambda r: -(r["accuracy_last"] or 0)):
    run, losses = record["run"], [epoch["train_loss"] for epoch in record["epochs"]]
    print(
        f"{record['label']} on {run['dataset']}, seed {run['seed']}: accuracy "
        f"{record['accuracy_last']:.1f} %, {record['size_kb']:.1f} KB, loss {losses[-1]:.3f}"
    )
    axes.plot(range(1, len(losses) + 1), losses, "o-", label=record["label"])
axes.set(xlabel="epoch", ylabel="training loss (nats)", yscale="log")
axes.legend()
plt.show()
