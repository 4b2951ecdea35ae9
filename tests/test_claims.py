"""The tables of docs/claims.md are those of the committed results."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from fixpoint.training.results.store import read_records

ROOT = Path(__file__).parent.parent
STUDY = "docs/solvers_on_har2.md"
PAGE = (ROOT / "docs/claims.md").read_text(encoding="utf-8")


def script(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", ROOT / f"benchmarks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(name):
    text = (ROOT / f"results/{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_table_of_the_walks_is_on_the_page():
    assert f"\n{script('claims').table(lines('claims'))}\n\n" in PAGE


@pytest.mark.parametrize("dataset", sorted({line["dataset"] for line in lines("ablation")}))
def test_the_ablation_of_a_data_set_is_on_the_page(dataset):
    assert f"\n{script('ablation').tables(lines('ablation'))[dataset]}\n\n" in PAGE


def test_the_condition_is_that_of_the_committed_runs():
    records = read_records(ROOT / "results")
    assert f"\n{script('claims').condition_table(records)}\n\n" in PAGE


def test_the_runs_by_the_papers_protocol_are_on_the_page():
    records = read_records(ROOT / "results/paper_protocol")
    assert {record["run"]["rotate"] for record in records} == {0}
    assert f"\n{script('claims').protocol_table(records)}\n\n" in PAGE


def test_each_mean_of_a_verdict_is_in_a_table():
    """A row that is trained again changes the table; the verdict has to follow."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", STUDY)]
    rows = "\n".join((*pages, PAGE)).splitlines()
    cells = {cell.strip() for row in rows for cell in row.split("|")[1:]}
    verdicts = PAGE.partition("## Is it the equilibrium")[0]
    means = set(re.findall(r"\d+\.\d\d ± \d+\.\d\d", verdicts))
    assert means
    assert means - cells == set()
