"""Errors of a command: one line and an exit status."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fixpoint._messages import SomeFailed, printable
from fixpoint.cli.signals import Terminated


@contextmanager
def one_message(stopped: str) -> Iterator[None]:
    """Print the message of an error in one line, with exit status 2, or 1 where some runs failed.

    Args:
        stopped: printed after Ctrl-C or SIGTERM, with exit status 130 or 143.
    """
    try:
        with _short_warnings(), _as_interruption():
            yield
    except OSError as error:
        fail(str(error) if error.filename else error.strerror or str(error))
    except (ValueError, TypeError, ImportError, MemoryError) as error:
        fail(str(error))
    except SomeFailed as error:
        fail(str(error), status=1)
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(stopped, file=sys.stderr)
        raise SystemExit(128 + number) from None


@contextmanager
def _as_interruption() -> Iterator[None]:
    """Raise the interruption that an error comes from, as of an import that it has cut off."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print each warning once, in one line without the place in the source."""
    before, shown = warnings.showwarning, set()

    def show(message: Any, category: Any, *_: Any, **__: Any) -> None:
        text = printable(" ".join(str(message).split()))
        if text not in shown:
            shown.add(text)
            print(f"fixpoint: warning: {text}", file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def fail(message: str, *, status: int = 2) -> NoReturn:
    """Print a message in one line and exit with a status, 2 for a bad command."""
    print(f"fixpoint: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(status)
