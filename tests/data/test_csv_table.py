"""CSV files of all kinds of programs: separators, decimal commas, byte order marks, headers."""

import codecs
import gzip

import numpy as np
import pytest

from fixpoint.data.csv_table import parse_columns, parse_csv

HALVES = [[1.5, 2.0], [3.0, 4.25]]

SAME = {
    "commas": "1.5,2\n3,4.25\n",
    "spaces after commas": "1.5, 2\n3, 4.25\n",
    "semicolons": "1.5;2\n3;4.25\n",
    "tabs": "1.5\t2\n3\t4.25\n",
    "bars": "1.5|2\n3|4.25\n",
    "white space": "1.5   2\n3 4.25\n",
    "decimal commas and semicolons": "1,5;2\n3;4,25\n",
    "decimal commas and tabs": "1,5\t2,0\n3,0\t4,25\n",
    "decimal commas and white space": "1,5 2\n3 4,25\n",
    "decimal commas in quotes": '"1,5","2,0"\n"3","4,25"\n',
    "quotes": '"1.5","2"\n"3","4.25"\n',
    "line of Excel": "sep=;\n1,5;2\n3;4,25\n",
    "header": "left,right\n1.5,2\n3,4.25\n",
    "header with semicolons": "left;right\n1,5;2\n3;4,25\n",
    "header with other separators": "acc, x (m/s);acc, y (m/s)\n1.5;2\n3;4.25\n",
    "end of Windows": "1.5,2\r\n3,4.25\r\n",
    "end of old Macs": "1.5,2\r3,4.25\r",
    "no end": "1.5,2\n3,4.25",
    "comments": "# saved by numpy\n# left, right\n1.5,2\n3,4.25\n#end\n",
    "blank lines": "\n1.5,2\n\n3,4.25\n\n",
    "lines of separators": "1.5,2\n3,4.25\n,\n",
    "separator at each end": "1.5,2,\n3,4.25,\n",
    "signs and exponents": "+1.5,2e0\n3.,.425E1\n",
    "pandas index": ",left,right\n0,1.5,2\n1,3,4.25\n",
    "pandas index and counting header": ",0,1\n0,1.5,2.0\n1,3.0,4.25\n",
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_one_table_in_many_forms(name, mark):
    table = parse_csv(mark + SAME[name].encode(), "a.csv")
    assert table.values.tolist() == HALVES
    assert not table.counting_header


def test_byte_order_marks():
    assert parse_csv(b"\xef\xbb\xbf1.5\n2.5\n", "a.csv").values.tolist() == [[1.5], [2.5]]
    assert parse_csv(2 * codecs.BOM_UTF8 + b"1.5\n2.5\n", "a.csv").values.tolist() == [[1.5], [2.5]]
    for mark, encoding in (
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ):
        data = mark + "left\tright\n1,5\t2\n3\t4,25\n".encode(encoding)
        assert parse_csv(data, "a.csv").values.tolist() == HALVES
    with pytest.raises(ValueError, match="holds NUL characters: save it as UTF-8"):
        parse_csv("1.5\n".encode("utf-16-le"), "a.csv")
    latin = "Temperatur (°C);x\n1,5;2\n3;4,25\n".encode("latin-1")
    assert parse_csv(latin, "a.csv").values.tolist() == HALVES


BAD = {
    "columns": ("1,2,3\n4,5\n", "number of columns changed from 3 in line 1 to 2 in line 2"),
    "word": ("1,2\n4,five\n", "could not convert 'five' in line 2, column 2; columns .* by ','"),
    "word after semicolons": ("1;2\n4;fünf;x\n", "changed from 2 in line 1 to 3 in line 2"),
    "cell with a semicolon": ('1,2\n"a;b",3\n', "could not convert 'a;b.* in line 2"),
    "gap": ("1,2\n4,\n", "no number in line 2, column 2"),
    "NaN": ("x,y\n1,2\n\n4,nan\n", "holds NaN or inf in 1 lines, first in line 4"),
    "empty": ("", "is empty"),
    "only a header": ("a,b\n", "is empty"),
    "underscores": ("1_0,2\n3,4\n", "could not convert '1_0'"),
    "NUL": ("1,2\n\0,3\n", "holds NUL characters: save it as UTF-8"),
    "last line of words": ("1,2\n3,4\nend of file\n", "changed from 2 in line 1 to 1 in line 3"),
    "separators of two kinds": ("1.5,2.5\n3;4.5\n", "could not convert '1.5,2.5'"),
    "points and commas": ("1.5;2\n3;4,25\n", "both decimal points and decimal commas"),
    "thousands": ("1,234.5;2\n3;4\n", "could not convert '1,234.5'"),
    "one header name for two numbers": ("x\n7,5\n8,5\n", "1 names in its header and 2 numbers"),
    "fractions that start with 0": ("7,05\n8,5\n", "commas both as decimal marks and between"),
    "negative zeros": ("-0,5\n1,5\n", "commas both as decimal marks and between"),
    "decimal commas of three channels": ("1,5,2,05,3\n1,5,2,5,3\n", "both as decimal marks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_a_table_gets_one_line(name):
    text, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        parse_csv(text.encode(), "a.csv")
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("a.csv")


def test_the_header_of_pandas_is_told_from_a_first_step():
    assert parse_csv(b"0,1,2\n1.5,2.5,3.5\n", "a.csv").counting_header
    assert parse_csv(b"0,1,2\n7,8,9\n", "a.csv").counting_header
    for data in (b"0,1\n1,2\n2,3\n", b"0\n1.5\n", b"0,1,2\n", b"0,1,3\n1.5,2.5,3.5\n"):
        assert not parse_csv(data, "a.csv").counting_header


def test_whole_numbers_in_two_columns_leave_a_doubt():
    assert "was read as two numbers" in parse_csv(b"7,5\n8,5\n", "a.csv").note
    for data in (b"7,5\n8,-5\n", b"7,5,1\n", b"7;5\n", b"7.5,5\n"):
        assert parse_csv(data, "a.csv").note == ""


def test_values_are_those_of_numpy():
    values = np.random.default_rng(0).normal(size=(40, 5)) * 10.0 ** np.arange(-6, 4, 2)
    text = "\n".join(",".join(map(repr, row)) for row in values.tolist())
    np.testing.assert_array_equal(parse_csv(text.encode(), "a.csv").values, values)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_names_in_any_encoding(encoding):
    data = "ax;activity\n0,5;hüpft\n1;ruht\n".encode(encoding)
    assert parse_columns(data, "a.csv") == {"ax": ["0.5", "1"], "activity": ["hüpft", "ruht"]}


def test_columns_without_a_name_or_cells_are_left_out():
    columns = {"ax": ["1", "2"], "ay": ["3", "4"]}
    assert parse_columns(b"ax,,ay,,\n1,,3,,\n2,,4,,\n", "a.csv") == columns
    index = {"": ["0", "1"], "ax": ["1", "2"]}
    assert parse_columns(b",ax\n0,1\n1,2\n", "a.csv") == index


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ax,,ay,\n1,2,3,\n4,,6,\n", "a.csv: column 2 has no name in the header: name it, or"),
        (b",ax,\n0,1,\n1,2,3\n", "a.csv: column 3 has no name in the header: name it, or"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "a.csv is compressed by gzip: unpack it"),
        (b"PK\x03\x04rest", "a.csv is a workbook or a zip archive: save the table as CSV"),
        (b"PAR1rest", "a.csv is a Parquet file: save the table as CSV, or pass a data frame"),
        (b"a,a\n1,2\n", "a.csv has two columns with the name 'a': rename one of them"),
    ],
)
def test_files_of_another_kind_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        parse_columns(data, "a.csv")
