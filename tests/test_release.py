"""scripts/check_release.py: the version can be tagged, and a wrong tag cannot."""

import importlib.util
import re
from pathlib import Path

import fixpoint

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("check_release", ROOT / "scripts/check_release.py")
check_release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_release)


def test_the_version_can_be_tagged():
    assert check_release.problems(f"v{fixpoint.__version__}") == []


def test_another_tag_is_refused_in_every_file():
    wrong = check_release.problems("v9.9.9")
    names = ("fixpoint/__init__.py", "CITATION.cff", "CHANGELOG.md")
    assert [line.split()[0] for line in wrong] == list(names)


def test_the_changelog_has_the_sections_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1].startswith(fixpoint.__version__)
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= allowed
