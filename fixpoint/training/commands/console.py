"""Printing text of users: names of files, data sets and classes are shown as they are."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fixpoint._messages import printable


def say(console: Console, text: str) -> None:
    """Print a line that is neither cut nor read as markup; control characters are escaped."""
    console.print(Text(printable(text)), highlight=False, soft_wrap=True)
