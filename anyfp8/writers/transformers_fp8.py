"""Writes transformers' `fp8`: blocks with dynamic inputs (DeepSeek's layout), or one scale a weight (as of 5.24)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from anyfp8.numerics import FORMATS
from anyfp8.writers.base import Layer, act_kind, kind, leaf, scalar


def refuse(layer: Layer) -> str | None:
    """Linear weights in e4m3fn: blocks with inputs in groups of the block's width, or per tensor."""
    scheme = layer.scheme
    if len(layer.shape) != 2:
        return "transformers' fp8 quantizes Linear only"
    if scheme.weight_dtype != "float8_e4m3fn" or not (scheme.symmetric and scheme.act_symmetric) or scheme.out_dtype:
        return f"transformers' fp8 has no {scheme}"
    if scheme.act_dtype not in (None, "float8_e4m3fn") or scheme.act_scale != "float32":
        return f"transformers' fp8 rounds inputs to e4m3fn with float32 scales, not {scheme}"
    if kind(scheme) == "block":
        if act_kind(scheme) != "group" or scheme.act_tile[1] != scheme.tile[1]:
            return "transformers' block fp8 has dynamic inputs in groups of the block's width"
        return None
    if kind(scheme) != "tensor":
        return f"transformers' fp8 has block and per-tensor weights, not per {kind(scheme)}"
    if act_kind(scheme) not in ("static", "token"):
        return "transformers' per-tensor fp8 has inputs that are static, or dynamic per token"
    return None


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """One block size and one activation scheme serve all layers."""
    schemes = {(layer.scheme.tile, act_kind(layer.scheme)) for layer in layers}
    if len(schemes) > 1:
        return f"transformers' fp8 has one block size and activation scheme for all layers, these have {len(schemes)}"
    return None


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight`, `weight_scale_inv` (a multiplier, in spite of its name), static inputs' `activation_scale`."""
    scheme = layer.scheme
    scale = values["weight_scale"]
    out = {
        leaf(layer, "weight"): values["weight_codes"].view(FORMATS[scheme.weight_dtype].dtype),
        leaf(layer, "weight_scale_inv"): scalar(scale, (1, 1)) if kind(scheme) == "tensor" else scale,
    }
    if scheme.static:
        out[leaf(layer, "activation_scale")] = scalar(values["input_scale"], ())
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """`quantization_config` for config.json."""
    scheme = layers[0].scheme
    config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if scheme.static else "dynamic",
        "weight_block_size": list(scheme.tile) if kind(scheme) == "block" else None,
        "modules_to_not_convert": sorted(floats),
        "producer": producer,
    }
    return {"config.json": {"quantization_config": config}}
