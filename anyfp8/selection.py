"""include and exclude: fnmatch patterns on module paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence


def patterns(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """include or exclude as a tuple of patterns; one pattern may be given alone."""
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)


def selected(names: Iterable[str], include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Is a module (by any of its names) taken by these fnmatch patterns? None includes all, excludes nothing."""

    def hit(found: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in found)

    names = tuple(names)
    return (include is None or hit(include)) and not hit(exclude or ())
