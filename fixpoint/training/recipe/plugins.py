"""Maps, solvers and models of a user's own: a file that registers them, or a class by its name."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from fixpoint._messages import unknown_name


def load_plugin(place: str) -> ModuleType:
    """Import a Python file or a module, once.

    What it defines it adds to `fixpoint.SOLVERS`, `fixpoint.models.MAPS` or
    `fixpoint.training.LAYERS`.

    Raises:
        ValueError: there is no such file or module, or it raises an error.
    """
    try:
        if not place.endswith(".py"):
            return import_module(place)
        name = f"fixpoint_plugin_{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        if name in sys.modules:
            return sys.modules[name]
        return _load_file(name, Path(place).expanduser())
    except Exception as error:
        raise ValueError(
            f"the plugin {place} cannot be imported ({type(error).__name__}: {error}): give the "
            "path of a .py file, or the name of a module"
        ) from error


def _load_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def plugin_content(places: tuple[str, ...]) -> str:
    """Return a digest of the files among the plugins, which decide the outcome of a run too."""
    paths = [Path(place).expanduser() for place in places if place.endswith(".py")]
    found = [path.read_bytes() for path in paths if path.is_file()]
    return hashlib.sha256(b"\0".join(found)).hexdigest() if found else ""


def named(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return the entry of that name, or the class that "package.module:Class" names.

    Raises:
        ValueError: there is none.

    Example:
        >>> from fixpoint.training.recipe.plugins import named
        >>> named("solver", "fixpoint.solvers:Picard", {}).__name__
        'Picard'
    """
    if name in known:
        return known[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(unknown_name(kind, name, known, other='"package.module:Class"'))
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"the {kind} {name!r} cannot be imported: {error}") from None
