"""Recipes as TOML files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tomli_w

import fixpoint
from fixpoint._messages import unknown_name
from fixpoint.training.recipe.schema import SECTION_OF, SECTIONS, Recipe, Windows, find_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE = "recipe.toml"
"""File of its recipe in the folder of a run."""


def recipe_folder() -> Path:
    """Return the folder of the recipes that come with the package: inside it, or beside it in a
    checkout.
    """
    package = Path(fixpoint.__file__).parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def known_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.toml"))}


def load_recipe(name: str) -> Recipe:
    """Return the recipe of that name, or in the TOML file of that path.

    Raises:
        ValueError: there is none, it is not valid TOML, or a key or value in it is wrong.
        TypeError: a value has the wrong type.

    Example:
        >>> from fixpoint.training import load_recipe
        >>> load_recipe("har2-ernn").model.hidden
        80
    """
    path = Path(name)
    if path.suffix != ".toml":
        known = known_recipes()
        if name not in known:
            raise ValueError(unknown_name("recipe", name, known, other="the path of a .toml file"))
        path = known[name]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the recipe {path} cannot be read ({error.strerror}): give the "
            "path of a .toml file, or the name of a recipe"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save the recipe as UTF-8") from None
    try:
        return read_recipe(text)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{path}: {error}") from None


def read_recipe(text: str) -> Recipe:
    """Return the recipe that a TOML text describes; keys that it lacks have their defaults.

    Raises:
        ValueError: it is not valid TOML, or a section, key or value in it is wrong.
        TypeError: a value has the wrong type.

    Example:
        >>> from fixpoint.training import read_recipe
        >>> read_recipe("[training]\\nlr = 0.005").training.lr
        0.005
    """
    try:
        content: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {error}") from None
    changes = {}
    if isinstance(content.get("data"), dict) and "windows" in content["data"]:
        content["windows"] = content["data"].pop("windows")
    for section, part in content.items():
        if section not in SECTIONS:
            if section in SECTION_OF:
                raise ValueError(f"{section} must stand below [{SECTION_OF[section]}]")
            raise ValueError(unknown_name("section", section, SECTIONS))
        if not isinstance(part, dict):
            raise TypeError(f"{section} must be a section, [{section}]; got {part!r}")
        changes.update({f"{section}.{name}": value for name, value in part.items()})
    return Recipe().changed(**changes)


def write_recipe(recipe: Recipe) -> str:
    """Return the recipe as TOML with every key but those that are None.

    Example:
        >>> from fixpoint.training import Recipe, read_recipe, write_recipe
        >>> recipe = Recipe().changed(lr=0.003)
        >>> read_recipe(write_recipe(recipe)) == recipe
        True
    """
    parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in recipe.flat.items():
        if value is not None:
            parts[find_key(name)[0]][name] = value
    windows = parts.pop("windows")
    if recipe.windows != Windows():
        parts["data"]["windows"] = windows
    return tomli_w.dumps(parts)


def parse_setting(text: str) -> tuple[str, Any]:
    """Return the key and value of KEY=VALUE, the value as in TOML; quotes may be left out, none
    unsets.

    Raises:
        ValueError: it has no "=", or the key is unknown.

    Example:
        >>> from fixpoint.training.recipe.toml import parse_setting
        >>> parse_setting("training.lr=0.005"), parse_setting("map=jordan")
        (('training.lr', 0.005), ('model.map', 'jordan'))
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes KEY=VALUE, as training.lr=0.005; got {text!r}")
    section, key = find_key(name.strip())
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = None if value.strip() == "none" else value.strip()
    return f"{section}.{key}", parsed
