"""The command line."""

from __future__ import annotations

import sys

from fixpoint.cli.signals import exit_on_signals


def main() -> None:
    """Run the command `fixpoint`."""
    exit_on_signals()
    try:
        from fixpoint.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        from fixpoint._messages import missing_extra

        print(
            f"fixpoint: {missing_extra('the command line', error.name, 'bench')}", file=sys.stderr
        )
        raise SystemExit(2) from None
    app()
