"""One layer of a ComfyUI file: its format from the label, its granularity from the shape of its scale.

| format | weight | weight_scale | more |
|---|---|---|---|
| float8_e4m3fn, float8_e5m2 (also `fp8`, `_rowwise`, `_blockwise`) | FP8 | float: (), [out] or a grid | input_scale |
| mxfp8, hybrid_mxfp8 | e4m3fn, padded to 32 | E8M0 over 32 columns, swizzled | |
| nvfp4 | uint8, padded to 16, even column in the high nibble | e4m3fn over 16, swizzled | weight_scale_2, input_scale |

Inputs are quantized where the file has an `input_scale`. Without one ComfyUI takes 1.0 for FP8, and quantizes inputs of
MX and NVFP4 on hardware that can; here such a layer is weight-only. Only the model knows what is padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from anyfp8.checkpoint import TensorRef
from anyfp8.claims import ManifestBuilder
from anyfp8.folding import join
from anyfp8.numerics import dtype_name, grid_shape
from anyfp8.scheme import QuantizationScheme, Tile
from anyfp8.sources import Codes, Scale

_E4M3, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
#: formats with float scales → dtype of the weight, should it be stored as bytes
_FP8 = dict.fromkeys((_E4M3, "fp8", f"{_E4M3}_rowwise", f"{_E4M3}_blockwise", f"{_E4M3}_block3d"), _E4M3)
_FP8["float8_e5m2"] = "float8_e5m2"
_MXFP8 = ("mxfp8", "hybrid_mxfp8")
_KNOWN = (*_FP8, *_MXFP8, "nvfp4")
#: keys of a label that don't change what the tensors mean; `convrot` does, unless it is false
_HARMLESS = {
    *("format", "group_size", "orig_dtype", "orig_shape", "full_precision_matrix_mult", "num_experts", "params"),
    *("linear_dtype", "per_row", "convrot_groupsize"),
}


def add_layer(builder: ManifestBuilder, module: str, label: dict[str, Any] | None, weight_only: bool) -> None:
    """Claim one layer. label: what the file says of it, if it does. weight_only: its input stays as it is."""
    label = {"format": _E4M3} if label is None else label | (label.get("params") or {})  # some writers nest the keys
    format = label.get("format")
    weight, smooth = builder.find(module, "weight"), builder.find(module, "pre_quant_scale")
    reason = _refusal(label)
    if not reason and smooth is not None:
        if bool((smooth.read().float() == 1).all()):
            builder.exceptions[smooth.name] = "a pre_quant_scale of ones changes nothing"
        else:
            reason = f"its input would have to be multiplied by {smooth} first"
    if reason:
        builder.refuse(module, "unsupported", reason)
        builder.claim(smooth)
        return
    if weight is None:
        builder.problem("missing", join(module, "weight"), f"its label says that it is {format}")
        return
    scale = _either(builder, module, "weight_scale", "scale_weight")
    input_scale = _either(builder, module, "input_scale", "scale_input")
    if input_scale is not None and (weight_only or label.get("full_precision_matrix_mult") or format in _MXFP8):
        builder.exceptions[input_scale.name] = "the file says that this layer is not multiplied in FP8"
        input_scale = None
    if format in _FP8:
        _fp8(builder, module, weight, scale, input_scale, label)
    elif format == "nvfp4":
        _nvfp4(builder, module, weight, scale, input_scale, label)
    else:
        _mxfp8(builder, module, weight, scale, label)


def _refusal(label: dict[str, Any]) -> str:
    """Why a layer with this label can't be read, or ""."""
    if (format := label.get("format")) not in _KNOWN:
        return f"its format is {format!r}; those that are read are {', '.join(_KNOWN)}"
    if label.get("convrot"):
        return "its input would have to be rotated first (convrot)"
    if unknown := sorted(set(label) - _HARMLESS - {"convrot"}):
        return f"its label has the unknown key {', '.join(map(repr, unknown))}"
    return ""


def _fp8(
    builder: ManifestBuilder,
    module: str,
    weight: TensorRef,
    scale: TensorRef | None,
    input_scale: TensorRef | None,
    label: dict[str, Any],
) -> None:
    said = _FP8[label["format"]]
    dtype = dtype_name(weight.torch_dtype) if weight.is_fp8 else said
    if dtype != said:
        builder.notes.append(f"{module}: read as {said} by ComfyUI, but stored in {dtype} (the tensors decide)")
    tile = (-1,) * len(weight.shape) if scale is None else _tile(weight.shape, scale.shape, label.get("group_size"))
    if tile is None:
        assert scale is not None
        detail = f"{scale} has shape {list(scale.shape)}: neither one scale nor one for each row of a weight of shape "
        detail += f"{list(weight.shape)}, and no group_size in its label explains it"
        builder.refuse(module, "mismatched", detail)
        return
    builder.layer(
        module,
        QuantizationScheme(dtype, tile, act_dtype=None if input_scale is None else dtype),
        codes=Codes(weight, dtype, raw=True),
        scale=None if scale is None else Scale(scale),
        input_scale=None if input_scale is None else Scale(input_scale),
    )


def _tile(shape: tuple[int, ...], scale: tuple[int, ...], group: Any) -> Tile | None:
    """What shares one scale, told by the scale's shape: the label stays the same where a writer fell back."""
    rest = (-1,) * (len(shape) - 1)
    if set(scale) <= {1}:
        return (-1, *rest)
    if scale[0] == shape[0] and set(scale[1:]) <= {1}:
        return (1, *rest)
    if isinstance(group, int) and group > 0 and len(shape) == 2 and set(scale[2:]) <= {1}:
        return next((tile for tile in ((group, group), (1, group)) if scale[:2] == grid_shape(shape, tile)), None)
    return None


def _mxfp8(
    builder: ManifestBuilder, module: str, weight: TensorRef, scale: TensorRef | None, label: dict[str, Any]
) -> None:
    if (scalar := builder.find(module, "weight_scalar")) is not None:
        builder.exceptions[scalar.name] = "one scale for hardware without MX, which this layer can do without"
    dtype = dtype_name(weight.torch_dtype) if weight.is_fp8 else _E4M3
    codes = _cropped(builder, module, Codes(weight, dtype, raw=True, padded_to=32), label)
    if codes is not None:
        swizzled = None if scale is None else Scale(scale, "e8m0", swizzled=True)
        builder.layer(module, QuantizationScheme(dtype, (1, 32), "float8_e8m0fnu"), codes=codes, scale=swizzled)


def _nvfp4(
    builder: ManifestBuilder,
    module: str,
    weight: TensorRef,
    scale: TensorRef | None,
    input_scale: TensorRef | None,
    label: dict[str, Any],
) -> None:
    outer = builder.find(module, "weight_scale_2")
    codes = _cropped(builder, module, Codes(weight, _FP4, high_first=True, padded_to=16), label)
    if outer is None:
        builder.problem("missing", join(module, "weight_scale_2"), f"the block scales of {weight} are multiplied by it")
    if outer is None or codes is None:
        builder.claim(weight, scale, input_scale, outer)
        return
    scheme = QuantizationScheme(_FP4, (1, 16), _E4M3)
    if input_scale is not None:
        scheme = replace(scheme, act_dtype=_FP4, act_dynamic=True, act_tile=(1, 16), act_scale="e4m3")
    builder.layer(
        module,
        scheme,
        codes=codes,
        scale=None if scale is None else Scale(scale, "e4m3", swizzled=True, factor=outer),
        input_scale=None if input_scale is None else Scale(input_scale),
    )
    builder.claim(outer)


def _cropped(builder: ManifestBuilder, module: str, codes: Codes, label: dict[str, Any]) -> Codes | None:
    """The codes without their padding, if the label says their shape; None (and a problem) if it can't be theirs."""
    if (stated := label.get("orig_shape")) is None:
        return codes
    shape = tuple(n for n in stated if isinstance(n, int))
    if len(shape) != len(stated):
        builder.refuse(module, "contradiction", f"its label's orig_shape {stated!r} is no shape")
        return None
    if not codes.fits(shape):
        detail = f"its label says shape {list(shape)}, but {codes.ref} holds {list(codes.shape)}"
        builder.refuse(module, "contradiction", detail)
        return None
    return replace(codes, crop=shape)


def _either(builder: ManifestBuilder, module: str, new: str, old: str) -> TensorRef | None:
    """The tensor under its new or its old name; both must be the same."""
    first, second = builder.find(module, new), builder.find(module, old)
    if first is None or second is None:
        return first or second
    if first.shape == second.shape and torch.equal(first.read().float(), second.read().float()):
        builder.exceptions[second.name] = f"the same as {first.name}"
    else:
        builder.problem("ambiguous", second, f"is not the same as {first.name}, which is its other name")
        builder.claim(second)
    return first
