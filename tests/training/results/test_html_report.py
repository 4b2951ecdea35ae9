"""The page of a report: it needs nothing else, and its numbers are those of the records."""

import base64
import csv
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from fixpoint.analysis.plots.style import style_of
from fixpoint.analysis.plots.svg import Curve, curve_chart
from fixpoint.cli.app import app
from fixpoint.training import Recipe, run_experiment
from fixpoint.training.engine.model_factory import resolve
from fixpoint.training.results.html_report import render, write_report
from fixpoint.training.results.report_charts import Line, _over_time
from fixpoint.training.results.store import Records


def record(data, **changes):
    from dataclasses import replace

    recipe = Recipe().changed(**{"hidden": 4, "epochs": 2} | changes)
    recipe = replace(recipe, model=resolve(recipe.model))
    return run_experiment(recipe, data)


@pytest.fixture(scope="module")
def records(tiny, text):
    return [
        record(tiny),
        record(tiny, seed=1),
        record(tiny, solver="picard", epochs=1),
        record(tiny, model="gru"),
        record(text, dataset="a <b> & 'c'", model="lstm", batch_size=4, bptt=9),
    ]


@pytest.fixture(scope="module")
def page(records):
    return render(records)


class Tags(HTMLParser):
    """Tags with their attributes, and whether they nest well."""

    EMPTY = ("meta", "img", "line")

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.cells, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in self.EMPTY or self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open and "small" not in self.open and data.strip():
            self.texts.append(data.strip())


def test_it_needs_nothing_else(page):
    tags = Tags(page).found
    assert {tag for tag, _ in tags}.isdisjoint({"link", "iframe", "object"})
    for _, attributes in tags:
        for name in ("src", "href", "srcset"):
            assert attributes.get(name, "data:").startswith("data:")
    outside = re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", page)
    assert "http" not in outside
    assert "url(" not in outside
    assert "@import" not in outside


def test_the_numbers_are_those_of_the_records(page, records):
    texts = Tags(page).texts
    first = [records[0]["accuracy_last"], records[1]["accuracy_last"]]
    mean = sum(first) / 2
    deviation = abs(first[0] - first[1]) / 2**0.5
    shown = [f"{mean:.2f}"] + ([f"± {deviation:.2f}"] if deviation else [])
    row = texts[texts.index("ERNN K=1") :]
    assert row[1 : 2 + len(shown)] == ["2", *shown]
    assert f"{records[2]['mean_residual']:.2g}" in texts
    assert f"{records[4]['perplexity_best']:.2f}" in texts


def test_sorting_has_the_numbers(page, records):
    values = [a["data-value"] for tag, a in Tags(page).found if "data-value" in a]
    assert str(records[3]["size_kb"]) in values


def charts(page):
    found = re.findall(r'base64,([\w+/=]+)" alt="([^"]*)"', page)
    return [(title, base64.b64decode(image).decode()) for image, title in found]


def test_the_charts_are_svg_with_text(page):
    titles = [title for title, _ in charts(page)]
    for title in ("Score over epochs", "Score against training time", "Learned η over time"):
        assert f"{title} on har2-sample" in titles
    assert not any("η" in title and "har2" not in title for title in titles)  # the LSTM has none
    for _, image in charts(page):
        root = ElementTree.fromstring(image)
        assert root.tag.endswith("svg")
        assert any(node.tag.endswith("text") for node in root.iter())


def test_names_are_text_not_markup(page):
    assert "a &lt;b&gt; &amp; &#39;c&#39;" in page
    assert "<b>" not in page


def test_how_it_was_run(page, records):
    assert records[0]["versions"]["torch"] in page
    for name in ("lr", "batch_size", "map", "solver"):
        assert f"<dt>{name}</dt>" in page
    assert "seeds 0, 1" in page


def test_curves_over_time_are_those_of_all_seeds(records):
    lines = [Line(0, "a", "", records[:2])]
    for name in ("norm", "eta"):
        (curve,) = _over_time(lines, name)
        each = [
            [np.median(step[0]) for step in record["contraction"]["after"][name]]
            for record in records[:2]
        ]
        assert each[0] != each[1]
        np.testing.assert_allclose(curve.y, np.mean(each, 0))
        np.testing.assert_allclose([curve.low, curve.high], [np.min(each, 0), np.max(each, 0)])


def test_what_is_common_is_said_once(records):
    """Hidden units of all; the epochs differ. Of one configuration all is said beside it."""
    page = render([*records[:4]])
    assert "All with 4 units." in page
    assert page.count("4 units") == 1
    assert ">2 epochs<" in page
    assert "Bands span the seeds." in page
    alone = render([records[3]])
    assert "All with" not in alone
    assert "4 units, 2 epochs" in alone
    assert "Bands span the seeds." not in alone
    assert "by validation" not in alone
    assert "by validation" in render([records[3] | {"accuracy_chosen": 50.0}])


def test_missing_numbers(records):
    """A run that diverged has null where JSON has no number."""
    broken = dict(records[3]) | {"loss": None, "accuracy_best": None}
    broken["epochs"] = [
        epoch | {"train_loss": None, "accuracy": None} for epoch in broken["epochs"]
    ]
    Tags(render([broken]))
    Tags(render([broken, records[0]]))


def test_the_command(tmp_path, records):
    one, two = tmp_path / "one", tmp_path / "two"
    Records(one).append(records[0])
    Records(two).append(records[3])
    result = CliRunner().invoke(app, ["report", str(one), str(two / "runs.jsonl")])
    assert result.exit_code == 0, result.output
    assert "2 runs:" in result.stdout
    text = (one / "report.html").read_text()
    assert "GRU" in text
    assert "ERNN K=1" in text
    out = tmp_path / "below" / "page.html"
    result = CliRunner().invoke(app, ["report", str(one), "--out", str(out)])
    assert result.exit_code == 0
    assert "GRU" not in out.read_text()


def test_what_is_wrong_gets_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "runs.jsonl").write_text("")
    for source, message in (
        ("nowhere", "there is no folder or file"),
        ("file", "is not a folder with a runs.jsonl"),
        ("empty", "no run is recorded in"),
    ):
        result = CliRunner().invoke(app, ["report", str(tmp_path / source)])
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert message in line
    with pytest.raises(ValueError, match="no run"):
        write_report([tmp_path / "empty"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_being_written_is_left_as_it_is(tmp_path, records):
    file = tmp_path / "runs.jsonl"
    for record in records:
        Records(tmp_path).append(record)
    with file.open("a") as other:
        other.write('{"key": "half')
    before = file.read_bytes()
    for sources in ([tmp_path], [tmp_path, tmp_path / "runs.jsonl"]):
        assert write_report(sources, tmp_path / "page.html") == len(records)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"key": "x"}\n', r"record x in .*runs\.jsonl lacks run, .*, left out"),
        (b"\xff\n", r"line 2 of .*runs\.jsonl: not a record of a run, skipped"),
    ],
)
def test_a_line_that_is_not_a_run_is_named_and_left_out(tmp_path, content, message, records):
    Records(tmp_path).append(records[0])
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(content)
    with pytest.warns(UserWarning, match=message):
        assert write_report([tmp_path], tmp_path / "page.html") == 1


def test_a_folder_as_the_page_is_refused(tmp_path, records):
    Records(tmp_path).append(records[0])
    with pytest.raises(ValueError, match=r"--out must be the file of the page; .*report\.html"):
        write_report([tmp_path], tmp_path)


def test_styles_differ():
    assert len({str(style_of(number)) for number in range(28)}) == 28


def test_a_chart_leaves_out_what_a_logarithm_has_not():
    text = curve_chart([Curve(0, [1, 2, 3], [1.0, 0.0, 10.0])], x="x", y="y", log=True)
    ElementTree.fromstring(text)
    assert curve_chart([Curve(0, [1], [2])], x="x", y="y") == curve_chart(
        [Curve(0, [1], [2])], x="x", y="y"
    )


def test_tables_for_a_paper(tmp_path, records):
    for record in records:
        Records(tmp_path).append(record)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--latex", "--csv"])
    assert result.exit_code == 0, result.output
    latex = (tmp_path / "report.tex").read_text()
    assert latex.count(r"\begin{tabular}") == 5  # two tables, and the classes of three models
    assert r"a <b> \& 'c'" in latex
    mean = (records[0]["accuracy_last"] + records[1]["accuracy_last"]) / 2
    assert f"& 2 & {mean:.2f}" in latex
    rows = list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines()))
    assert len(rows) == len(records)
    assert float(rows[0]["last acc. %"]) == records[0]["accuracy_last"]
    assert rows[4]["last acc. %"] == ""
    assert float(rows[4]["last perplexity"]) == records[4]["perplexity_last"]
    assert rows[1]["seed"] == "1"


def test_the_page_is_made_for_light_and_dark_and_narrow(page):
    assert "color-scheme: light dark" in page
    assert "prefers-color-scheme: dark" in page
    assert "Scroll the table sideways" in page
    assert "numbers" not in [text.lower() for text in re.findall(r"<button[^>]*>([^<]*)", page)]


def test_a_report_says_what_the_numbers_mean(page):
    assert "What the numbers mean" in page
    assert "Rows of different maps are different models" in page
    assert "This layer " in page
