"""Names and prose use the field's terms: invented words and figures of speech are refused."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from support.verbs import begins_with_verb, is_predicate

ROOT = Path(__file__).parent.parent

NAMES = {
    "Alarm": "NonConvergenceHandler",
    "Differences": "FiniteDifferences",
    "Judged|Trial": "LineSearchResult, LineSearchState",
    "Measured": "Residuals",
    "Plan": "LaunchConfig",
    "Ruler": "ResidualNorm",
    "Watch": "ConvergenceMonitor",
    "_Course": "_RecordingMap",
    "_Search": "_SampleSolve",
    "_Shield": "_MaskedMap",
    "check_pair": "check_compatible",
    "contract": "bound_spectral_norm",
    "drive": "input_projection",
    "held": "frozen, or held_out of data",
    "isolate": "mask_nonfinite",
    "judge": "accept_or_backtrack",
    "least_exact_norm": "smallest_safe_norm",
    "_look_closely|_note_if_sound": "_observe_masked, _observe_unmasked",
    "looks_each_update": "may_sync",
    "one_line|_one_line": "as_value_error",
    "one_step": "as_leaky_step",
    "plain_scan|plain_gated_scan": "scan_reference, gated_scan_reference",
    "plain_steps|newton_steps": "names that say tanh",
    "pull": "activation_grad",
    "refusal": "unsupported_reason",
    "rejects_steps": "backtracks",
    "share|shares|share_\\w+|\\w+_share|\\w+_shares": "fraction",
    "start_is_past": "uses_previous_state",
    "stopped_at": "stop_gradient_at",
    "sweeps": "backend",
    "track": "captured_tensors",
    "typed": "coerce",
    "uncut": "full_direction",
    r"\w*(?:normal|optim|regular|initial|general|parametr|serial|token)is[ae]\w*": "-iz-",
    r"\w*(?:colour|neighbour|behaviour|licence|centre)\w*": "US spelling",
}
"""Names that may not occur in code, as regular expressions for the whole name, and the term."""

PROSE = {
    r"(?<!there\x20)(?:is|are|was|were|be) no(?! (?:longer|more|less|better|worse))": "is not a",
    r"(?:goes|go|went|going) on": "continues",
    "of which": "a sentence of its own",
    "wants|is wanted|are wanted": "needs",
    "stays|stay|stayed": "remains, is unchanged",
    "meets|met by": "satisfies, reaches",
    "knows|nobody": "has, is given",
    "referee": "independent reference",
    "not to be had": "not available",
    "packed otherwise|worn otherwise": "differently",
    "(?:a|the|its|each|an equal|larger|smaller|what|this) share|share of|shares of": "fraction",
    "anew": "again",
    "has a word|in a word|without a word": "message",
    "sees to it": "guarantees",
    "makes of|made of them": "converts",
    '"numbers"': "parameters",
    "made again backwards": "recomputed on the way back",
    "gave the sample up|gives the sample up": "did not converge for the sample",
    "per asinh": "by asinh",
    "came of it|comes of it": "the result",
    "so many": "this many, enough",
    "beside (?:other|the exact|torch|the paper|SciPy)": "compared with, next to",
}
"""Phrases that may not occur in docstrings, comments, messages and docs, and what to write."""

DOCS_ONLY = {
    "whoever": "any caller",
    "looked at": "examined",
    "possible are": "supported are",
    "what keeps": "a heading that names the task",
    "what comes of": "the result of",
    "why not is said": "says why not",
}
"""The same for the documentation and the first lines of docstrings."""

_GAP = (
    r"""(?:[\s"'#]+f?["']?)"""  # between two words: also the end of a line of a comment or string
)


def prose_pattern(phrase):
    return re.compile(rf"(?<![\w-])(?:{phrase.replace(' ', _GAP)})(?![\w])", re.IGNORECASE)


def names(source):
    """Each name in Python code once, with the line where it is first used."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            found.setdefault(token.string, token.start[0])
    return found


def wrong_names(source):
    return [
        f"line {line}: {name} (write {term})"
        for name, line in names(source).items()
        for pattern, term in NAMES.items()
        if re.fullmatch(pattern, name)
    ]


def wrong_phrases(text, phrases=PROSE):
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match.group().split())!r} "
        f"(write {term})"
        for phrase, term in phrases.items()
        for match in prose_pattern(phrase).finditer(text)
    ]


def _test_names(source):
    return "\n".join(re.findall(r"def (test_\w+)", source)).replace("_", " ")


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path):
    return path.relative_to(ROOT).as_posix()


CODE = files("fixpoint", "examples", "scripts", "benchmarks")
DOCUMENTED = files("fixpoint", "examples", "docs/_ext")
"""Files whose docstrings are checked for their first lines."""
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = [path for path in files("tests") if path != Path(__file__)]


def test_code_uses_the_terms_of_the_field():
    wrong = {}
    for path in CODE:
        source = path.read_text(encoding="utf-8")
        wrong[relative(path)] = [*wrong_names(source), *wrong_phrases(source)]
    assert [item for item in wrong.items() if item[1]] == []


def test_docs_use_the_terms_of_the_field():
    phrases = PROSE | DOCS_ONLY
    wrong = {
        relative(path): wrong_phrases(path.read_text(encoding="utf-8"), phrases) for path in DOCS
    }
    wrong |= {
        relative(path): wrong_phrases(first_lines(path.read_text(encoding="utf-8")), DOCS_ONLY)
        for path in DOCUMENTED
    }
    assert [item for item in wrong.items() if item[1]] == []


def test_names_in_tests_use_the_terms_of_the_field():
    wrong = {}
    for path in TESTS:
        source = path.read_text(encoding="utf-8")
        wrong[relative(path)] = [*wrong_names(source), *wrong_phrases(_test_names(source))]
    assert [item for item in wrong.items() if item[1]] == []


RELATIVE = re.compile(
    r"^(?:What|Whether|Which|Why|How|Where|When|That|Those|Of|On|With|Through|Raised)\b"
)


def docstrings(source):
    """Yield each function or class of Python code with the first line of its docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            yield node, ast.get_docstring(node).splitlines()[0]


def first_lines(source):
    return "\n".join(line for _, line in docstrings(source))


def is_property(node):
    return any(
        "property" in ast.unparse(d) or "setter" in ast.unparse(d) for d in node.decorator_list
    )


def wrong_first_lines(source):
    module = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    wrong = [f"line 1: {module!r} (name the thing by a noun)"] if RELATIVE.match(module) else []
    for node, line in docstrings(source):
        if isinstance(node, ast.ClassDef) or is_property(node):
            if RELATIVE.match(line) or (isinstance(node, ast.ClassDef) and is_predicate(line)):
                wrong.append(f"line {node.lineno}: {line!r} (name the thing by a noun)")
        elif not begins_with_verb(line):
            wrong.append(f"line {node.lineno}: {line!r} (begin with a verb)")
    return wrong


def test_first_lines_say_what_a_function_does_and_what_a_class_is():
    wrong = {
        relative(path): wrong_first_lines(path.read_text(encoding="utf-8")) for path in DOCUMENTED
    }
    assert [item for item in wrong.items() if item[1]] == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('def f():\n    """Return the sum."""', 0),
        ('def f():\n    """The sum."""', 1),
        ('def f():\n    """Size of the sum."""', 1),
        ('@property\ndef f():\n    """The sum."""', 0),
        ('class A:\n    """What f found."""', 1),
        ('class A:\n    """Findings of f."""', 0),
        ('class A:\n    """Collects findings."""', 1),
        ('class A:\n    """Collect findings."""', 1),
        ('"""What the parts share."""', 1),
        ('"""Parts common to the kernels."""', 0),
    ],
)
def test_first_lines_are_judged(source, count):
    assert len(wrong_first_lines(source)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the map is no contraction", 1),
        ("which is\n    no contraction", 1),
        ('f"{x} is "\n    f"no file"', 1),
        ("it is no longer than that", 0),
        ("the state goes on", 1),
        ("a share of the rows", 1),
        ("the layers share eta", 0),
        ("the value stays", 1),
    ],
)
def test_the_phrases_are_found_across_lines(text, count):
    assert len(wrong_phrases(text)) == count


def test_the_names_are_found_in_code_and_not_in_strings():
    assert len(wrong_names("def judge(share): return 'contract'\n")) == 2
