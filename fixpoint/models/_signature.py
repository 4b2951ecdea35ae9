"""Signatures that show the options which a constructor passes on to another one."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from fixpoint._messages import unknown_option


class _FullSignature:
    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # that of a call of the instance is another
        return full_signature(owner)


class OptionsMixin:
    """A class for which `help` and `inspect.signature` show every option by name.

    `**options` of a constructor stands for the keyword arguments of the next constructor in the
    method resolution order, and after the last one for those of its `cell_class`. An option that
    none of them has is answered by the name that it may stand for.
    """

    __signature__: Any = _FullSignature()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _answering(cls.__init__)  # type: ignore[method-assign]


_UNKNOWN = re.compile(r"(?:unexpected keyword argument|^unknown \w+ option) '(\w+)'")


def _answering(construct: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor, whose error for an unknown option lists the known ones."""

    @functools.wraps(construct)
    def answering(self: Any, *values: Any, **options: Any) -> None:
        try:
            construct(self, *values, **options)
        except TypeError as error:
            cls, found = type(self), _UNKNOWN.search(str(error))
            outermost = cls.__init__ is answering
            if not outermost or found is None or found[1] not in options:
                raise
            known = full_signature(cls).parameters
            raise TypeError(unknown_option(cls.__name__, found[1], known)) from None

    return answering


def full_signature(cls: type) -> inspect.Signature:
    """Return the parameters of a class with `**options` resolved."""
    found: dict[str, inspect.Parameter] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        own = list(inspect.signature(vars(owner)["__init__"]).parameters.values())[1:]
        _add(found, own, first=not found)
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    if cell := getattr(cls, "cell_class", None):
        _add(found, full_signature(cell).parameters.values(), first=False)
    return inspect.Signature(sorted(found.values(), key=lambda p: p.kind))


def _add(found: dict[str, inspect.Parameter], parameters: Any, *, first: bool) -> None:
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY or (first and p.kind is p.POSITIONAL_OR_KEYWORD):
            found.setdefault(p.name, p)
