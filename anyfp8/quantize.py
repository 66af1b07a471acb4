"""`quantize`: from a float model to FP8 layers, with static input scales from calibration."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from anyfp8.calibrate import Calibration, observe
from anyfp8.errors import CalibrationError
from anyfp8.folding import fold
from anyfp8.layers import LAYERS, FP8Layer, replacement
from anyfp8.numerics import FORMATS
from anyfp8.replace import ModuleTree, swap
from anyfp8.report import attach_report
from anyfp8.scheme import QuantizationScheme
from anyfp8.selection import patterns, selected

logger = logging.getLogger(__name__)


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

    A dynamic per-token scheme becomes per-tensor dynamic for convolutions, whose inputs have no tokens. Layers of a
    type that has no FP8 version, or whose weight has another rank than a block's, stay float;
    `anyfp8.report(model)` names them.

    Raises CalibrationError, naming the layers, for inputs never seen and for values that aren't finite, SchemeError for
    an unknown scheme; the model is then as it was.
    """
    chosen = QuantizationScheme.of(scheme)
    tree = ModuleTree(model)
    layers, skipped = _choose(tree, chosen, patterns(include), patterns(exclude))
    if not layers:
        raise CalibrationError("no layer to quantize: check include and exclude")
    if bare := [name for name, module in layers.items() if module.get_parameter("weight").is_meta]:
        raise CalibrationError(f"{', '.join(fold(bare))} are on the meta device: there are no weights to quantize")
    schemes = {name: _scheme_for(module, chosen) for name, module in layers.items()}
    static = {name: layers[name] for name, s in schemes.items() if s.static}
    amax = observe(model, static, calibration, percentile=percentile, progress=progress) if static else {}
    built: dict[str, FP8Layer] = {}
    for name, module in layers.items():
        layer_type, _ = replacement(module)
        assert layer_type is not None
        scale = _input_scale(name, amax[name], schemes[name], module) if name in amax else None
        try:
            built[name] = layer_type.from_float(module, schemes[name], scale)
        except ValueError as error:
            raise CalibrationError(f"{name}: {error}") from None
    root = swap(tree, {layers[name]: layer for name, layer in built.items()})
    attach_report(root, source="quantize", dialect="none", evidence=str(chosen), skipped=skipped)
    return root


def _choose(
    tree: ModuleTree, scheme: QuantizationScheme, include: tuple[str, ...] | None, exclude: tuple[str, ...] | None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Name → module to quantize, and name → reason for those that would be wanted but can't be."""
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    names: dict[nn.Module, list[str]] = {}
    for name, module in tree.modules.items():
        names.setdefault(module, []).append(name)
    for module, paths in names.items():
        wanted = isinstance(module, tuple(LAYERS)) and not isinstance(module, FP8Layer)
        if (
            not wanted
            or not selected(paths, include, exclude)
            or (isinstance(module, nn.Embedding) and include is None)
        ):
            continue
        layer_type, reason = replacement(module)
        if layer_type is not None:
            rank = module.get_parameter("weight").dim()
            if len(scheme.for_rank(rank).tile) != rank:
                layer_type, reason = None, f"tile {list(scheme.tile)} is for weights of another rank"
        if layer_type is None:
            skipped[paths[0]] = reason
        else:
            layers[paths[0]] = module
    return layers, skipped


def _scheme_for(module: nn.Module, scheme: QuantizationScheme) -> QuantizationScheme:
    weight = module.get_parameter("weight")
    if isinstance(module, nn.Embedding):
        scheme = scheme.weight_only_twin()
    elif weight.dim() > 2 and scheme.act_dynamic:
        scheme = QuantizationScheme.from_dict(dict(scheme) | {"act_tile": (-1, -1)})
    return scheme.for_rank(weight.dim())


def _input_scale(name: str, amax: float, scheme: QuantizationScheme, module: nn.Module) -> torch.Tensor:
    assert scheme.act_dtype is not None
    scale = amax / FORMATS[scheme.act_dtype].max
    if scale < torch.finfo(torch.float32).tiny:
        logger.warning("%s: its input was zero throughout calibration; its scale is set to 1.0", name)
        scale = 1.0
    return torch.tensor([scale], dtype=torch.float32, device=module.get_parameter("weight").device)
