"""
Read the results of a comparison
================================

What `fixpoint compare` wrote, ``python examples/10_read_results.py --out runs/compare``.

Each line of runs.jsonl is one run in JSON, ready for any tool.
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/compare"))
path = parser.parse_args().out / "runs.jsonl"
if not path.exists():
    raise SystemExit(f"{path} is not there: run `fixpoint compare` first, or pass its --out")
records = [json.loads(line) for line in path.read_text().splitlines()]
for record in sorted(records, key=lambda r: -r["accuracy_last"]):
    run, after = record["run"], record["contraction"]["after"]
    print(f"{record['label']} on {run['dataset']}, {run['cell']} cell, seed {run['seed']}")
    print(
        f"  accuracy {record['accuracy_last']:.1f} % (best {record['accuracy_best']:.1f} %), "
        f"{record['size_kb']:.1f} KB, {record['seconds_per_epoch']:.1f} s an epoch"
    )
    print(
        f"  {record['mean_iterations']:.1f} updates a time step; the condition holds at "
        f"{100 * after['fraction_holding']:.0f} % of the (t, k, window) looked at"
    )
    losses = ", ".join(f"{epoch['train_loss']:.3f}" for epoch in record["epochs"])
    print(f"  training loss by epoch: {losses}")
