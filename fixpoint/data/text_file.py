"""The text of a file: its encoding is recognized, and other kinds of files are named."""

from __future__ import annotations

import codecs

_OTHER = {
    b"\x1f\x8b": "is compressed by gzip: unpack it",
    b"PK\x03\x04": "is a workbook or a zip archive: save the table as CSV, or unpack it",
    b"PAR1": "is a Parquet file: save the table as CSV, or pass a data frame to fixpoint.data.load",
}


def decode(data: bytes, name: str) -> str:
    """Return the text of a file in UTF-8, in UTF-16 or UTF-32 with a byte order mark, or in
    Windows-1252.

    Raises:
        ValueError: it is a file of another kind; `name` is that of the file.

    >>> decode(b"geh\\xfcpft", "a.csv")
    'gehüpft'
    """
    for start, what in _OTHER.items():
        if data.startswith(start):
            raise ValueError(f"{name} {what}")
    try:
        text = data.decode(_encoding(data)).lstrip("\ufeff")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")
    if "\0" in text:
        raise ValueError(
            f"{name} is not a text of numbers, it holds NUL characters: save it as UTF-8, or "
            "arrays by numpy.savez as NAME.npz"
        )
    return text


def _encoding(data: bytes) -> str:
    # The mark of UTF-32 begins with that of UTF-16.
    if data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return "utf-16" if wide else "utf-8"
