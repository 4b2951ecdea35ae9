"""Names and strings that a C compiler takes."""

from __future__ import annotations

import re
from collections.abc import Sequence


def constant_names(classes: Sequence[str], prefix: str = "fixpoint") -> list[str]:
    """Make a C identifier for each class, all different.

    >>> constant_names(["walking upstairs", "sit/stand", "sit stand"])
    ['FIXPOINT_CLASS_WALKING_UPSTAIRS', 'FIXPOINT_CLASS_SIT_STAND', 'FIXPOINT_CLASS_SIT_STAND_2']
    """
    names: list[str] = []
    for label, name in enumerate(classes):
        # C99 compilers tell identifiers apart by their first 63 characters at least.
        word = re.sub("[^0-9A-Z]+", "_", name.upper(), flags=re.ASCII).strip("_")[:40]
        identifier = f"{prefix.upper()}_CLASS_{word or label}"
        while identifier in names:
            identifier += f"_{label}"
        names.append(identifier)
    return names


def string_literal(text: str) -> str:
    r"""Return a C string of the text in UTF-8; blanks of any kind become single spaces.

    >>> print(string_literal('a "b"\n?\u00e9'))
    "a \"b\" \?\303\251"
    """
    literal = ""
    for byte in " ".join(text.split()).encode("utf-8", "replace"):
        character = chr(byte)
        if character in '"\\?':
            # \? because ??x may be a trigraph
            literal += "\\" + character
        elif 32 <= byte < 127:
            literal += character
        else:
            literal += f"\\{byte:03o}"
    return f'"{literal}"'
