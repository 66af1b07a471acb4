"""Carries a plan out. What can fail on content has failed before; what is new is made first, then put in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8.buffers import refill
from anyfp8.checkpoint import TensorRef
from anyfp8.errors import BackendError
from anyfp8.layers import FP8Layer, Part, parametrize_codes, unparametrize
from anyfp8.manifest import LayerSpec
from anyfp8.plan import Assign, Dequantize, Parametrize, Plan, Replace, Stack
from anyfp8.replace import Slot, swap
from anyfp8.sources import Codes, plain_values


def apply_plan(
    plan: Plan, *, backend: str, dtype: torch.dtype | None, device: torch.device | None, progress: bool | None
) -> nn.Module:
    """Carry out a plan without problems; returns the root, which is new only if it was swapped itself.

    Raises BackendError if the backend can't run some layer, LoadError if a buffer that no file holds can't be computed;
    the model is then as it was.
    """
    applier = _Applier(plan, dtype, device)
    with _bar(plan, progress) as advance, torch.no_grad():
        undo = refill(plan.tree, device)
        try:
            applier.build_layers(backend)
        except BaseException:
            undo()
            raise
        root = applier.commit(advance)
    left = [name for name, tensor in (*root.named_parameters(), *root.named_buffers()) if tensor.is_meta]
    assert not left, f"{left} are still on the meta device: a bug of anyfp8, please report it"
    return root


class _Applier:
    def __init__(self, plan: Plan, dtype: torch.dtype | None, device: torch.device | None) -> None:
        self.plan, self.dtype, self.device = plan, dtype, device
        #: old module → the one that takes its place
        self.twins: dict[nn.Module, nn.Module] = {}

    # --- before the first change ---
    def build_layers(self, backend: str) -> None:
        """Make the FP8 layers, and the float layers where an FP8 one gets float weights."""
        refusals: dict[str, str] = {}
        shared: dict[Codes, dict[str, Tensor]] = {}  # tied layers share their bytes
        for step in self.plan.of(Replace):
            spec: LayerSpec = step.spec
            values = self._read(spec, step.slot)
            values |= {name: value for name, value in shared.get(spec.codes, {}).items() if name in values}
            shared.setdefault(spec.codes, values)
            layer = step.layer.from_codes(step.slot.owner, spec.scheme, values, dtype=self.dtype)
            # rows of an embedding are looked up, whatever the backend
            chosen, why = layer.candidate("auto" if isinstance(layer, nn.Embedding) else backend)
            if chosen is None:
                refusals[step.slot.name.rpartition(".")[0]] = why[backend]
            else:
                layer.backend, layer.refusals = chosen, why
                self.twins[step.slot.owner] = layer
        if refusals:
            raise BackendError(f"backend {backend!r} can't run {len(refusals)} of the layers:", refusals)
        for kind in (Assign, Dequantize):
            for slot in (slot for step in self.plan.of(kind) for slot in step.slots):
                if isinstance(slot.fp8, FP8Layer):
                    empty = torch.empty(slot.shape, dtype=self._dtype(slot), device="meta")
                    self.twins[slot.fp8] = slot.fp8.to_float(empty)

    # --- the change ---
    def commit(self, advance: Callable[[int], Any]) -> nn.Module:
        """Put everything in place."""
        root = swap(self.plan.tree, self.twins)
        advance(sum(step.spec.nbytes for step in self.plan.of(Replace)))
        for step in self.plan.of(Assign):
            self._assign(step.slots, plain_values(step.ref))
            advance(step.ref.nbytes)
        for step in self.plan.of(Dequantize):
            value = step.spec.decoded(self._dtype(step.slot))
            self._assign(step.slots, value.t() if step.slot.transposed else value)
            advance(step.spec.nbytes)
        for step in self.plan.of(Parametrize):
            slot = step.slot
            part = (step.spec.scheme, self._read(step.spec, slot))
            parametrize_codes(slot.owner, slot.leaf, [part], self._dtype(slot))
            advance(step.spec.nbytes)
        for step in self.plan.of(Stack):
            self._stack(step)
            advance(sum(piece.nbytes for piece in step.pieces))
        if self.device is not None:
            root.to(self.device)  # what the checkpoint doesn't hold: non-persistent buffers
        return root

    def _stack(self, step: Stack) -> None:
        slot = step.slot
        specs = [[piece for piece in part if isinstance(piece, LayerSpec)] for part in step.parts]
        if step.decode or not specs[0]:
            float_parts = [torch.stack([self._float(piece, slot) for piece in part]) for part in step.parts]
            self._assign((slot,), torch.cat(float_parts, 1))
            return
        parts: list[Part] = []
        for part in specs:
            read = [self._read(spec.weight_only(), slot) for spec in part]
            values = {name: torch.stack([one[name] for one in read]) for name in read[0]}
            scheme = part[0].scheme.weight_only_twin()
            parts.append((replace(scheme, tile=(1, *scheme.tile)), values))
        parametrize_codes(slot.owner, slot.leaf, parts, self._dtype(slot), dim=1)

    def _float(self, piece: LayerSpec | TensorRef, slot: Slot) -> Tensor:
        value = plain_values(piece) if isinstance(piece, TensorRef) else piece.decoded(self._dtype(slot))
        return value.to(self._target(slot), self._dtype(slot))

    def _read(self, spec: LayerSpec, slot: Slot) -> dict[str, Tensor]:
        where = self._target(slot)
        return {name: value.to(where) for name, value in spec.read().items()}

    def _target(self, slot: Slot) -> torch.device:
        return self.device or (torch.device("cpu") if slot.tensor.is_meta else slot.tensor.device)

    def _dtype(self, slot: Slot) -> torch.dtype:
        if slot.fp8 is not None:
            return self.dtype or slot.fp8.compute_dtype
        return self.dtype if self.dtype is not None and slot.tensor.is_floating_point() else slot.tensor.dtype

    def _assign(self, slots: tuple[Slot, ...], value: Tensor) -> None:
        """Put a tensor into its slots: copied into real memory, the tensor itself where the model is on meta."""
        old, kind, where = slots[0].tensor, self._dtype(slots[0]), self._target(slots[0])
        fixed = old.is_meta or slots[0].fp8 is not None or old.is_inference() or _overlaps(old)
        if not fixed and (old.dtype, old.device) == (kind, where):
            old.copy_(value)
            return
        new = value.to(device=where, dtype=kind)
        if not fixed and isinstance(old, nn.Parameter):
            for slot in slots:
                slot.tensor.data = new  # keeps the parameter's identity: ties, optimizers, hooks
            return
        parameter = nn.Parameter(new, requires_grad=isinstance(old, nn.Parameter) and old.requires_grad)
        for slot in slots:
            owner = self.twins.get(slot.owner, slot.owner)
            if slot.fp8 is not None and not isinstance(slot.fp8, FP8Layer):
                unparametrize(owner, slot.leaf, new)
            elif slot.is_buffer and slot.fp8 is None:
                owner._buffers[slot.leaf] = new
            else:
                owner._parameters[slot.leaf] = parameter


def _overlaps(tensor: Tensor) -> bool:
    """Expanded tensors: several elements are one place in memory, so they can't be copied into."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@contextmanager
def _bar(plan: Plan, progress: bool | None) -> Iterator[Callable[[int], Any]]:
    from tqdm.auto import tqdm

    off = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "TRUE", "YES", "ON")
    disable = None if progress is None else not progress
    if sys.stderr is None or (off and progress is None):
        disable = True
    total = sum(step.ref.nbytes for step in plan.of(Assign))
    total += sum(step.spec.nbytes for kind in (Replace, Dequantize, Parametrize) for step in plan.of(kind))
    total += sum(piece.nbytes for step in plan.of(Stack) for piece in step.pieces)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading FP8", disable=disable, leave=False) as bar:
        yield bar.update
