"""fixpoint.cli.errors: errors of a command and their exit status."""

import pytest

from fixpoint.cli.errors import one_message
from fixpoint.cli.signals import Terminated


def interrupted_import(interruption):
    try:
        raise interruption
    except KeyboardInterrupt:
        raise ImportError("partially initialized module")  # noqa: B904


@pytest.mark.parametrize(("interruption", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_error_of_an_interrupted_import_is_an_interruption(interruption, status, capsys):
    with pytest.raises(SystemExit) as ended, one_message("stopped"):
        interrupted_import(interruption)
    assert ended.value.code == status
    assert capsys.readouterr().err == "stopped\n"


def test_another_error_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, one_message("stopped"):
        raise ValueError("a value\nis wrong")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "fixpoint: a value is wrong\n"
