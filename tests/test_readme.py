"""The README's examples run, and its two commands are there."""

import json
import re
from pathlib import Path
from statistics import mean, stdev

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs():
    namespace = {}
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["solution"].converged.all()
    assert namespace["linear"].weight.grad.norm() > 0


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'src="([^"]+)"', README)
    assert [link for link in links if "://" not in link and not (ROOT / link).is_file()] == []


def test_the_two_commands_come_first():
    first, second = re.findall(r"```sh\n(.*?)\n```", README)[:2]
    assert first.endswith(".venv/bin/fixpoint compare")
    assert second.endswith(".venv/bin/pytest")


def name_of(record):
    """As the table names the model of a run."""
    run = record["run"]
    if run["model"] != "ernn":
        return f"{run['model']}{', relu' if run['nonlinearity'] == 'relu' else ''}"
    return "leaky step" if run["rank"] == 0 else f"ernn k={run['max_iter']}"


def committed_runs():
    """The lines of results/runs.jsonl by data set, model and size."""
    runs = {}
    for line in (ROOT / "results/runs.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        key = record["run"]["dataset"], name_of(record), f"{record['size_kb']:.1f}"
        runs.setdefault(key, []).append(record)
    return runs


RUNS = committed_runs()
DATASETS = {"HAR-2": "har2", "DSA-19": "dsa19", "toy walks": "toy-walks"}
ROW = re.compile(rf"^\| (?:{'|'.join(DATASETS)}) \|.*$", re.MULTILINE)


def test_all_committed_runs_are_in_the_table():
    assert len(ROW.findall(README)) == len(RUNS)


@pytest.mark.parametrize("key", RUNS, ids=lambda key: "-".join(map(str, key)))
def test_the_results_are_those_of_the_committed_runs(key):
    for row in ROW.findall(README):
        data, name, seeds, last, best, kb, _ = (cell.strip() for cell in row.strip("|").split("|"))
        if (DATASETS[data], name.lower(), kb) == key:
            break
    else:
        pytest.fail(f"no row of the README for {key}")
    for given, metric in ((last, "accuracy_last"), (best, "accuracy_best")):
        values = [record[metric] for record in RUNS[key]]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        assert given == f"{mean(values):.2f}{spread}"
    assert int(seeds) == len({record["run"]["seed"] for record in RUNS[key]}) == len(RUNS[key])


def test_the_perplexities_are_those_of_the_committed_runs():
    text = (ROOT / "results/paper_protocol/runs.jsonl").read_text(encoding="utf-8")
    runs = [json.loads(line) for line in text.splitlines()]
    last = {r["run"]["model"]: r["perplexity_last"] for r in runs if r["run"]["dataset"] == "ptb"}
    readme = " ".join(README.split())
    assert f"a perplexity of {last['ernn']:.2f} with `ptb-ernn`" in readme
    for model in ("FastRNN", "FastGRNN"):
        assert f"{model} {last[model.lower()]:.2f}" in readme
    assert f"UGRNN, of half the size, {last['ugrnn']:.2f}" in readme
    assert f"LSTM, four times as large, {last['lstm']:.2f}" in readme
