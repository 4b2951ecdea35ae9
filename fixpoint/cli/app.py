"""The commands by name; the module of a command is imported when it is chosen."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fixpoint import __version__
from fixpoint._messages import meant_by
from fixpoint.cli.errors import fail
from fixpoint.cli.groups import NamedCommands
from fixpoint.cli.signals import raise_on_signals

COMMANDS = {
    "train": "Train one model as a recipe says.",
    "compare": "Train models with each solver and backward; compare accuracy, time, convergence.",
    "predict": "Classify new windows, or recordings cut as in the training, by a trained model.",
    "diagnose": "Say in plain sentences, and draw, whether a trained model converges on its data.",
    "export": "Write a trained network as a C program without dependencies, or as an ONNX graph.",
    "report": "Write one self-contained page of finished runs; also tables as LaTeX and CSV.",
    "reproduce": "Run the recipes of a table of the paper; print our numbers next to the paper's.",
    "figures": "Draw the figures of the ERNN paper, and of its analysis, from new short runs.",
    "info": "Print versions, threads, devices, BLAS and the data folder, for bug reports.",
    "data": "Data sets: list, download, describe.",
}
"""First line of the help of each command."""

PLACES = {"figures": "reproduce:figures_app", "data": "data:data_app"}
"""Module in `fixpoint.cli` and name of the typer app of a command, where it is not NAME:app."""

# UsageError of the click that typer uses: some versions bring their own copy of it.
_UsageError: Any = typer.BadParameter.__base__


class _Commands(NamedCommands):
    """Group that imports a command when it is chosen, and reports a wrong command in one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            result = super().main(*args, **{**extra, "standalone_mode": False})
        except _UsageError as error:
            message = error.format_message()
            if not message:  # a group without a command has shown its help
                raise SystemExit(2) from None
            fail(_with_hint(error, message))
        except typer.Abort:
            raise SystemExit(130) from None
        if extra.get("standalone_mode", True):
            raise SystemExit(result if isinstance(result, int) else 0)
        return result

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return what the help shows of a command, without importing it."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        found = super().resolve_command(ctx, args)
        raise_on_signals()
        return found

    def imported(self, name: str | None, command: Any) -> Any:
        if name is None:
            return command
        module, app = PLACES.get(name, f"{name}:app").split(":")
        return typer.main.get_command(getattr(import_module(f"fixpoint.cli.{module}"), app))


def _with_hint(error: Any, message: str) -> str:
    """Return the message, which names the option that an unknown one stands for."""
    given = getattr(error, "option_name", None)  # of NoSuchOption
    if given is None or error.ctx is None or getattr(error, "possibilities", None):
        return message
    names = [name for parameter in error.ctx.command.params for name in parameter.opts]
    keys = {name.lstrip("-").replace("-", "_"): name for name in names}
    key = given.lstrip("-").replace("-", "_")
    meant = [keys[name] for name in meant_by(key) if name in keys]
    return f"{message}; {given!r} is {meant[0]!r} here" if meant else message


app = typer.Typer(
    cls=_Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compare solvers and models of fixed-point and implicit layers.",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compare solvers and models of fixed-point and implicit layers."""


if __name__ == "__main__":
    app()
