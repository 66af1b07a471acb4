"""Where the file's world and the model's world meet. Pure: the model is looked at, never touched."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from anyfp8.buffers import refillable
from anyfp8.checkpoint import TensorRef
from anyfp8.errors import Problem
from anyfp8.experts import Expert, find_expert, one_expert, unstacked
from anyfp8.folding import fold
from anyfp8.layers import forward_replaced, replacement
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.naming import Need, Rename, find_prefix, renamer
from anyfp8.plan import Assign, Dequantize, Parametrize, Plan, Replace, Skip, Stack, Step
from anyfp8.reads import attributes_used, weight_readers
from anyfp8.replace import HOOKED, ModuleTree, Slot
from anyfp8.selection import patterns, selected


def build_plan(
    model: nn.Module,
    manifest: Manifest,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
) -> Plan:
    """Match a manifest against a model. Nothing is raised for content: see `Plan.problems`."""
    return _Planner(model, manifest, patterns(include), patterns(exclude), rename, strict).build()


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        manifest: Manifest,
        include: tuple[str, ...] | None,
        exclude: tuple[str, ...] | None,
        rename: Rename | None,
        strict: bool,
    ) -> None:
        self.manifest, self.strict = manifest, strict
        self.include, self.exclude = include, exclude
        self.tree = ModuleTree(model)
        self.steps: list[Step] = []
        self.problems: list[Problem] = list(manifest.problems)
        self.notes: list[str] = list(manifest.notes)
        #: id(slot) → what of the file goes there
        self.filled: dict[int, LayerSpec | TensorRef] = {}
        #: id(slot of a stacked parameter) → one of its places, and (part, expert) → what of the file goes there
        self.experts: dict[int, tuple[Expert, dict[tuple[int, int], LayerSpec | TensorRef]]] = {}
        self.hint = ""
        self.rename = renamer(rename)

    def build(self) -> Plan:
        self.prefix = find_prefix(self.tree, self._needs(), self.rename)
        if self.prefix.note:
            self.notes.append(self.prefix.note)
        for spec in self.manifest.layers.values():
            self._layer(spec)
        for name, ref in self.manifest.plain.items():
            self._plain(name, ref)
        self._leftovers()
        self._stack()
        if not self.filled and self.manifest.checkpoint.tensors and not self.problems:
            detail = "none of its tensors has a place in the model"
            self.problems.append(Problem("unexpected", self.manifest.checkpoint.name, detail))
        self._tied()
        self._disagreements()
        self._missing()
        self._uninitialised()
        return Plan(self.manifest, tuple(self.steps), tuple(self.problems), tuple(self.notes), self.tree, self.hint)

    # --- names ---
    def _needs(self) -> dict[str, Need]:
        """What the file's tensors need of the model, by name."""
        tensors = self.manifest.checkpoint.tensors
        needs = {spec.weight_name: Need(spec.shape, spec.codes) for spec in self.manifest.layers.values()}
        needs |= {name: Need(ref.shape) for name, ref in self.manifest.plain.items()}
        leftover = (*self.manifest.exceptions, *self.manifest.unclaimed)
        return needs | {name: Need(tensors[name].shape, optional=True) for name in leftover}

    @cached_property
    def readers(self) -> dict[nn.Module, str]:
        """See `weight_readers`."""
        return weight_readers(self.tree)

    def _slot(self, name: str) -> Slot | None:
        return self.tree.find(self.prefix(self.rename(name)))

    def _take(self, slot: Slot, owner: LayerSpec | TensorRef) -> bool:
        """Reserve a slot; False (and maybe a problem) if another tensor of the file has it already."""
        first = self.filled.setdefault(id(slot), owner)
        if first is owner:
            return True
        if not _agree(first, owner):
            detail = f"{_name(first)} and {_name(owner)} both belong to it and differ"
            self.problems.append(Problem("ambiguous", slot.name, detail))
        else:
            self.steps.append(Skip(_name(owner), f"the same as {_name(first)}, which goes to the same place"))
        return False

    # --- steps ---
    def _layer(self, spec: LayerSpec) -> None:
        slot = self._slot(spec.weight_name)
        if slot is None:
            if not self._expert(spec.weight_name, spec) and not self._unstack(spec):
                self._unexpected(spec.weight.name)
        elif not spec.codes.fits(slot.codes_shape):
            self._mismatched(spec.weight, slot, spec.shape)
        elif self._take(slot, spec):
            self._place(slot, spec.cropped(slot.codes_shape))

    def _place(self, slot: Slot, spec: LayerSpec, why: str = "") -> None:
        """Decide how the codes of `spec` live in `slot`."""
        modules = [name.rpartition(".")[0] for name in slot.names]
        if spec.by_class:
            classes = {t.__name__ for t in type(slot.owner).__mro__}
            chosen = next((found for name, found in spec.by_class if name in classes), None)
            if chosen is None:
                detail = f"no config group targets its class {type(slot.owner).__name__}"
                self.problems.append(Problem("unsupported", slot.name, detail))
                return
            spec = chosen
        if self._hooked(slot):
            return
        if not selected(modules, self.include, self.exclude):
            self.steps.append(Dequantize((slot,), spec, "left out by include/exclude"))
            return
        layer, reason = None, f"{slot.leaf} is no layer's weight"
        if slot.leaf == "weight":
            layer, reason = replacement(slot.owner)
        if layer is None and slot.transposed:
            self.problems.append(Problem("unsupported", slot.name, reason))
            return
        if layer is None:
            self.steps.append(Parametrize(slot, spec.weight_only(), reason))
            if lost := _activations(spec):
                self.notes.append(f"{modules[0]}: {lost} not quantized ({reason})")
            return
        if (lost := _activations(spec)) and (reader := self.readers.get(slot.owner)):
            self.notes.append(f"{modules[0]}: {lost} not quantized: {reader}")
            why = reader
        if issubclass(layer, nn.Embedding) and not spec.scheme.weight_only:
            spec, why = spec.without_input(), "indices are not quantized"
        self.steps.append(Replace(slot, spec, layer, why))

    def _plain(self, name: str, ref: TensorRef) -> None:
        slot = self._slot(name)
        if slot is None:
            if not self._expert(name, ref):
                self._unexpected(name)
        elif slot.shape != ref.shape or not _kinds_agree(ref, slot):
            self._mismatched(ref, slot)
        elif self._take(slot, ref) and not self._hooked(slot):
            self.steps.append(Assign((slot,), ref))

    def _hooked(self, slot: Slot) -> bool:
        """A layer that would be swapped although something is bound to the old one: a problem."""
        if slot.fp8 is None or not forward_replaced(slot.owner):
            return False
        self.problems.append(Problem("unsupported", slot.name, HOOKED))
        return True

    def _expert(self, name: str, piece: LayerSpec | TensorRef) -> bool:
        """Note a tensor that is one expert of a stacked parameter; False if it is none."""
        place = find_expert(self.tree, self.prefix(self.rename(name)))
        if place is None:
            return False
        if not place.fits(piece.shape):
            self._mismatched(piece if isinstance(piece, TensorRef) else piece.weight, place.slot, piece.shape)
        else:
            whole = id(place.slot) in self.filled and id(place.slot) not in self.experts
            _, pieces = self.experts.setdefault(id(place.slot), (place, {}))
            if whole or pieces.setdefault((place.part, place.index), piece) is not piece:
                self.problems.append(Problem("ambiguous", name, "two tensors of the file are this expert's"))
        self.filled.setdefault(id(place.slot), piece)
        return True

    def _unstack(self, spec: LayerSpec) -> bool:
        """Give a stack of experts to a model that has them one by one; False if it is none, or the model has not."""
        places = unstacked(self.tree, self.prefix(self.rename(spec.weight_name)), spec.shape)
        for place in places:
            single = one_expert(spec, place)
            if single is None:
                detail = f"the model has its experts one by one, and a scale of {spec.scheme} reaches over several"
                self.problems.append(Problem("unsupported", spec.weight.name, detail, spec.weight.file))
                self.filled |= {id(each.slot): spec for each in places}  # not missing besides
                break
            if self._take(place.slot, single):
                self._place(place.slot, single)
        return bool(places)

    def _stack(self) -> None:
        for place, pieces in self.experts.values():
            slot, count = place.slot, place.slot.shape[0]
            wanted = [(part, index) for part in range(place.parts) for index in range(count)]
            if absent := [at for at in wanted if at not in pieces]:
                what = ", ".join(f"expert {index} part {part}" for part, index in absent[:5])
                self.problems.append(Problem("missing", slot.name, f"{len(absent)} of its experts ({what} ...)"))
                continue
            parts = tuple(tuple(pieces[part, index] for index in range(count)) for part in range(place.parts))
            quantized = [piece for piece in pieces.values() if isinstance(piece, LayerSpec)]
            if quantized and (
                len(quantized) < len(pieces) or any(len({_scheme(p) for p in part}) > 1 for part in parts)
            ):
                detail = "its experts are quantized in different ways, or only some of them"
                self.problems.append(Problem("unsupported", slot.name, detail))
                continue
            modules = [name.rpartition(".")[0] for name in slot.names]
            decode = not selected([*modules, *slot.names], self.include, self.exclude)
            self.steps.append(Stack(slot, parts, decode, f"{len(pieces)} experts of the file are one parameter here"))
            if quantized and not decode and not quantized[0].scheme.weight_only:
                self.notes.append(f"{slot.name}: stacked experts are decoded when used; their input is not quantized")

    def _leftovers(self) -> None:
        """Exceptions and unclaimed tensors; one that the model has under that name is a plain tensor after all."""
        for table, unclaimed in ((self.manifest.exceptions, False), (self.manifest.unclaimed, True)):
            for name, reason in table.items():
                ref = self.manifest.checkpoint.tensors[name]
                slot = self._slot(name)
                if slot is not None and not ref.is_fp8:
                    self._plain(name, ref)
                elif slot is not None or (unclaimed and (self.strict or ref.is_fp8)):
                    self.problems.append(Problem("unclaimed", name, reason, ref.file))
                else:
                    self.steps.append(Skip(name, reason))

    def _tied(self) -> None:
        """Tensors that the model ties: one in the file serves all; two that differ can't both be right."""
        steps = {id(slot): step for step in self.steps for slot in _slots(step)}  # no slot is in two groups
        for group in self.tree.tied():
            if len(group) == 1:
                continue
            assigned = [s for s in group if isinstance(steps.get(id(s)), Assign)]
            quantized = [s for s in group if isinstance(steps.get(id(s)), (Replace, Parametrize, Dequantize))]
            empty = [s for s in group if id(s) not in self.filled]
            if assigned:
                self._assign_tied(assigned, empty, steps)
            elif quantized and empty:
                self._share_codes(quantized[0], steps[id(quantized[0])], empty)

    def _assign_tied(self, assigned: list[Slot], empty: list[Slot], steps: Mapping[int, Step]) -> None:
        first = steps[id(assigned[0])]
        assert isinstance(first, Assign)
        for slot in assigned[1:]:
            other = steps[id(slot)]
            assert isinstance(other, Assign)
            self.steps.remove(other)
            if not _same(first.ref, other.ref):
                detail = f"the model ties it to {assigned[0].name}, but the file has different values for them"
                self.problems.append(Problem("ambiguous", slot.name, detail))
        self.steps[self.steps.index(first)] = Assign((*assigned, *empty), first.ref)
        self.filled |= {id(slot): first.ref for slot in empty}

    def _share_codes(self, owner: Slot, step: Step, empty: list[Slot]) -> None:
        assert isinstance(step, (Replace, Parametrize, Dequantize))
        self.filled |= {id(slot): step.spec for slot in empty}
        if isinstance(step, Dequantize):
            self.steps[self.steps.index(step)] = replace(step, slots=(*step.slots, *empty))
            return
        shared = step.spec.weight_only()
        for slot in empty:
            self._place(slot, shared, f"tied to {owner.name}")

    # --- problems ---
    def _unexpected(self, name: str) -> None:
        ref = self.manifest.checkpoint.tensors[name]
        if self.prefix(self.rename(name)) in self.tree.lazy:
            return  # a problem of its own: it has no shape yet
        if self.strict:
            self.problems.append(Problem("unexpected", name, file=ref.file))
            if not self.hint:
                sought = self.prefix(self.rename(name))
                close = difflib.get_close_matches(sought, self.tree.slots, 1)
                became = f"{name} was looked for as {sought}. " if sought != name else ""
                self.hint = became + (f"Closest name in the model to {sought}: {close[0]}" if close else "")
        else:
            self.steps.append(Skip(name, "not in the model (strict=False)"))

    def _mismatched(self, ref: TensorRef, slot: Slot, shape: tuple[int, ...] | None = None) -> None:
        kind = str(slot.tensor.dtype).removeprefix("torch.")
        detail = f"{ref.dtype} {list(shape or ref.shape)}, but {slot.name} of the model is {kind} {list(slot.shape)}"
        self.problems.append(Problem("mismatched", ref.name, detail, ref.file))

    def _disagreements(self) -> None:
        """Layers that the file's lists mean to be quantized, but that it stores in float: the tensors decide."""
        found = []
        for slot in (step.slots[0] for step in self.steps if isinstance(step, Assign)):
            module = self.filled[id(slot)].name.rpartition(".")[0]
            classes = tuple(t.__name__ for t in type(slot.owner).__mro__)
            if slot.leaf == "weight" and self.manifest.expects is not None and self.manifest.expects(module, classes):
                found.append(module)
        if found:
            names = ", ".join(fold(found))
            self.notes.append(f"targeted by the config, but stored in float: {names} (the tensors decide)")

    def _missing(self) -> None:
        # a tensor that the file has but that can't be used has a problem of its own already
        broken = {problem.name for problem in self.problems}
        modules = {name.rpartition(".")[0] for name in broken}
        names = [
            name.removesuffix("_packed")
            for name in self.manifest.checkpoint.tensors
            if not name.endswith("_packed") or name.rpartition(".")[0] in modules
        ]
        stored = {id(slot) for name in names if (slot := self._slot(name))}
        for slot in self.tree.unique_slots():
            if id(slot) in self.filled or id(slot) in stored or slot.name in broken:
                continue
            if slot.leaf == "num_batches_tracked":  # counts training steps; never read in inference
                if slot.tensor.is_meta:
                    self.steps.append(Assign((slot,), _zero_count(slot)))
                continue
            if self.strict or slot.tensor.is_meta:
                self.problems.append(Problem("missing" if self.strict else "meta", slot.name))
            else:
                self.steps.append(Skip(slot.name, "not in the checkpoint (strict=False): left as it was"))

    def _uninitialised(self) -> None:
        for name in self.tree.lazy:
            self.problems.append(Problem("unsupported", name, "has no shape yet: run the model once before loading"))
        lost = {name: (owner, "a non-persistent buffer") for name, (owner, _) in self.tree.meta_buffers.items()}
        if self.tree.meta_attributes:  # what only methods for training or conversion use may stay lost
            used = attributes_used(self.tree)
            self.tree.meta_attributes = {n: at for n, at in self.tree.meta_attributes.items() if at[1] in used}
        lost |= {name: (owner, "a tensor attribute on meta") for name, (owner, _) in self.tree.meta_attributes.items()}
        for name, (owner, what) in lost.items():
            if not refillable(self.tree, owner, name.rpartition(".")[0]):
                detail = f"{what}, which no checkpoint holds; build the model on a real device, or "
                detail += f"give {type(owner).__name__} a method init_non_persistent_buffers()"
                self.problems.append(Problem("meta", name, detail))


def _scheme(piece: LayerSpec | TensorRef) -> object:
    return piece.scheme if isinstance(piece, LayerSpec) else None


def _activations(spec: LayerSpec) -> str:
    """What a layer quantizes besides its weight, and the verb: "" if nothing."""
    if spec.scheme.out_dtype is None:
        return "" if spec.scheme.weight_only else "the input is"
    return "the output is" if spec.scheme.weight_only else "the input and the output are"


def _slots(step: Step) -> tuple[Slot, ...]:
    if isinstance(step, Skip):
        return ()
    return step.slots if isinstance(step, (Assign, Dequantize)) else (step.slot,)


def _name(owner: LayerSpec | TensorRef) -> str:
    return owner.name if isinstance(owner, TensorRef) else owner.weight_name


def _kinds_agree(ref: TensorRef, slot: Slot) -> bool:
    """May the stored dtype be converted to the model's? Between floats, or without loss; never across kinds."""
    stored = ref.torch_dtype
    if slot.fp8 is not None:
        return stored.is_floating_point
    wanted = slot.tensor.dtype
    if stored.is_floating_point or wanted.is_floating_point or stored == wanted:
        return stored.is_floating_point == wanted.is_floating_point
    if stored.is_complex or wanted.is_complex or torch.bool in (stored, wanted):
        return stored.is_complex and wanted.is_complex
    value, limits = ref.read(), torch.iinfo(wanted)
    if stored == torch.uint64 and bool((value.view(torch.int64) < 0).any()):
        return False  # beyond any other integer dtype
    value = value.view(torch.int64) if stored == torch.uint64 else value.to(torch.int64)
    return not value.numel() or limits.min <= int(value.min()) <= int(value.max()) <= limits.max


def _agree(a: LayerSpec | TensorRef, b: LayerSpec | TensorRef) -> bool:
    """Do two owners of one place say the same, with all that belongs to them?"""
    if isinstance(a, TensorRef) or isinstance(b, TensorRef):
        return isinstance(a, TensorRef) and isinstance(b, TensorRef) and _same(a, b)
    return a.scheme == b.scheme and len(a.refs) == len(b.refs) and all(map(_same, a.refs, b.refs))


def _same(a: TensorRef, b: TensorRef) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = a.read().contiguous(), b.read().contiguous()
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _zero_count(slot: Slot) -> TensorRef:
    return TensorRef(slot.name, "nothing", "I64", (), torch.zeros((), dtype=torch.int64))
