"""The commands `fixpoint data list | fetch | info`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fixpoint._messages import printable, unknown_name
from fixpoint.cli.errors import one_message
from fixpoint.cli.groups import NamedCommands
from fixpoint.cli.options import RECORDING, listed, recipe_options
from fixpoint.data.archives.download import Archive
from fixpoint.data.dataset import Dataset
from fixpoint.data.registry import DATASETS, SOURCES, check_name, load_dataset
from fixpoint.data.storage import folder
from fixpoint.training.recipe.schema import Recipe

_STOPPED = "stopped: the same command resumes an unfinished download"
data_app = typer.Typer(
    cls=NamedCommands,
    add_completion=False,
    no_args_is_help=True,
    help="Data sets: list, download, describe.",
)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)


@data_app.command("list")
def show_list() -> None:
    """List the data sets, and which of them are available."""
    table = Table("data set", "status", "file", "where to get it")
    for name in DATASETS:
        table.add_row(name, *_status(name))
    console = _console()
    console.print(table)
    console.print(f"Data folder: {_shown(folder())}", soft_wrap=True, highlight=False)


@data_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A data set of 'fixpoint data list'.")],
    archive: Annotated[
        list[Path] | None,
        typer.Option(help="Official archive, or folder of an unpacked one; repeat for more files."),
    ] = None,
) -> None:
    """Download the official archive of a data set, or read a given one, and convert it.

    The archive is verified first; an existing file is kept if anything is wrong.
    """
    console = _console()
    with one_message(_STOPPED):
        if name not in DATASETS:
            raise ValueError(unknown_name("data set", name, DATASETS))
        if name not in SOURCES:
            console.print(f"{name} needs no file: it is ready")
            return
        source = SOURCES[name]
        ready = folder() / source.file
        if ready.is_file() and not archive and _loads(name):
            console.print(f"{name} is ready: {_shown(ready)}", soft_wrap=True, highlight=False)
            return
        paths = archive or source.obtain(_Bars(console))
        with console.status(f"checking and converting {', '.join(p.name for p in paths)}"):
            source.install(paths)
            data = load_dataset(name)
            pinned = [known for known in source.archives if known.pinned]
            same = all(any(known.is_file(path) for path in paths) for known in pinned)
        if not same and not any(path.is_dir() for path in paths):
            console.print(
                "The archive's checksum differs from the official one (repacked?), but its "
                "contents are correct.",
                soft_wrap=True,
            )
        console.print(Text(printable(repr(data))), soft_wrap=True)
        console.print(f"{name} is ready: {_shown(ready)}", soft_wrap=True, highlight=False)
        if not archive:
            kept = _shown(paths[0].parent)
            console.print(f"The archive was kept in {kept}", soft_wrap=True, highlight=False)


@data_app.command()
@recipe_options(*RECORDING)
def info(
    *,
    name: Annotated[
        str, typer.Argument(help="A data set of 'fixpoint data list', or a file or folder.")
    ],
    flags: dict[str, Any],
) -> None:
    """Show shapes, classes, counts, license and citation of a data set."""
    with one_message(_STOPPED):
        check_name(name)
        windows = Recipe().changed(**listed(flags)).windows
        data = load_dataset(name, **asdict(windows))
        table = Table(show_header=False)
        for key, value in {**_facts(data), **_origin(name)}.items():
            table.add_row(key, Text(printable(value)))
        _console().print(table)


def _facts(data: Dataset) -> dict[str, str]:
    parts = data.parts
    unit = {"classification": "sequences", "tokens": "texts", "language-model": "words"}[data.kind]
    # of a stream x leaves out the last word, which is a target only
    more = 1 if data.kind == "language-model" else 0
    facts = {
        "name": data.name,
        "kind": data.kind,
        "complete": f"no, a subset: {data.subset}" if data.subset else "yes",
        unit: ", ".join(f"{len(getattr(data, f'x_{part}')) + more} {part}" for part in parts),
        "input": _inputs(data),
        **({"channels": ", ".join(data.channels)} if data.channels else {}),
        **({"image": "{} rows x {} columns".format(*data.image)} if data.image else {}),
        "target": _targets(data),
    }
    if data.kind != "language-model":
        facts["classes"] = f"{len(data.classes)}: {', '.join(data.classes)}"
        for part in parts:
            y = getattr(data, f"y_{part}")
            counts = ", ".join(str(n) for n in y.bincount(minlength=len(data.classes)).tolist())
            facts[f"of each class, {part}"] = counts
    if data.vocabulary:
        facts["vocabulary"] = f"{len(data.vocabulary)} words"
    if data.notes:
        facts["notes"] = "; ".join(data.notes)
    facts["groups"] = _groups(data)
    facts["validation"] = (
        "official"
        if data.x_valid is not None
        else "none official; validation_split holds out whole groups of train"
        if data.groups_train is not None
        else "none official; validation_split holds out a fraction of each class of train"
    )
    facts["license"] = data.license
    facts["citation"] = data.citation
    return facts


def _inputs(data: Dataset) -> str:
    shape, stored = data.x_train.shape, str(data.x_train.dtype).removeprefix("torch.")
    if data.kind == "classification":
        steps = shape[1] if data.lengths_train is None else f"at most {shape[1]}"
        return f"{steps} steps x {shape[2]} channels, float32, stored as {stored}"
    if data.kind == "tokens":
        return f"at most {shape[1]} word ids, int64, stored as {stored}, with lengths"
    return f"one stream of word ids for each part, int64, stored as {stored}"


def _targets(data: Dataset) -> str:
    if data.kind == "language-model":
        return "the next word, int64"
    return f"one class of {len(data.classes)} for each sequence, int64"


def _groups(data: Dataset) -> str:
    counts = [
        f"{len(groups.unique())} {part}"
        for part in data.parts
        if (groups := getattr(data, f"groups_{part}")) is not None
    ]
    return ", ".join(counts) or "not known"


def _origin(name: str) -> dict[str, str]:
    if name not in SOURCES:
        return {"file": _shown(Path(name)) if name not in DATASETS else "none needed"}
    source = SOURCES[name]
    origin = {"file": _shown(source.find()[0]), "official page": source.page}
    for archive in source.archives:
        checksum = archive.checksum or "none published; the contents are verified"
        origin[f"archive {archive.file}"] = f"{archive.url}, checksum: {checksum}"
    if not source.archives:
        origin["archive"] = f"requires registration: {source.remedy}"
    return origin


def _status(name: str) -> tuple[str, str, str]:
    if name not in SOURCES:
        return "ready", "none needed", ""
    source = SOURCES[name]
    get = f"fixpoint data fetch {name}"
    get += "" if source.archives else f" --archive FILE, with {source.needs} of {source.page}"
    try:
        path, complete = source.find()
    except FileNotFoundError:
        return "not there", source.file, get
    return ("ready", path.name, "") if complete else ("subset ready", path.name, f"all: {get}")


def _loads(name: str) -> bool:
    try:
        return not load_dataset(name).subset
    except ValueError:
        return False


def _shown(path: Path) -> str:
    """Return the path, with the home folder as ~."""
    try:
        return str(Path("~") / path.absolute().relative_to(Path.home()))
    except ValueError:
        return str(path)


class _Bars:
    """Maker of a progress bar for each download."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __call__(self, archive: Archive) -> _Bar:
        return _Bar(self.console, archive.file)


class _Bar:
    """The progress bar of one download, for pooch."""

    def __init__(self, console: Console, name: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task: TaskID = self._progress.add_task(name, total=None)

    @property
    def total(self) -> int:
        return int(self._progress.tasks[0].total or 0)

    @total.setter
    def total(self, size: int) -> None:
        self._progress.start()
        self._progress.update(self._task, total=size or None)

    def update(self, n: int, /) -> None:
        self._progress.advance(self._task, n)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop()
