"""What is wrong with a command, in one line and an exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fixpoint._messages import printable
from fixpoint.cli.signals import Terminated


@contextmanager
def one_message(stopped: str) -> Iterator[None]:
    """Print the message of an error in one line, with exit status 2.

    Args:
        stopped: printed after Ctrl-C or SIGTERM, with exit status 130 or 143.
    """
    try:
        yield
    except OSError as error:
        fail(str(error) if error.filename else error.strerror or str(error))
    except (ValueError, TypeError, ImportError, MemoryError) as error:
        fail(str(error))
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(stopped, file=sys.stderr)
        raise SystemExit(128 + number) from None


def fail(message: str) -> NoReturn:
    """Print a message in one line and exit with status 2."""
    print(f"fixpoint: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2)
