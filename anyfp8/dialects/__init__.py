"""The dialects: one file each, tried in the order of `names()`, imported when a checkpoint is first read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

from anyfp8.checkpoint import Checkpoint
from anyfp8.errors import AnyFP8Error, DialectError
from anyfp8.manifest import Manifest


class Dialect(Protocol):
    """One producer's way of writing FP8 checkpoints: a module with these two functions."""

    def match(self, checkpoint: Checkpoint) -> str | None:
        """The evidence that the checkpoint is in this dialect, in words, or None."""

    def read(self, checkpoint: Checkpoint, evidence: str) -> Manifest:
        """The complete reading; raises DialectError if the config itself can't be understood."""


#: name → the dialect, or the module of this package that is it; in order of precedence
_REGISTRY: dict[str, Dialect | str] = {
    "anyfp8": "anyfp8_json",
    "compressed-tensors": "compressed_tensors",
    "auto-round": "auto_round",
    "transformers-fp8": "transformers_fp8",
    "quark": "quark",
    "neural-compressor": "neural_compressor",
    "modelopt": "modelopt",
    "quanto": "quanto",
    "bare": "bare",
    "comfy": "comfy",
    "bfl": "bfl",
    "torchao": "torchao",
}


def names() -> list[str]:
    """All dialects, in order of precedence."""
    return list(_REGISTRY)


def get(name: str) -> Dialect:
    """The dialect of that name; raises DialectError if there is none."""
    if name not in _REGISTRY:
        raise DialectError(f"unknown dialect {name!r}; known: {', '.join(_REGISTRY)}")
    entry = _REGISTRY[name]
    return cast(Dialect, import_module(f"{__name__}.{entry}")) if isinstance(entry, str) else entry


def register_dialect(name: str, dialect: Dialect) -> None:
    """Add a dialect (an object or module with `match` and `read`); a name that is taken is a ValueError."""
    if name in _REGISTRY:
        raise ValueError(f"dialect {name!r} is already registered")
    _REGISTRY[name] = dialect


def read(checkpoint: Checkpoint, dialect: str | None = None) -> Manifest:
    """Read a checkpoint in the named dialect, or in the one that recognises it.

    Raises DialectError, with the evidence that each found, if none or more than one does.
    """
    if dialect is not None:
        chosen = get(dialect)
        return _read(dialect, chosen, checkpoint, chosen.match(checkpoint) or "named by the caller")
    found = {name: evidence for name in names() if (evidence := get(name).match(checkpoint))}
    if len(found) > 1:
        claims = "; ".join(f"{name}: {evidence}" for name, evidence in found.items())
        raise DialectError(f"{checkpoint.name} is claimed by {len(found)} dialects ({claims}). Pass dialect=...")
    if found:
        ((name, evidence),) = found.items()
        return _read(name, get(name), checkpoint, evidence)
    from anyfp8.dialects import plain

    return plain.read(checkpoint, names())


def _read(name: str, dialect: Dialect, checkpoint: Checkpoint, evidence: str) -> Manifest:
    where = f"{checkpoint.name}: its {name} config ({evidence})"
    with _foreign(where):
        manifest = dialect.read(checkpoint, evidence)
    if (expects := manifest.expects) is None:
        return manifest

    def guarded(module: str, classes: tuple[str, ...]) -> bool:
        with _foreign(where):
            return expects(module, classes)

    return replace(manifest, expects=guarded)


@contextmanager
def _foreign(where: str) -> Iterator[None]:
    """A list where a dict belongs, a word where a number does ...: foreign JSON is checked by using it."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, re.error) as error:
        if isinstance(error, AnyFP8Error):
            raise
        raise DialectError(f"{where} is malformed: {error!r}") from error
