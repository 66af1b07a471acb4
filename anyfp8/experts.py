"""Stacked experts: `experts.<i>.gate_proj` one by one, or all in one `experts.gate_up_proj`, in file or model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from anyfp8.manifest import LayerSpec
from anyfp8.replace import ModuleTree, Slot

#: stacked parameter → the modules whose rows it joins, in the two vocabularies of models that have experts one by one
STACKS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
#: leaf of the per-expert module → (stacked parameter, which part of its rows, of how many)
_PARTS = {
    leaf: (stacked, part, len(leaves))
    for stacked, vocabularies in STACKS.items()
    for leaves in vocabularies
    for part, leaf in enumerate(leaves)
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


def unstacked(tree: ModuleTree, name: str, shape: tuple[int, ...]) -> list[Expert]:
    """Where a model that has its experts one by one has the parts of a stacked weight of this name and shape; [] if not
    all of them."""
    head, _, leaf = name.rpartition(".")
    if head.rpartition(".")[2] != "experts" or len(shape) != 3:
        return []
    for parts in STACKS.get(leaf, ()):
        names = [(i, part, f"{head}.{i}.{one}.weight") for i in range(shape[0]) for part, one in enumerate(parts)]
        slots = [(i, part, tree.find(found)) for i, part, found in names]
        each = (shape[1] // len(parts), shape[2])
        places = [Expert(slot, i, part, len(parts)) for i, part, slot in slots if slot is not None]
        if len(places) == len(names) and shape[1] % len(parts) == 0 and all(p.slot.shape == each for p in places):
            return places
    return []


def one_expert(spec: LayerSpec, place: Expert) -> LayerSpec | None:
    """The part of a stack [experts, parts × rows, columns] that belongs to `place`, as a layer of its own; None where
    the tiles of the scale reach beyond it."""
    scheme, rows = spec.scheme, spec.shape[1] // place.parts
    tile = spec.shape[1] if scheme.tile[1] == -1 else scheme.tile[1]
    simple = (spec.codes.index, spec.codes.rows, spec.codes.crop, spec.scale.index, spec.scale.rows) == (None,) * 5
    if scheme.tile[0] != 1 or not scheme.weight_only or spec.extras or not simple or spec.scale.swizzled:
        return None
    if spec.codes.transposed or spec.scale.transposed or len(spec.scale.shape) != 3:
        return None
    whole = tile >= spec.shape[1]  # one row of scales serves all parts
    if not whole and rows % tile:
        return None
    first = place.part * rows
    codes = replace(spec.codes, index=place.index, rows=(first, first + rows))
    grid = None if whole else (first // tile, (first + rows) // tile)
    scale = replace(spec.scale, index=place.index, rows=grid)
    tiles = (-1 if whole else tile, *scheme.tile[2:])
    module = place.slot.name.rpartition(".")[0]
    return replace(spec, name=module, param="weight", scheme=replace(scheme, tile=tiles), codes=codes, scale=scale)
