"""Stacked experts: files store `experts.<i>.gate_proj` one by one, models keep all in one `experts.gate_up_proj`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from anyfp8.replace import ModuleTree, Slot

#: leaf of the per-expert module → (stacked parameter, which part of its rows, of how many)
_PARTS = {
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
    "down_proj": ("down_proj", 0, 1),
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
}
_EXPERT = re.compile(rf"(?P<head>(?:.*\.)?experts)\.(?P<index>[0-9]{{1,9}})\.(?P<leaf>{'|'.join(_PARTS)})\.weight")


@dataclass(eq=False)
class Expert:
    """A place in a stacked parameter [experts, parts × rows, columns]: which expert, which part of its rows."""

    slot: Slot
    index: int
    part: int
    parts: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Does a weight [rows, columns] of this shape belong there?"""
        stacked = self.slot.shape
        return len(stacked) == 3 and self.index < stacked[0] and (shape[0] * self.parts, *shape[1:]) == stacked[1:]


def stacked_place(name: str) -> tuple[str, int, int, int] | None:
    """Where a per-expert weight of this name goes: the stacked parameter's name, expert, part of its rows, of how many.

    >>> stacked_place("mlp.experts.3.up_proj.weight")
    ('mlp.experts.gate_up_proj', 3, 1, 2)
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    stacked, part, parts = _PARTS[match["leaf"]]
    return f"{match['head']}.{stacked}", int(match["index"]), part, parts


def find_expert(tree: ModuleTree, name: str) -> Expert | None:
    """The place of a per-expert weight in the model's stacked parameter, if it has one."""
    place = stacked_place(name)
    slot = None if place is None else tree.find(place[0])
    return None if place is None or slot is None else Expert(slot, *place[1:])
