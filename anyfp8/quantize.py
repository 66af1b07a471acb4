"""`quantize`: from a float model to FP8 layers, with static input scales from calibration."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8.calibrate import Calibration, observe
from anyfp8.errors import CalibrationError
from anyfp8.folding import fold, join, layer_path
from anyfp8.layers import LAYERS, FP8Layer, Part, is_hf_conv1d, parametrize_codes, quantized_part, replacement
from anyfp8.manifest import group_by_reason
from anyfp8.numerics import FORMATS
from anyfp8.reads import weight_readers
from anyfp8.replace import ModuleTree, Slot, swap
from anyfp8.report import attach_report
from anyfp8.scheme import QuantizationScheme
from anyfp8.selection import patterns, selected

logger = logging.getLogger(__name__)

#: types that multiply with their weight and have no FP8 layer
_OTHERS = (nn.modules.conv._ConvNd, nn.Bilinear, nn.EmbeddingBag, nn.RNNBase)


def quantize(
    model: nn.Module,
    scheme: str | Mapping[str, Any] | QuantizationScheme = "FP8_STATIC",
    *,
    calibration: Calibration | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    percentile: float = 100.0,
    progress: bool | None = None,
) -> nn.Module:
    """Quantize the linear and convolution layers of a float model, in place; returns the model.

    scheme: a preset (FP8_STATIC: per-channel weights and static per-tensor inputs; FP8: both per tensor; FP8_DYNAMIC:
        per channel, per token; FP8_WEIGHT_ONLY: per channel; FP8_BLOCK), a QuantizationScheme, or a dict in our,
        auto-round's or compressed-tensors' words.
    calibration: for static schemes: batches (tensor → model(x), tuple or list → model(*x), dict → model(**x)), or a
        callable that gets the model.
    include, exclude: fnmatch patterns on module paths. Embeddings are quantized (weight-only) only if included by name.
    percentile: of each batch's input magnitudes that becomes the largest value; 100 is the maximum.

    A dynamic per-token scheme becomes per-tensor dynamic for convolutions, whose inputs have no tokens. Weights that
    no call of a layer uses are weight-only, and the report says so: those of layers whose weight is read by the module
    around them, stacked experts (a 3-D parameter of a module with "expert" in its path or class), and
    nn.MultiheadAttention's `in_proj_weight`. Layers of a type that has no FP8 version, or whose weight has another
    rank than a block's, stay float; `anyfp8.report(model)` names them.

    Raises CalibrationError, naming the layers, for inputs never seen and for values that aren't finite, SchemeError for
    an unknown scheme; the model is then as it was.
    """
    made = plan_quantization(model, scheme, include=include, exclude=exclude)
    if not made.schemes:
        why = "".join(f"\n  {', '.join(fold(names))}: {why}" for why, names in group_by_reason(made.skipped).items())
        raise CalibrationError(f"no layer to quantize: check include and exclude{why}")
    if bare := [name for name, slot in made.slots.items() if slot.tensor.is_meta]:
        raise CalibrationError(f"{', '.join(fold(bare))} are on the meta device: there are no weights to quantize")
    schemes, notes = dict(made.schemes), dict(made.notes)
    static = {name: made.slots[name].owner for name, s in made.calibrated.items() if s.static}
    amax: dict[str, float] = {}
    if static:
        amax, read = observe(
            model, static, calibration, percentile=percentile, progress=progress, uncalled=notes.keys()
        )
        for name in notes.keys() & amax.keys():  # it is called after all
            schemes[name] = made.calibrated[name]
            del notes[name]
        for name in read - notes.keys():
            schemes[name] = schemes[name].weight_only_twin()
            notes[name] = "never called in calibration, but its weight was read"
    built: dict[nn.Module, nn.Module] = {}
    parameters: list[tuple[Slot, Part]] = []
    for name, slot in made.slots.items():
        layer_type, _ = replacement(slot.owner) if slot.leaf == "weight" else (None, "")
        scale = _input_scale(name, amax[name], schemes[name], slot.tensor) if name in amax else None
        try:
            if layer_type is None:
                parameters.append((slot, quantized_part(slot.tensor, schemes[name])))
            else:
                built[slot.owner] = layer_type.from_float(slot.owner, schemes[name], scale)
        except ValueError as error:
            raise CalibrationError(f"{name}: {error}") from None
    _share(built)
    root = swap(made.tree, built)
    for slot, part in parameters:
        parametrize_codes(slot.owner, slot.leaf, [part], slot.tensor.dtype)
    notes = {made.slots[name].name: why for name, why in notes.items()}
    attach_report(
        root, source="quantize", dialect="none", evidence=made.evidence, skipped=made.skipped, layer_notes=notes
    )
    return root


def _share(built: Mapping[nn.Module, nn.Module]) -> None:
    """Layers whose weight was tied share their codes, as a load of the saved file will have it."""
    first: dict[tuple[object, ...], FP8Layer] = {}
    for module, layer in built.items():
        assert isinstance(layer, FP8Layer)
        key = (id(module.get_parameter("weight")), layer.scheme.weight_only_twin(), layer.transposed)
        owner = first.setdefault(key, layer)
        layer.weight_codes, layer.weight_scale = owner.weight_codes, owner.weight_scale


@dataclass(frozen=True, eq=False)
class QuantizationPlan:
    """What `quantize` would do. Names are paths of modules, or of parameters that are no module's `weight`.

    schemes: name → scheme. slots: where its weight is. notes: name → why its input is not quantized although the scheme
    asked for says so. skipped: name → why a weight that might be expected here stays float. calibrated: of layers,
    the scheme if they should be called after all.
    """

    evidence: str
    tree: ModuleTree = field(repr=False)
    schemes: dict[str, QuantizationScheme] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    calibrated: dict[str, QuantizationScheme] = field(default_factory=dict)


def plan_quantization(
    model: nn.Module,
    scheme: str | Mapping[str, Any] | QuantizationScheme = "FP8_STATIC",
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> QuantizationPlan:
    """All that `quantize` decides before it looks at values; touches nothing and works on meta models."""
    chosen = QuantizationScheme.of(scheme)
    tree = ModuleTree(model)
    plan = QuantizationPlan(str(chosen), tree)
    wanted, unwanted = patterns(include), patterns(exclude)
    for path, module in tree.modules.items():  # those whose weight is no parameter of theirs (yet)
        computed = isinstance(module, (*LAYERS, *_OTHERS)) and join(path, "weight") not in tree.slots
        if computed and selected([path], wanted, unwanted):
            plan.skipped[path] = replacement(module)[1] or "its weight is computed at each call, by a hook"
    readers = {} if chosen.weight_only else weight_readers(tree)
    for slot in tree.unique_slots():
        paths = [layer_path(*_split(name)) for name in slot.names]
        kind = _kind(slot, paths)
        if not kind or slot.fp8 is not None or not selected(paths, wanted, unwanted):
            continue
        if isinstance(slot.owner, nn.Embedding) and include is None:
            continue
        name, layer_scheme, why = paths[0], chosen, _refusal(slot, kind, chosen)
        if why:
            plan.skipped[name] = why
            continue
        if kind == "layer":
            layer_scheme = plan.calibrated[name] = _scheme_for(slot, chosen)
            note = readers.get(slot.owner, "")
        else:
            layer_scheme = _stacked(chosen) if kind == "experts" else chosen
            note = "" if chosen.weight_only else f"{kind}: decoded when used, the input is not quantized"
        plan.schemes[name] = layer_scheme.weight_only_twin() if note else layer_scheme
        plan.slots[name] = slot
        if note:
            plan.notes[name] = note
    return plan


def _split(name: str) -> tuple[str, str]:
    module, _, leaf = name.rpartition(".")
    return module, leaf


def _kind(slot: Slot, paths: list[str]) -> str:
    """What a tensor is here: "layer" (a weight that a layer multiplies with), "experts" (a stack), "in_proj_weight",
    "other" (a matrix that may well be multiplied with, which nothing here knows how to serve); or ""."""
    owner, tensor = slot.owner, slot.tensor
    known = (*LAYERS, *_OTHERS)
    if slot.is_buffer or not tensor.is_floating_point() or tensor.dim() < 2:
        return ""
    if isinstance(owner, known) or is_hf_conv1d(owner):
        return "layer" if slot.leaf == "weight" else ""
    if isinstance(owner, nn.MultiheadAttention):
        return slot.leaf if slot.leaf.endswith("proj_weight") else ""
    experts = "expert" in f"{paths[0]} {type(owner).__name__}".lower()
    if experts and tensor.dim() == 3:
        return "experts"
    matrix = sum(n > 1 for n in tensor.shape) > 1  # a norm's weight may be [1, 1, 1, channels]
    return "other" if matrix and ("weight" in slot.leaf or (experts and "bias" not in slot.leaf)) else ""


def _refusal(slot: Slot, kind: str, scheme: QuantizationScheme) -> str:
    """Why it must stay float; "" if it need not."""
    if kind in ("layer", "other"):
        layer_type, reason = replacement(slot.owner)
        if layer_type is None:
            return reason
    rank = slot.tensor.dim()
    if kind != "experts" and len(scheme.for_rank(rank).tile) != rank:
        return f"tile {list(scheme.tile)} is for weights of another rank"
    return ""


def _stacked(scheme: QuantizationScheme) -> QuantizationScheme:
    """The scheme of one expert's matrix for a stack of them."""
    return replace(scheme, tile=(1, *scheme.for_rank(2).tile))


def _scheme_for(slot: Slot, scheme: QuantizationScheme) -> QuantizationScheme:
    if isinstance(slot.owner, nn.Embedding):
        scheme = scheme.weight_only_twin()
    elif slot.tensor.dim() > 2 and scheme.act_dynamic:
        scheme = QuantizationScheme.from_dict(dict(scheme) | {"act_tile": (-1, -1)})
    return scheme.for_rank(slot.tensor.dim())


def _input_scale(name: str, amax: float, scheme: QuantizationScheme, weight: Tensor) -> Tensor:
    assert scheme.act_dtype is not None
    scale = amax / FORMATS[scheme.act_dtype].max
    if scale < torch.finfo(torch.float32).tiny:
        logger.warning("%s: its input was zero throughout calibration; its scale is set to 1.0", name)
        scale = 1.0
    return torch.tensor([scale], dtype=torch.float32, device=weight.device)
