"""The generated main.c: files of windows, damaged files, names of classes."""

import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.random_runs import SANITIZED, STRICT, random_network

from fixpoint.data.csv_table import parse_csv
from fixpoint.export.agreement import label
from fixpoint.export.c.compiler import compile_c, run_c
from fixpoint.export.c.names import constant_names, string_literal
from fixpoint.export.c.writer import write_c
from fixpoint.export.integer_network import to_integers

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
        ("w.csv", "1,2,3\n", "has 3 columns, not 9"),
        ("w.csv", "1,2,3,4,5,6,7,8,9\n1,2,x,4,5,6,7,8,9\n", "sample 2 does not have 9 values"),
        ("w.csv", "1,2,3,4,5,6,7,8,9,10\n", "has 10 columns, not 9"),
        ("w.csv", "1 2 3 4 5 6 7 8 9\n", "sample 1 ends within a window of 128"),
        ("w.csv", "1," * 5000, "has 4096 columns, not 9"),
        ("w.csv", "", "is empty: lines of numbers are needed"),
        ("w.csv", "\n# nothing\n", "is empty: lines of numbers are needed"),
        ("w.bin", "", "is empty: 128 samples are a window"),
        ("w.bin", "12345", "sample 1 does not have 9 values"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(name, content, message, program):
    (program / name).write_text(content)
    result = run_main(program, program / name)
    assert result.returncode == 2
    assert re.fullmatch(rf"\S+/{name}: {message}\n", result.stderr)


def text_of(samples, separator=",", *, comma=False):
    lines = [separator.join(f"{v:.9g}" for v in sample) for sample in samples.tolist()]
    text = "\n".join(lines) + "\n"
    return text.replace(".", ",") if comma else text


NINE = ("ax", "ay", "az", "gx", "gy", "gz", "bx", "by", "bz")
FORMS = {
    "byte order mark": lambda x: "\ufeff" + text_of(x),
    "header": lambda x: ",".join(NINE) + "\n" + text_of(x),
    "quoted header": lambda x: ",".join(f'"{n}"' for n in NINE) + "\n" + text_of(x),
    "index column": lambda x: (
        ","
        + ",".join(NINE)
        + "\n"
        + "".join(f"{i},{line}\n" for i, line in enumerate(text_of(x).split("\n")[:-1]))
    ),
    "semicolons and decimal commas": lambda x: text_of(x, ";", comma=True),
    "decimal commas and blanks": lambda x: text_of(x, " ", comma=True),
    "quoted decimal commas": lambda x: "\n".join(
        ",".join('"' + f"{v:.9g}".replace(".", ",") + '"' for v in row) for row in x.tolist()
    ),
    "Excel's first line": lambda x: "sep=;\n" + text_of(x, ";"),
    "bars": lambda x: text_of(x, "|"),
    "comments": lambda x: "# by numpy\n" + text_of(x),
    "carriage returns": lambda x: text_of(x).replace("\n", "\r\n"),
    "blank lines": lambda x: "\n\n" + text_of(x).replace("\n", "\n\n"),
    "separators at the ends": lambda x: text_of(x).replace("\n", ",\n"),
    "no line end at the end": lambda x: text_of(x).rstrip("\n"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_csv_is_read_as_training_reads_it(form, program, windows):
    samples = windows[:2].flatten(0, 1)
    content = form(samples).encode()
    read = parse_csv(content, "w.csv").values
    np.testing.assert_allclose(read, samples.numpy(), rtol=1e-6)
    (program / "w.csv").write_bytes(content)
    result = run_main(program, program / "w.csv")
    assert (result.returncode, result.stderr) == (0, "")
    expected = run_c([str(program / "classify")], windows[:2])[1]
    given = [list(map(float, line.split("\t")[2:])) for line in result.stdout.splitlines()]
    assert torch.equal(torch.tensor(given), expected)


def test_channels_are_found_by_their_names(windows, tmp_path):
    network = replace(random_network(), channels=NINE, step=32)
    write_c(network, tmp_path, title="a test")
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=SANITIZED)
    samples = windows[:2].flatten(0, 1)
    rows = [f"walking,{i}," + ",".join(f"{v:.9g}" for v in reversed(row.tolist()))
            for i, row in enumerate(samples)]  # fmt: skip
    header = "activity,time," + ",".join(reversed(NINE))
    (tmp_path / "recording.csv").write_text("\n".join([header, *rows]))
    lines = run_main(tmp_path, tmp_path / "recording.csv").stdout.splitlines()
    cut = samples.unfold(0, 128, 32).transpose(1, 2)
    assert len(lines) == len(cut) == 5
    given = torch.tensor([[float(v) for v in line.split("\t")[2:]] for line in lines])
    torch.testing.assert_close(given, network.scores(cut), rtol=1e-4, atol=1e-4)
    names = ",".join(("time", *NINE[1:]))  # as many columns, but not the first channel
    (tmp_path / "recording.csv").write_text("\n".join([names, *[",".join("1" * 9)] * 200]))
    result = run_main(tmp_path, tmp_path / "recording.csv")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"has no column {NINE[0]}, needs {', '.join(NINE)}" in result.stderr
    (tmp_path / "recording.csv").write_text("1,2,3\n")
    result = run_main(tmp_path, tmp_path / "recording.csv")
    assert "has 3 columns, not 9 with these names: ax, ay, az" in result.stderr


@pytest.mark.parametrize("bits", [32, 16, 8])
def test_a_program_tests_itself(bits, windows, tmp_path):
    network = random_network(model="lstm", num_layers=2)
    network = network if bits == 32 else to_integers(network, windows, bits=bits)
    write_c(network, tmp_path, title="a test")
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=SANITIZED)
    result = run_main(tmp_path, "--self-test")
    assert (result.returncode, result.stdout) == (0, "passed\n")
    body = (tmp_path / "fixpoint.c").read_text()
    (tmp_path / "fixpoint.c").write_text(body.replace("int64_t in = ", "int64_t in = 7 + ")
                                         .replace("float in = ", "float in = 0.9f * "))  # fmt: skip
    compile_c(tmp_path, tmp_path / "classify", "gcc", flags=SANITIZED)
    result = run_main(tmp_path, "--self-test")
    assert (result.returncode, result.stdout) == (1, "window 1 has other scores\n")


def test_two_networks_fit_into_one_firmware(windows, tmp_path):
    networks = {"gait": random_network(), "tremor": random_network(model="gru", seed=1)}
    for prefix, network in networks.items():
        write_c(network, tmp_path, title="a test", prefix=prefix)
    (tmp_path / "selftest.c").unlink()
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "gait.h"\n#include "tremor.h"\n'
        "static float window[GAIT_TIMESTEPS * TREMOR_INPUTS];\n"
        "int main(void)\n{\n"
        '    FILE *file = fopen("w.bin", "rb");\n'
        "    if (file == NULL || fread(window, 4, 1152, file) != 1152)\n        return 1;\n"
        '    printf("%d %d\\n", gait_classify(window), tremor_classify(window));\n'
        "    return 0;\n}\n"
    )
    compile_c(tmp_path, tmp_path / "both", "gcc", flags=(*STRICT, "-Wno-unused-const-variable"))
    windows[:1].numpy().tofile(tmp_path / "w.bin")
    run = subprocess.run(
        [tmp_path / "both"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = [label(network.scores(windows[:1])).item() for network in networks.values()]
    assert [int(number) for number in run.stdout.split()] == expected


@pytest.mark.parametrize("prefix", ["", "2a", "a-b", "Gait", "é"])
def test_other_prefixes_are_refused(prefix, tmp_path):
    with pytest.raises(ValueError, match="--prefix must be lower case letters"):
        write_c(random_network(), tmp_path, title="a test", prefix=prefix)


@pytest.mark.parametrize("prefix", ["main", "selftest", "add", "read", "stdint", "int16"])
def test_prefixes_of_names_in_the_program_are_refused(prefix, tmp_path):
    with pytest.raises(ValueError, match=f"--prefix {prefix} begins names of the program itself"):
        write_c(random_network(), tmp_path, title="a test", prefix=prefix)
    assert not list(tmp_path.iterdir())


def test_probabilities_are_the_softmax(windows, tmp_path):
    network = random_network()
    write_c(network, tmp_path, title="a test")
    (tmp_path / "main.c").write_text(
        '#include <stdio.h>\n#include "fixpoint.h"\n'
        "int main(void)\n{\n    float s[2] = {1.5f, -0.25f}, p[2];\n"
        '    fixpoint_probabilities(s, p);\n    printf("%.9g %.9g\\n", p[0], p[1]);\n'
        "    return 0;\n}\n"
    )
    compile_c(tmp_path, tmp_path / "p", "gcc", flags=("-std=c99", "-O2"))
    out = subprocess.run([tmp_path / "p"], capture_output=True, text=True, check=True).stdout
    expected = torch.tensor([1.5, -0.25]).softmax(0)
    torch.testing.assert_close(torch.tensor([float(v) for v in out.split()]), expected)


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
    assert np.array_equal(values, network.layers[0].matrices["V"].numpy().ravel())
