"""Writes ComfyUI single files: per-layer `comfy_quant` tensors, e4m3fn and e5m2 per tensor (as of 2026-08)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyfp8.numerics import FORMATS
from anyfp8.writers.base import Layer, act_kind, kind, leaf, scalar


def refuse(layer: Layer) -> str | None:
    """Linear and Embedding weights per tensor; inputs static in the weight's own format, or left alone."""
    scheme = layer.scheme
    if len(layer.shape) != 2:
        return "ComfyUI never scales convolution weights"
    if scheme.weight_dtype not in ("float8_e4m3fn", "float8_e5m2") or kind(scheme) != "tensor":
        return f"stock ComfyUI reads e4m3fn and e5m2 with one scale a weight, not {scheme}"
    if not (scheme.symmetric and scheme.act_symmetric) or scheme.out_dtype is not None:
        return f"ComfyUI has no {scheme}"
    if act_kind(scheme) not in ("none", "static") or scheme.act_dtype not in (None, scheme.weight_dtype):
        return "ComfyUI's inputs are static in the weight's format, or not quantized"
    return None


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """Any mixture can be said: each layer has its own marker."""
    return None


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight`, `weight_scale` (), `input_scale` () if static, and the marker."""
    scheme = layer.scheme
    marker: dict[str, Any] = {"format": scheme.weight_dtype}
    if scheme.weight_only:
        marker["full_precision_matrix_mult"] = True
    out = {
        leaf(layer, "weight"): values["weight_codes"].view(FORMATS[scheme.weight_dtype].dtype),
        leaf(layer, "weight_scale"): scalar(values["weight_scale"], ()),
        leaf(layer, "comfy_quant"): torch.tensor(list(json.dumps(marker).encode()), dtype=torch.uint8),
    }
    if scheme.static:
        out[leaf(layer, "input_scale")] = scalar(values["input_scale"], ())
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """None: everything is in the one file."""
    return {}
