"""Options that several commands have, those of a recipe built from its fields."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from fixpoint._messages import unknown_name
from fixpoint.analysis.plots import FORMATS
from fixpoint.training.commands.progress import json_progress
from fixpoint.training.recipe.schema import DEFAULTS, SECTION_OF, SECTIONS, Recipe, find_key
from fixpoint.training.recipe.toml import parse_setting

RECORDING = tuple(name for name, section in SECTION_OF.items() if section == "windows")
"""The keys of a recipe that say how recordings are cut into windows."""


def make_console(*, stderr: bool = False) -> Console:
    """Return standard output or standard error; 120 columns where it is not a terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=120, stderr=stderr)


def make_run_console() -> Console:
    """Return the console of a command that trains: standard error where progress is JSON."""
    return make_console(stderr=json_progress())


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"expected a whole number of at least 1, got {text}")
    return number


def number(help: str) -> Any:
    """Return an option with a whole number of at least 1."""
    return typer.Option(parser=count, metavar="N", help=help)


Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the recipe; repeatable."),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file or module that registers maps, solvers or models; repeatable.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        parser=count, metavar="N", help="Runs at a time, one thread each.", show_default="cores"
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run on a Dask scheduler, as tcp://HOST:8786, or SLURM, as slurm:timeout_min=240.",
        show_default="this machine",
    ),
]
Formats = Annotated[
    str, typer.Option("--format", help="Formats of the figures by comma: png, pdf, svg.")
]


def recipe_options(
    *names: str, defaults: bool = False, shown: Mapping[str, str] | None = None
) -> Callable[[Any], Any]:
    """Give a command an option for each of these keys of a recipe.

    The command gets those that were given as its argument `flags`.

    Args:
        names: keys of a recipe.
        defaults: show the default of each key.
        shown: what to show as the default of a key instead.
    """

    known = {name: str(DEFAULTS[name]) for name in names if defaults} | dict(shown or {})

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            flags = {name: values.pop(name) for name in names}
            given = {name: value for name, value in flags.items() if value is not None}
            return function(flags=given, **values)

        own = inspect.signature(function, eval_str=True).parameters
        first, *rest = [parameter for name, parameter in own.items() if name != "flags"]
        parameters = [first, *(_parameter(name, known.get(name)) for name in names), *rest]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(name: str, default: str | None) -> inspect.Parameter:
    """Return the option of a key of a recipe: its type, help and the default to show."""
    kind = SECTIONS[SECTION_OF[name]]
    (field,) = (field for field in fields(kind) if field.name == name)
    hint = get_type_hints(kind)[name]
    types = {int, float} & {hint, *get_args(hint)}
    text = field.metadata["help"]
    # The text of a choice begins with one of its values, which are in lower case.
    start = text[0] if get_origin(hint) is Literal else text[0].upper()
    options: dict[str, Any] = {
        "help": f"{start}{text[1:]}.",
        "show_default": default or False,
    }
    if int in types and field.metadata["low"] == 1:
        options |= {"parser": count, "metavar": "N"}
    value: Any = types.pop() if types else str
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value | None, typer.Option(**options)],
    )


def override(
    base: Recipe, settings: list[str] | None, plugins: list[str] | None, flags: dict[str, Any]
) -> Recipe:
    """Return the recipe with plugins, --set and options; options have precedence."""
    if plugins:
        base = base.changed(plugins=[*base.model.plugins, *map(plugin_place, plugins)])
    check_once(settings or [], flags)
    base = base.changed(**dict(parse_setting(text) for text in settings or []))
    return base.changed(**listed(flags))


def listed(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options, with channels as a list."""
    return {name: split(v) if name == "channels" else v for name, v in flags.items()}


def check_once(settings: list[str], flags: Collection[str]) -> None:
    """Refuse a key that is set twice, by --set or by its own option.

    Raises:
        ValueError: with the key.
    """
    seen = {SECTION_OF[name] + "." + name: _option(name) for name in flags}
    for text in settings:
        key = parse_setting(text)[0]
        if key in seen:
            raise ValueError(f"{key} is given twice, by {seen[key]} and --set: give it once")
        seen[key] = "--set"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_set(settings: list[str] | None, owners: Mapping[str, str]) -> None:
    """Refuse keys in --set for which a command has an option of its own.

    Args:
        owners: the option of each key.

    Raises:
        ValueError: with the option.
    """
    for key in keys_of(settings):
        if key in owners:
            raise ValueError(f"{key} is set by {owners[key]} here: leave it out of --set")


def keys_of(settings: list[str] | None) -> set[str]:
    """Return the keys that --set gives, without their sections."""
    return {find_key(parse_setting(text)[0])[1] for text in settings or []}


def plugin_place(text: str) -> str:
    """Return a file as its full path, so that the run can be found from another folder; else a
    module.
    """
    return str(Path(text).expanduser().absolute()) if text.endswith(".py") else text


def parallel_runs(jobs: int | None, cluster: str | None, device: str) -> int:
    """Return runs at a time on this machine.

    Raises:
        ValueError: both are given.
    """
    if jobs and cluster:
        raise ValueError("--jobs is for this machine; with --cluster each worker has one run")
    return jobs or cores(device)


def cores(device: str) -> int:
    return 1 if device != "cpu" else os.cpu_count() or 1


def split(text: str) -> list[str]:
    """Return the parts between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def split_formats(text: str) -> list[str]:
    """Return formats of figures.

    Raises:
        ValueError: one is unknown, or none is given.
    """
    formats = split(text)
    for name in formats or [text]:
        if name not in FORMATS:
            raise ValueError(unknown_name("format", name, FORMATS))
    return formats


def integers(option: str, text: str) -> list[int]:
    """Return seeds.

    Raises:
        ValueError: not whole numbers from 0 to 2^63 - 1.
    """
    try:
        numbers = [int(part) for part in split(text)]
    except ValueError:
        raise ValueError(f"{option} takes whole numbers by comma, as 0,1,2; got {text!r}") from None
    if not all(0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{option} takes numbers from 0 to 2^63 - 1; got {text!r}")
    return numbers


MOST_SEEDS = 100


def seeds_or_count(option: str, text: str) -> list[int]:
    """Return seeds by comma, or how many of them, from 0: "5" is 0 to 4, "5," the seed 5, "0" the
    seed 0.

    Raises:
        ValueError: not whole numbers, or more than 100 seeds.
    """
    numbers = integers(option, text)
    if "," in text or len(numbers) != 1 or numbers == [0]:
        return numbers
    (count,) = numbers
    if count > MOST_SEEDS:
        raise ValueError(
            f"{option} {count} asks for {count} seeds, at most {MOST_SEEDS}: for that one seed "
            f"write {option} {count},"
        )
    return list(range(count))
