"""Ctrl-C and SIGTERM: at once while modules load, by an exception while a command runs."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM was received."""


def exit_on_signals() -> None:
    """Exit on signals with status 128 + signal, without a traceback, until `raise_on_signals`.

    An exception may be lost or shown while modules are imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def raise_on_signals() -> None:
    """Raise from now on KeyboardInterrupt on SIGINT, and `Terminated` on SIGTERM.

    Changes only what `exit_on_signals` has set.
    """
    handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: _terminate,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is _exit:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"Stopped.\n")
    os._exit(128 + number)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
