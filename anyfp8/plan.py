"""`Plan`: where the file's world and the model's world meet. Pure: the model is looked at, never touched."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from anyfp8.checkpoint import TensorRef
from anyfp8.errors import LoadError, Problem
from anyfp8.folding import fold
from anyfp8.layers import FP8Layer, replacement
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.naming import Rename, find_prefix, renamer
from anyfp8.replace import ModuleTree, Slot
from anyfp8.scheme import QuantizationScheme


@dataclass(frozen=True)
class Replace:
    """Swap the layer that owns `slot` for an FP8 layer with the codes of `spec`."""

    slot: Slot
    spec: LayerSpec
    layer: type[FP8Layer]
    reason: str = ""


@dataclass(frozen=True)
class Parametrize:
    """Keep the codes of `spec` behind the parameter in `slot`; its module's input is not quantized."""

    slot: Slot
    spec: LayerSpec
    reason: str


@dataclass(frozen=True)
class Dequantize:
    """Decode `spec` once into the ordinary parameter in `slot`."""

    slot: Slot
    spec: LayerSpec
    reason: str


@dataclass(frozen=True)
class Assign:
    """Take a plain tensor as it is into `slots` (several, if the model ties them)."""

    slots: tuple[Slot, ...]
    ref: TensorRef


@dataclass(frozen=True)
class Skip:
    """Leave a tensor of the file unused, for a reason."""

    name: str
    reason: str


Step = Replace | Parametrize | Dequantize | Assign | Skip


@dataclass(frozen=True)
class Plan:
    """All that `load` decides. `steps` if it can be done; `problems` if not (then `raise_problems` raises)."""

    manifest: Manifest
    steps: tuple[Step, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    tree: ModuleTree = field(repr=False)
    hint: str = ""

    @property
    def layer_config(self) -> dict[str, QuantizationScheme]:
        """Model path → scheme, of the layers that will be FP8."""
        return {s.slot.name.rpartition(".")[0]: s.spec.scheme for s in self.of(Replace)}

    def of(self, kind: type[Any]) -> Iterator[Any]:
        """The steps of one kind."""
        return (step for step in self.steps if isinstance(step, kind))

    def raise_problems(self) -> None:
        """Raise LoadError with every problem, if there is any."""
        if self.problems:
            raise LoadError(self.problems, self.manifest.checkpoint.name, self.hint)

    def __str__(self) -> str:
        lines = [f"{self.manifest.checkpoint.name} ({self.manifest.dialect}):"]
        for kind in (Replace, Parametrize, Dequantize):
            groups: dict[str, list[str]] = {}
            for step in self.of(kind):
                groups.setdefault(f"{step.spec.scheme}" + step.reason and f" ({step.reason})", []).append(
                    step.slot.name
                )
            lines += [f"  {kind.__name__} {', '.join(fold(names))}{why}" for why, names in groups.items()]
        lines.append(f"  Assign {sum(1 for _ in self.of(Assign))} plain tensors")
        lines += [f"  Skip {step.name}: {step.reason}" for step in self.of(Skip)]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  problem ({p.kind}): {p.name}: {p.detail}" for p in self.problems]
        return "\n".join(lines)


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


def patterns(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """include or exclude as a tuple of patterns; one pattern may be given alone."""
    return value if value is None else (value,) if isinstance(value, str) else tuple(value)


def selected(name: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Is a module path taken by these fnmatch patterns? None includes all, excludes nothing."""
    taken = include is None or any(fnmatch.fnmatchcase(name, p) for p in include)
    return taken and not any(fnmatch.fnmatchcase(name, p) for p in exclude or ())


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
        #: id(slot) → the file's name of what goes there
        self.filled: dict[int, str] = {}
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
        self._tied()
        self._missing()
        self._meta()
        return Plan(self.manifest, tuple(self.steps), tuple(self.problems), tuple(self.notes), self.tree, self.hint)

    # --- names ---
    def _needs(self) -> Mapping[str, tuple[int, ...]]:
        """The tensor names that must have a place in the model, with their shapes."""
        layers = {_weight_name(spec.name): spec.shape for spec in self.manifest.layers.values()}
        return layers | {name: ref.shape for name, ref in self.manifest.plain.items()}

    def _slot(self, name: str) -> Slot | None:
        return self.tree.find(self.prefix(self.rename(name)))

    def _take(self, slot: Slot, name: str) -> bool:
        """Reserve a slot; False (and maybe a problem) if another tensor of the file has it already."""
        first = self.filled.setdefault(id(slot), name)
        if first == name:
            return True
        tensors = self.manifest.checkpoint.tensors
        if not _same(tensors[first], tensors[name]):
            detail = f"{first} and {name} both belong to it and differ"
            self.problems.append(Problem("ambiguous", slot.name, detail))
        else:
            self.steps.append(Skip(name, f"the same bytes as {first}, which goes to the same place"))
        return False

    # --- steps ---
    def _layer(self, spec: LayerSpec) -> None:
        name = _weight_name(spec.name)
        slot = self._slot(name)
        if slot is None:
            self._unexpected(name)
            return
        if tuple(slot.tensor.shape) != spec.shape:
            self._mismatched(spec.weight, slot)
            self.filled.setdefault(id(slot), name)
            return
        if self._take(slot, name):
            self._place(slot, spec)

    def _place(self, slot: Slot, spec: LayerSpec, why: str = "") -> None:
        module = slot.name.rpartition(".")[0]
        if not selected(module, self.include, self.exclude):
            self.steps.append(Dequantize(slot, spec, "left out by include/exclude"))
            return
        layer, reason = (
            replacement(slot.owner) if slot.leaf == "weight" else (None, f"{slot.leaf} is no layer's weight")
        )
        if layer is None:
            self.steps.append(Parametrize(slot, replace(spec, scheme=weight_only(spec.scheme)), reason))
            if not spec.scheme.weight_only:
                self.notes.append(f"{module}: the input is not quantized ({reason})")
            return
        parents = self.tree.parents.get(id(slot.owner), [])
        if any(isinstance(parent, nn.MultiheadAttention) for parent, _ in parents) and not spec.scheme.weight_only:
            self.notes.append(f"{module}: nn.MultiheadAttention reads the weight, so the input is not quantized")
        if issubclass(layer, nn.Embedding) and not spec.scheme.weight_only:
            spec, why = replace(spec, scheme=weight_only(spec.scheme), input_scale=None), "indices are not quantized"
        self.steps.append(Replace(slot, spec, layer, why))

    def _plain(self, name: str, ref: TensorRef) -> None:
        slot = self._slot(name)
        if slot is None:
            self._unexpected(name)
            return
        if tuple(slot.tensor.shape) != ref.shape or not _kinds_agree(ref, slot):
            self._mismatched(ref, slot)
            self.filled.setdefault(id(slot), name)
        elif self._take(slot, name):
            self.steps.append(Assign((slot,), ref))

    def _leftovers(self) -> None:
        """Exceptions and unclaimed tensors; one that the model has under that name is a plain tensor after all."""
        for table, unclaimed in ((self.manifest.exceptions, False), (self.manifest.unclaimed, True)):
            for name, reason in table.items():
                ref = self.manifest.checkpoint.tensors[name]
                slot = self._slot(name)
                if slot is not None and not ref.is_fp8 and tuple(slot.tensor.shape) == ref.shape:
                    self._plain(name, ref)
                elif unclaimed and (self.strict or ref.is_fp8):
                    self.problems.append(Problem("unclaimed", name, reason, ref.file))
                    if slot is not None:
                        self.filled.setdefault(id(slot), name)
                else:
                    self.steps.append(Skip(name, reason))

    def _tied(self) -> None:
        """Tensors that the model ties: one in the file serves all; two that differ can't both be right."""
        for group in self.tree.tied():
            if len(group) == 1:
                continue
            steps = {id(s): step for step in self.steps if not isinstance(step, Skip) for s in _slots(step)}
            assigned = [s for s in group if isinstance(steps.get(id(s)), Assign)]
            quantized = [s for s in group if isinstance(steps.get(id(s)), (Replace, Parametrize, Dequantize))]
            empty = [s for s in group if id(s) not in self.filled]
            if assigned:
                self._assign_tied(assigned, empty, steps)
            elif quantized and empty:
                step = steps[id(quantized[0])]
                assert isinstance(step, (Replace, Parametrize, Dequantize))
                shared = replace(step.spec, scheme=weight_only(step.spec.scheme), input_scale=None)
                for slot in empty:
                    self.filled[id(slot)] = _weight_name(shared.name)
                    self._place(slot, shared, f"tied to {quantized[0].name}")

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
        self.filled |= {id(slot): first.ref.name for slot in empty}

    # --- problems ---
    def _unexpected(self, name: str) -> None:
        ref = self.manifest.checkpoint.tensors[name]
        if self.strict:
            self.problems.append(Problem("unexpected", name, file=ref.file))
            if not self.hint:
                close = difflib.get_close_matches(self.prefix(self.rename(name)), self.tree.slots, 1)
                self.hint = f"Closest name in the model to {name}: {close[0]}" if close else ""
        else:
            self.steps.append(Skip(name, "not in the model (strict=False)"))

    def _mismatched(self, ref: TensorRef, slot: Slot) -> None:
        kind = str(slot.tensor.dtype).removeprefix("torch.")
        detail = f"{ref.dtype} {list(ref.shape)}, but {slot.name} of the model is {kind} {list(slot.tensor.shape)}"
        self.problems.append(Problem("mismatched", ref.name, detail, ref.file))

    def _missing(self) -> None:
        # a tensor that the file has but that can't be used has a problem of its own already
        stored = {id(slot) for name in self.manifest.checkpoint.tensors if (slot := self._slot(name))}
        broken = {problem.name for problem in self.manifest.problems}
        for slot in self.tree.unique_slots():
            if id(slot) in self.filled or id(slot) in stored or slot.name in broken:
                continue
            if slot.leaf == "num_batches_tracked":  # counts training steps; never read in inference
                if slot.tensor.is_meta:
                    self.steps.append(Assign((slot,), _zero_count(slot)))
                continue
            if self.strict or slot.tensor.is_meta:
                kind = "meta" if not self.strict else "missing"
                self.problems.append(Problem(kind, slot.name))

    def _meta(self) -> None:
        for name, (owner, _) in self.tree.meta_buffers.items():
            if not callable(getattr(owner, "init_non_persistent_buffers", None)):
                detail = (
                    "a non-persistent buffer, which no checkpoint holds; build the model on a real device, or give "
                )
                detail += f"{type(owner).__name__} a method init_non_persistent_buffers()"
                self.problems.append(Problem("meta", name, detail))


def _slots(step: Step) -> tuple[Slot, ...]:
    return step.slots if isinstance(step, Assign) else () if isinstance(step, Skip) else (step.slot,)


def _weight_name(module: str) -> str:
    return f"{module}.weight" if module else "weight"


def weight_only(scheme: QuantizationScheme) -> QuantizationScheme:
    """The same weight, with the input left alone."""
    return replace(scheme, act_dtype=None, act_dynamic=False, act_tile=(-1, -1))


def _kinds_agree(ref: TensorRef, slot: Slot) -> bool:
    if slot.fp8 is not None:
        return ref.torch_dtype.is_floating_point
    return ref.torch_dtype.is_floating_point == slot.tensor.is_floating_point()


def _zero_count(slot: Slot) -> TensorRef:
    return TensorRef(slot.name, "nothing", "I64", (), torch.zeros((), dtype=torch.int64))


def _same(a: TensorRef, b: TensorRef) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = a.read().contiguous(), b.read().contiguous()
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
