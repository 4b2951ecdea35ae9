"""Check that a tag can be released: python scripts/check_release.py v0.1.0

The tag is the version of the package and of CITATION.cff, and CHANGELOG.md has its dated section.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """List the reasons against releasing the tag, nothing if there are none."""
    version = tag.removeprefix("v")

    def found(pattern: str, name: str) -> str | None:
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return match and match[1]

    wrong = []
    for name, pattern in (
        ("fixpoint/__init__.py", r'^__version__ = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
    ):
        if (given := found(pattern, name)) != version:
            wrong.append(f"{name} has version {given}, the tag is {tag}")
    dated = found(rf"^## {re.escape(version)} - (\d{{4}}-\d\d-\d\d)$", "CHANGELOG.md")
    if dated is None:
        wrong.append(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD'")
    elif dated != (cited := found(r"^date-released: (.+)$", "CITATION.cff")):
        wrong.append(f"CHANGELOG.md dates {version} {dated}, CITATION.cff {cited}")
    return wrong


if __name__ == "__main__":
    found = problems(sys.argv[1])
    print("\n".join(found) or f"{sys.argv[1]} can be released")
    sys.exit(bool(found))
