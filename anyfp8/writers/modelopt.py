"""Writes NVIDIA ModelOpt's unified HF layout: hf_quant_config.json and config.json (as of 0.47.0)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyfp8.numerics import FORMATS
from anyfp8.scheme import QuantizationScheme
from anyfp8.writers.base import Layer, act_kind, e8m0, is_mx, kind, leaf, scalar


def refuse(layer: Layer) -> str | None:
    """Linear weights in one of ModelOpt's named algorithms."""
    if len(layer.shape) != 2:
        return "ModelOpt's exporter packs Linear only"
    if layer.scheme.scale_dtype == "float8_e4m3fn" and not layer.two_level:
        return "NVFP4's two levels of scales are merged in a loaded model; convert the checkpoint instead"
    return None if _algorithm(layer.scheme) else f"ModelOpt has no algorithm for {layer.scheme}"


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """Any mixture can be said (MIXED_PRECISION)."""
    return None


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight`, `weight_scale` in the algorithm's shape, `weight_scale_2`, `input_scale`."""
    scheme, scale = layer.scheme, values["weight_scale"]
    algorithm = _algorithm(scheme)
    out = {leaf(layer, "weight"): values["weight_codes"].view(FORMATS[scheme.weight_dtype].dtype)}
    if algorithm == "MXFP8":
        out[leaf(layer, "weight_scale")] = e8m0(scale)
    elif algorithm == "NVFP4":
        out[leaf(layer, "weight_scale")] = values["inner_scale"].to(torch.float8_e4m3fn)
        out[leaf(layer, "weight_scale_2")] = scalar(values["outer_scale"], ())
        out[leaf(layer, "input_scale")] = scalar(values["input_scale"], ())
    elif algorithm == "fp8_pb_wo":
        out[leaf(layer, "weight_scale")] = scale.reshape(scale.shape[0], 1, scale.shape[1], 1)
    elif algorithm == "FP8":
        out[leaf(layer, "weight_scale")] = scalar(scale, ())
        out[leaf(layer, "input_scale")] = scalar(values["input_scale"], ())
    else:
        out[leaf(layer, "weight_scale")] = scale.reshape(-1)
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """Both forms of the config say the same."""
    named = {layer.name: _entry(layer.scheme) for layer in layers}
    algorithms = {entry["quant_algo"] for entry in named.values()}
    inner: dict[str, Any] = {"kv_cache_quant_algo": None}
    if len(algorithms) == 1:
        inner |= next(iter(named.values())) | {"exclude_modules": sorted(floats)}
    else:
        inner |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": named}
    who = {"name": "modelopt", "version": producer}
    flat = {key: value for key, value in inner.items() if key not in ("exclude_modules", "kv_cache_quant_algo")}
    flat |= {"quant_method": "modelopt", "ignore": sorted(floats), "producer": who}
    return {
        "hf_quant_config.json": {"producer": who, "quantization": inner},
        "config.json": {"quantization_config": flat},
    }


def _entry(scheme: QuantizationScheme) -> dict[str, Any]:
    algorithm = _algorithm(scheme)
    size = {"MXFP8": 32, "NVFP4": 16}.get(algorithm or "")
    return {"quant_algo": algorithm} | ({"group_size": size} if size else {})


def _algorithm(scheme: QuantizationScheme) -> str | None:
    if not (scheme.symmetric and scheme.act_symmetric) or scheme.out_dtype is not None:
        return None
    e4m3 = scheme.weight_dtype == "float8_e4m3fn" and scheme.act_dtype in (None, "float8_e4m3fn")
    how = (kind(scheme), act_kind(scheme))
    if is_mx(scheme):
        return "MXFP8" if e4m3 and how[1] == "group" and scheme.act_scale == "e8m0_ceil" else None
    if scheme.weight_dtype == "float4_e2m1fn":
        nv = scheme.scale_dtype == "float8_e4m3fn" and scheme.tile == (1, 16) and scheme.act_scale == "e4m3"
        return "NVFP4" if nv and scheme.act_dtype == "float4_e2m1fn" else None
    if not e4m3 or scheme.act_scale != "float32" or scheme.scale_dtype.startswith("float8"):
        return None
    if scheme.tile == (128, 128) and how[1] == "none":
        return "fp8_pb_wo"
    return {("tensor", "static"): "FP8", ("channel", "token"): "FP8_PER_CHANNEL_PER_TOKEN"}.get(how)
