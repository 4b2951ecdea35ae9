"""The generated main.c: files of windows, damaged files, names of classes."""

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.random_runs import SANITIZED, STRICT, random_network

from fixpoint.export.c.compiler import compile_c, run_c
from fixpoint.export.c.names import constant_names, string_literal
from fixpoint.export.c.writer import write_c

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


def run_main(folder, file):
    return subprocess.run([folder / "classify", file], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Folder of a compiled program."""
    folder = tmp_path_factory.mktemp("program")
    write_c(random_network(), folder, title="a test")
    compile_c(folder, folder / "classify", "gcc", flags=SANITIZED)
    return folder


@pytest.mark.parametrize("separator", [",", " ", "\t", ", "])
def test_csv_gives_what_binary_gives(separator, program, windows):
    samples = windows[:3].flatten(0, 1).tolist()
    text = "\n".join(separator.join(f"{v:.9g}" for v in sample) for sample in samples)
    (program / "w.csv").write_text(text)
    labels, scores = run_c([str(program / "classify")], windows[:3])
    rows = [line.split("\t") for line in run_main(program, program / "w.csv").stdout.splitlines()]
    assert [int(row[0]) for row in rows] == labels.tolist()
    given = torch.tensor([[float(value) for value in row[2:]] for row in rows])
    assert torch.equal(given, scores)
    assert rows[0][1] in ("walking|walking_downstairs|standing", "walking_upstairs|sitting|laying")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.csv", "1,2,3\n", "sample 1 does not have 9 values"),
        ("w.csv", "1,2,3,4,5,6,7,8,9\n1,2,x,4,5,6,7,8,9\n", "sample 2 does not have 9 values"),
        ("w.csv", "1,2,3,4,5,6,7,8,9,10\n", "sample 1 does not have 9 values"),
        ("w.csv", "1 2 3 4 5 6 7 8 9\n", "sample 1 ends within a window of 128"),
        ("w.csv", "1," * 5000, "sample 1 does not have 9 values"),
        ("w.bin", "12345", "sample 1 does not have 9 values"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(name, content, message, program):
    (program / name).write_text(content)
    result = run_main(program, program / name)
    assert result.returncode == 2
    assert re.fullmatch(rf"\S+/{name}: {message}\n", result.stderr)


def test_a_missing_file_is_told_in_one_line(program):
    result = run_main(program, program / "none.csv")
    assert result.returncode == 2
    assert result.stderr.endswith("none.csv cannot be read\n")


NAMES = ("", 'a "b" \\', "??/", "été", "1", "walking upstairs", "Walking-Upstairs", "*/\n")


def test_class_names_need_not_be_identifiers(windows, execute):
    count = len(NAMES)
    changed = replace(
        random_network(),
        classes=NAMES,
        head=torch.randn(count, 12),
        head_bias=torch.zeros(count),
    )
    assert len(execute(changed, windows, flags=STRICT)[0]) == len(windows)
    names = constant_names(NAMES)
    assert len(set(names)) == count
    assert all(re.fullmatch("[A-Z][A-Z0-9_]*", name) for name in names)


def test_a_class_name_is_printed_as_it_is(windows, tmp_path):
    name = 'a "b" \\ ??/ été'
    write_c(replace(random_network(), classes=(name, name)), tmp_path, title="*/ int x;")
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=STRICT)
    windows[:1].numpy().tofile(tmp_path / "w.bin")
    assert run_main(tmp_path, tmp_path / "w.bin").stdout.split("\t")[1] == name


def test_an_escape_takes_no_digit_of_the_text():
    assert string_literal("é1") == r'"\303\2511"'


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"--out must be a folder that can be written; .*file"):
        write_c(random_network(), tmp_path / "file", title="a test")


def test_numbers_survive_the_text(tmp_path):
    network = random_network()
    write_c(network, tmp_path, title="a test")
    header = (tmp_path / "fixpoint.h").read_text()
    text = re.search(r"float V\[144\] = \{(.*?)\};", header, re.DOTALL)[1]
    values = np.array([float(v.rstrip("f")) for v in text.replace("\n", "").split(",")], np.float32)
    assert np.array_equal(values, network.recurrence.matrices["V"].numpy().ravel())
