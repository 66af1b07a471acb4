"""Writes compressed-tensors: float-quantized, naive-quantized, MXFP8/MXFP4/MXFP6 and NVFP4 (as of 0.20.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyfp8.numerics import FORMATS
from anyfp8.scheme import QuantizationScheme
from anyfp8.writers.base import Layer, act_kind, e8m0, is_mx, kind, leaf, scalar


def refuse(layer: Layer) -> str | None:
    """Linear and Embedding weights in e4m3fn, FP6 or FP4, with the roundings that compressed-tensors itself uses."""
    scheme = layer.scheme
    if len(layer.shape) != 2:
        return "compressed-tensors quantizes Linear and Embedding only"
    bits = FORMATS[scheme.weight_dtype].bits
    nv = scheme.scale_dtype == "float8_e4m3fn" and scheme.tile == (1, 16)
    if scheme.weight_dtype not in ("float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"):
        return f"float weights of compressed-tensors are e4m3fn, FP6 or FP4, not {scheme.weight_dtype}"
    if nv and not layer.two_level:
        return "NVFP4's two levels of scales are merged in a loaded model; convert the checkpoint instead"
    if (bits < 8 and not (nv or is_mx(scheme))) or scheme.scale_dtype == "float8_e5m3":
        return f"compressed-tensors has no {scheme}"
    if scheme.act_dtype not in (None, "float8_e4m3fn", "float4_e2m1fn"):
        return f"inputs of compressed-tensors are e4m3fn or FP4, not {scheme.act_dtype}"
    if scheme.act_scale not in ("float32", "e8m0_even", "e4m3"):
        return f"compressed-tensors rounds MX input scales to even, not {scheme.act_scale}"
    if scheme.out_dtype not in (None, "float8_e4m3fn"):
        return f"outputs of compressed-tensors are e4m3fn, not {scheme.out_dtype}"
    return None


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """Any mixture can be said: one config group a scheme."""
    return None


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight` or `weight_packed`, `weight_scale` by strategy, and what else the scheme needs."""
    scheme = layer.scheme
    spec = FORMATS[scheme.weight_dtype]
    name = "weight" if spec.bits == 8 else "weight_packed"
    out = {leaf(layer, name): values["weight_codes"].view(spec.dtype)}
    scale = values["weight_scale"]
    if is_mx(scheme):
        out[leaf(layer, "weight_scale")] = e8m0(scale)
    elif scheme.scale_dtype == "float8_e4m3fn":
        out[leaf(layer, "weight_scale")] = values["inner_scale"].to(torch.float8_e4m3fn)
        out[leaf(layer, "weight_global_scale")] = scalar(values["outer_divisor"])
    else:
        out[leaf(layer, "weight_scale")] = scalar(scale) if kind(scheme) == "tensor" else scale
    if scheme.act_scale == "e4m3":
        out[leaf(layer, "input_global_scale")] = scalar(1 / values["input_scale"])
    elif scheme.static:
        out[leaf(layer, "input_scale")] = scalar(values["input_scale"])
    if not scheme.symmetric:
        zero = values["weight_zero_point"].to(torch.float8_e4m3fn)
        out[leaf(layer, "weight_zero_point")] = zero.reshape(1) if kind(scheme) == "tensor" else zero
    if not scheme.act_symmetric:
        out[leaf(layer, "input_zero_point")] = values["input_zero_point"].to(torch.float8_e4m3fn).reshape(1)
    if scheme.out_dtype is not None:
        out[leaf(layer, "output_scale")] = scalar(values["output_scale"])
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """`quantization_config` for config.json: one group a scheme, its layers as exact targets."""
    by_scheme: dict[QuantizationScheme, list[str]] = {}
    for layer in layers:
        by_scheme.setdefault(layer.scheme, []).append(layer.name)
    groups = {f"group_{i}": _group(scheme, names) for i, (scheme, names) in enumerate(by_scheme.items())}
    formats = {group["format"] for group in groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(floats),
        "kv_cache_scheme": None,
        "producer": producer,
    }
    return {"config.json": {"quantization_config": config}}


def _group(scheme: QuantizationScheme, targets: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": FORMATS[scheme.weight_dtype].bits,
        "type": "float",
        "symmetric": scheme.symmetric,
        "strategy": kind(scheme),
        "dynamic": False,
    }
    if kind(scheme) == "group":
        weights["group_size"] = scheme.tile[1]
    elif kind(scheme) == "block":
        weights["block_structure"] = list(scheme.tile)
    if is_mx(scheme):
        weights["scale_dtype"] = "torch.uint8"
    elif scheme.scale_dtype == "float8_e4m3fn":
        weights |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _inputs(scheme),
        "output_activations": None
        if scheme.out_dtype is None
        else {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
        "format": _format(scheme),
    }


def _inputs(scheme: QuantizationScheme) -> dict[str, Any] | None:
    how = act_kind(scheme)
    if how == "none":
        return None
    assert scheme.act_dtype is not None
    args: dict[str, Any] = {
        "num_bits": FORMATS[scheme.act_dtype].bits,
        "type": "float",
        "symmetric": scheme.act_symmetric,
        "strategy": "tensor" if how == "static" else how,
        "dynamic": how != "static",
    }
    if how == "group":
        args["group_size"] = scheme.act_tile[1]
    if scheme.act_scale == "e8m0_even":
        args["scale_dtype"] = "torch.uint8"
    elif scheme.act_scale == "e4m3":
        args |= {"strategy": "tensor_group", "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
    return args


def _format(scheme: QuantizationScheme) -> str:
    if is_mx(scheme):
        bits = FORMATS[scheme.weight_dtype].bits
        return "mxfp8-quantized" if bits == 8 else f"mxfp{bits}-pack-quantized"
    if scheme.scale_dtype == "float8_e4m3fn":
        return "nvfp4-pack-quantized"
    return "naive-quantized" if scheme.act_dtype is None else "float-quantized"
