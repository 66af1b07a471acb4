"""How names of a file become names of a model: renaming on request, and one prefix that differs throughout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anyfp8.errors import AnyFP8Error
from anyfp8.experts import find_expert, unstacked
from anyfp8.folding import join
from anyfp8.replace import ModuleTree, Slot
from anyfp8.sources import Codes

Rename = Mapping[str, str] | Callable[[str], str]


def renamer(rename: Rename | None) -> Callable[[str], str]:
    """A function on tensor names that applies `rename` to their module path.

    rename: an ordered mapping regex → replacement (all are applied, with re.sub), or a function on module paths.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        on_path = rename
    else:
        try:
            rules = [(re.compile(pattern), replacement) for pattern, replacement in rename.items()]
        except re.error as error:
            raise AnyFP8Error(f"rename: {error.pattern!r} is not a regular expression ({error})") from None

        def on_path(path: str) -> str:
            for pattern, replacement in rules:
                try:
                    path = pattern.sub(replacement, path)
                except (re.error, IndexError) as error:
                    raise AnyFP8Error(f"rename: {pattern.pattern!r} → {replacement!r}: {error}") from None
            return path

    def on_name(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        return join(on_path(path), leaf)

    return on_name


@dataclass(eq=False)
class Need:
    """What a tensor of the file needs of the model: a place of this shape (or none, if optional).

    codes: of a quantized weight, whose shape may be padded.
    """

    shape: tuple[int, ...]
    codes: Codes | None = None
    optional: bool = False

    def places(self, tree: ModuleTree, name: str) -> list[Slot]:
        """Where the model has room for it under this name: a slot, or a row of a stack of experts."""
        slot = tree.find(name)
        if slot is not None:
            return [slot] if (self.codes.fits(slot.codes_shape) if self.codes else self.shape == slot.shape) else []
        found = find_expert(tree, name)
        if found is not None and found.fits(self.shape):
            return [found.slot]
        return [place.slot for place in unstacked(tree, name, self.shape)]


@dataclass(eq=False)
class Prefix:
    """A prefix to take off the file's names, or to put before them; a function on names."""

    strip: str = ""
    add: str = ""
    note: str = ""

    def __call__(self, name: str) -> str:
        """The name in the model's terms."""
        if self.strip and name.startswith(self.strip):
            name = name[len(self.strip) :]
        return self.add + name


def find_prefix(tree: ModuleTree, needs: Mapping[str, Need], rename: Callable[[str], str]) -> Prefix:
    """The prefix by which the file's names differ from the model's, if exactly one makes the match complete.

    needs: tensor name in the file → what it needs. Complete: every one has a place of its shape, and every place is
    filled. Where the names match as they are, or no prefix or more than one would do, the empty prefix.
    """
    names = {rename(name): need for name, need in needs.items()}
    required = [name for name, need in names.items() if not need.optional]
    if not required or _complete(tree, names, Prefix()):
        return Prefix()
    probe = max(required, key=lambda name: (name.count("."), len(name)))
    longest = max(map(len, tree.slots), default=0)  # no name of the model, wrappers included, is a much longer rest
    dots = [i for i, char in enumerate(probe) if char == "." and len(probe) - i - 1 <= 2 * longest + 64]
    candidates = [Prefix(strip=probe[: i + 1]) for i in dots if tree.find(probe[i + 1 :])]
    candidates += [Prefix(add=name[: -len(probe)]) for name in tree.slots if name.endswith("." + probe)]
    complete = [p for p in candidates if _complete(tree, names, p)]
    if len(complete) != 1:
        return Prefix()
    (found,) = complete
    if found.strip:
        note = f"the checkpoint's names all begin with {found.strip!r}, the model's don't: it was taken off"
    else:
        note = f"the model's names all begin with {found.add!r}, the checkpoint's don't: it was put before them"
    return Prefix(found.strip, found.add, note)


def _complete(tree: ModuleTree, names: Mapping[str, Need], prefix: Prefix) -> bool:
    if prefix.strip and not all(need.optional or name.startswith(prefix.strip) for name, need in names.items()):
        return False
    filled: set[int] = set()
    for name, need in names.items():
        slots = need.places(tree, prefix(name))
        if not slots:
            if need.optional:
                continue
            return False
        filled |= {id(slot.tensor) for slot in slots}
    return all(id(s.tensor) in filled or s.leaf == "num_batches_tracked" for s in tree.unique_slots())
