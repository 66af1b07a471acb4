"""The dialects: one file each, tried in the order of `DIALECTS` below."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from anyfp8.checkpoint import Checkpoint
from anyfp8.dialects import anyfp8_json, auto_round, compressed_tensors, plain
from anyfp8.errors import DialectError
from anyfp8.manifest import Manifest


class Dialect(Protocol):
    """One producer's way of writing FP8 checkpoints: a module with these two functions."""

    def match(self, checkpoint: Checkpoint) -> str | None:
        """The evidence that the checkpoint is in this dialect, in words, or None."""

    def read(self, checkpoint: Checkpoint, evidence: str) -> Manifest:
        """The complete reading; raises DialectError if the config itself can't be understood."""


_REGISTRY: dict[str, Dialect] = {
    "anyfp8": anyfp8_json,
    "compressed-tensors": compressed_tensors,
    "auto-round": auto_round,
}
#: name → dialect, in order of precedence
DIALECTS: Mapping[str, Dialect] = MappingProxyType(_REGISTRY)


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
        if dialect not in DIALECTS:
            raise DialectError(f"unknown dialect {dialect!r}; known: {', '.join(DIALECTS)}")
        chosen = DIALECTS[dialect]
        return chosen.read(checkpoint, chosen.match(checkpoint) or "named by the caller")
    found = {name: evidence for name, d in DIALECTS.items() if (evidence := d.match(checkpoint))}
    if len(found) > 1:
        claims = "; ".join(f"{name}: {evidence}" for name, evidence in found.items())
        raise DialectError(f"{checkpoint.name} is claimed by {len(found)} dialects ({claims}). Pass dialect=...")
    if found:
        ((name, evidence),) = found.items()
        return DIALECTS[name].read(checkpoint, evidence)
    return plain.read(checkpoint, list(DIALECTS))
