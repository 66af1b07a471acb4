"""Writes auto-round's own format: static and weight-only FP8, and MXFP8/MXFP4 (as of 0.16.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from anyfp8.numerics import FORMATS
from anyfp8.scheme import QuantizationScheme
from anyfp8.writers.base import Layer, act_kind, e8m0, is_mx, kind, leaf, scalar

_MX_ACT = {"e8m0_floor": "mx_fp", "e8m0_ceil": "mx_fp_rceil"}


def refuse(layer: Layer) -> str | None:
    """Linear weights: static W8A8 or weight-only e4m3fn, or MX with auto-round's roundings."""
    scheme = layer.scheme
    if len(layer.shape) != 2:
        return "auto-round quantizes Linear only"
    if not (scheme.symmetric and scheme.act_symmetric) or scheme.out_dtype is not None:
        return "auto-round's FP8 is symmetric and leaves outputs alone"
    if is_mx(scheme):
        if scheme.weight_dtype == "float6_e2m3fn":
            return "auto-round packs MX weights of 4 and 8 bits only"
        if scheme.act_dtype != scheme.weight_dtype or scheme.act_scale not in _MX_ACT:
            return f"auto-round's MX quantizes weight and input alike, rounding scales down or up, not {scheme}"
        return None
    if scheme.weight_dtype != "float8_e4m3fn" or scheme.scale_dtype.startswith("float8"):
        return f"auto-round's own format has no {scheme}"
    if kind(scheme) == "block":
        return "auto-round writes block FP8 in transformers' format"
    if act_kind(scheme) not in ("none", "static") or scheme.act_dtype not in (None, "float8_e4m3fn"):
        return "auto-round's own format has static or unquantized inputs; use compressed-tensors for dynamic ones"
    return None


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """One packing format serves all layers."""
    packings = {_packing(layer.scheme) for layer in layers}
    return None if len(packings) <= 1 else f"auto-round has one packing format a file, these layers need {packings}"


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight` (or `weight_packed`), `weight_scale` ([out], [1] or flat groups), `input_scale` [1]."""
    scheme = layer.scheme
    spec = FORMATS[scheme.weight_dtype]
    out = {leaf(layer, "weight" if spec.bits == 8 else "weight_packed"): values["weight_codes"].view(spec.dtype)}
    scale = values["weight_scale"]
    out[leaf(layer, "weight_scale")] = e8m0(scale) if is_mx(scheme) else scale.reshape(-1)
    if scheme.static:
        out[leaf(layer, "input_scale")] = scalar(values["input_scale"])
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """The commonest scheme at the top level, the others by exact name in `extra_config`."""
    common, _ = Counter(layer.scheme for layer in layers).most_common(1)[0]
    extra: dict[str, Any] = {layer.name: _words(layer.scheme) for layer in layers if layer.scheme != common}
    extra |= {name: {"bits": 16, "act_bits": 16} for name in sorted(floats)}
    config = _words(common) | {"quant_method": "auto-round", "producer": producer}
    if (packing := _packing(common)) is not None:
        config["packing_format"] = packing
    if extra:
        config["extra_config"] = extra
    return {"config.json": {"quantization_config": config}, "quantization_config.json": config}


def _packing(scheme: QuantizationScheme) -> str | None:
    if is_mx(scheme):
        return "auto_round:llm_compressor"
    return "auto_round:fp8_static" if scheme.static else None


def _words(scheme: QuantizationScheme) -> dict[str, Any]:
    bits = FORMATS[scheme.weight_dtype].bits
    size = {"tensor": 0, "channel": -1}.get(kind(scheme), scheme.tile[-1])
    words: dict[str, Any] = {"bits": bits, "group_size": size, "sym": True}
    if is_mx(scheme):
        act: dict[str, Any] = {"act_data_type": _MX_ACT[scheme.act_scale], "act_group_size": 32, "act_dynamic": True}
        return words | {"data_type": "mx_fp", "act_bits": bits, "act_sym": True} | act
    words["data_type"] = "fp"
    if scheme.act_dtype is None:
        return words
    return words | {
        "act_bits": 8,
        "act_data_type": "fp",
        "act_group_size": 0,
        "act_sym": True,
        "act_dynamic": False,
    }
