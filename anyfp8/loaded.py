"""Changes to the FP8 layers of a model that is already loaded: another backend, or back to ordinary layers."""

from __future__ import annotations

import torch
from torch import nn

from anyfp8.backends import check_name
from anyfp8.errors import AnyFP8Error, BackendError
from anyfp8.folding import fold
from anyfp8.layers import FP8Layer, forward_replaced, unparametrize
from anyfp8.replace import HOOKED, ModuleTree, swap


def set_backend(model: nn.Module, name: str) -> None:
    """Choose again, for every FP8 layer of `model`, how it computes.

    name: "auto", "native", "emulated", "dequantized", or a registered one. Embeddings look rows up whatever it is.
    Raises BackendError with each layer's reason if one can't compute that way; then none has changed.
    """
    check_name(name)
    chosen, refusals = [], {}
    for path, module in model.named_modules():
        if isinstance(module, FP8Layer) and not isinstance(module, nn.Embedding):
            backend, why = module.candidate(name)
            if backend is None:
                refusals[path or type(module).__name__] = why[name]
            else:
                chosen.append((module, backend, why))
    if refusals:
        raise BackendError(f"backend {name!r} can't run {len(refusals)} of the layers:", refusals)
    for layer, backend, why in chosen:
        layer.backend, layer.refusals = backend, why


def dequantize(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Turn every FP8 layer of `model` back into the ordinary layer it replaced, in place; returns the model.

    dtype: of the decoded weights; default: each layer's compute dtype. One layer at a time is in both forms. Only if
    the root itself is an FP8 layer is the return value new.
    """
    tree = ModuleTree(model)
    quantized = [slot for slot in tree.unique_slots() if slot.fp8 is not None]
    if hooked := [slot.name for slot in quantized if forward_replaced(slot.owner)]:
        raise AnyFP8Error(f"{', '.join(fold(hooked))}: {HOOKED}")
    if bare := [slot.name for slot in quantized if slot.tensor.is_meta]:
        raise AnyFP8Error(f"{', '.join(fold(bare))} are on the meta device: there is nothing to decode")
    twins: dict[nn.Module, nn.Module] = {}
    for group in tree.tied():
        tied: nn.Parameter | None = None  # layers that share their codes share the float weight too
        for slot in group:
            if slot.fp8 is None:
                continue
            if tied is None:
                value = slot.fp8.decoded(dtype or slot.fp8.compute_dtype)
                tied = nn.Parameter(value.t().contiguous() if slot.transposed else value)
            if isinstance(slot.fp8, FP8Layer):
                twins[slot.fp8] = slot.fp8.to_float(tied)
            else:
                unparametrize(slot.owner, slot.leaf, tied)
    root = swap(tree, twins)
    root.__dict__.pop("_anyfp8_load", None)
    return root
