"""One message for every kind of damaged file."""

from __future__ import annotations

import errno
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADVICE = "get a fresh copy"

_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    EOFError,
    UnicodeDecodeError,
    NotImplementedError,  # a compression or version that Python does not support
    RuntimeError,  # a password is required
    MemoryError,  # an impossible size
)


@contextmanager
def as_value_error(
    title: Path | str, advice: str = ADVICE, *, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert every error of a damaged archive into a ValueError of one line.

    Args:
        title: name of the file in the message.
        advice: the remedy in the message.
        also: further exceptions to convert.

    Raises:
        ValueError: the file is damaged.

    >>> with as_value_error("a.zip"):
    ...     raise EOFError("ended early")
    Traceback (most recent call last):
    ValueError: a.zip is truncated or corrupt (ended early); get a fresh copy
    """
    caught: tuple[type[Exception], ...] = (*_DAMAGE, *also)
    try:
        yield
    except caught as error:
        raise _damaged(title, error, advice) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        # Raised by bzip2 and gzip, or by a seek before the start; others concern the folder.
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _damaged(title, error, advice) from error


def _damaged(title: Path | str, error: BaseException, advice: str) -> ValueError:
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return ValueError(f"{title} is truncated or corrupt ({text}); {advice}")
