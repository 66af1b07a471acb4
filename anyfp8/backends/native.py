"""The hardware's FP8 matmul, `torch.nn.functional.scaled_mm`, within the rules that its CUDA kernels enforce.

Rules (torch 2.14, aten/src/ATen/native/cuda/ScaledBlas.cpp): 2-D operands, the second column-major; K and N multiples
of 16; both scales per tensor, or both per row with a 16-bit output; a bias needs a 16-bit output of its own dtype;
e5m2 × e5m2 doesn't exist. A CPU accepts more, so the tests use a stand-in that enforces these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyfp8.backends.base import Layer, input_scale, is_rowwise, output_dtype
from anyfp8.backends.device import DeviceInfo
from anyfp8.numerics import FORMATS, quantize
from anyfp8.scheme import QuantizationScheme

_OCP = ("float8_e4m3fn", "float8_e5m2")
_FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")


class Native:
    """FP8 × FP8 on tensor cores: linear layers with per-tensor or per-row scales."""

    name = "native"

    def check(self, scheme: QuantizationScheme, shape: Sequence[int], device: DeviceInfo) -> str | None:
        """Accepts W8A8 linear layers, per tensor or channel × per tensor or token, where the device has the formats."""
        if scheme.act_dtype is None:
            return "weight-only: the input is not quantized, so there is no FP8 matmul"
        if len(shape) != 2:
            return "torch has no FP8 convolution"
        if not is_rowwise(scheme.tile) or scheme.act_tile[1] != -1:
            return f"scaled_mm is used for per-tensor and per-row scales only, not for {scheme}"
        if not (scheme.symmetric and scheme.act_symmetric) or scheme.act_scale != "float32":
            return f"scaled_mm is used without zero points and with float32 scales only, not for {scheme}"
        pair = (scheme.weight_dtype, scheme.act_dtype)
        if pair == ("float8_e5m2", "float8_e5m2"):
            return "scaled_mm has no e5m2 × e5m2"
        allowed, reason = _formats(device)
        if not allowed:
            return reason
        if not set(pair) <= set(allowed):
            return f"{device} multiplies {' and '.join(allowed)} only"
        return None

    def avoid(self, device: DeviceInfo) -> str | None:
        """On a CPU the op exists, but is far slower than emulation."""
        if device.type == "cpu":
            return "scaled_mm on a CPU is hundreds to thousands of times slower than emulation"
        return None

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """x [..., K] → [..., N]; differentiable in x and the bias (straight through the rounding)."""
        if torch.is_grad_enabled() and (x.requires_grad or (layer.bias is not None and layer.bias.requires_grad)):
            out: Tensor = _Differentiable.apply(x, layer.bias, layer)
            return out
        return _linear(layer, x, layer.bias)

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """Not available; `check` refuses convolutions."""
        raise NotImplementedError("torch has no FP8 convolution")


def _formats(device: DeviceInfo) -> tuple[tuple[str, ...], str]:
    """The FP8 formats that the device multiplies, or () and the reason."""
    if device.type in ("cpu", "xpu"):
        return _OCP, ""
    if device.type == "cuda" and device.arch:
        if device.arch.startswith("gfx94"):
            return _FNUZ, ""
        if device.arch.startswith(("gfx95", "gfx12")):
            return _OCP, ""
        return (), f"{device} has no FP8 matmul (gfx942, gfx950 and gfx12 have)"
    if device.type == "cuda":
        if device.capability and device.capability >= (8, 9):
            return _OCP, ""
        return (), f"{device} has no FP8 tensor cores (sm89 and newer have)"
    return (), f"{device} has no FP8 matmul in torch"


def _linear(layer: Layer, x: Tensor, bias: Tensor | None) -> Tensor:
    scheme, dtype = layer.scheme, output_dtype(x)
    assert scheme.act_dtype is not None
    n, k = layer.weight_codes.shape
    rows = x.reshape(-1, k).contiguous()  # the kernels want rows, whatever the layout of x
    if rows.shape[0] == 0:  # the kernels refuse empty operands
        return x.new_zeros((*x.shape[:-1], n), dtype=dtype)
    scale = input_scale(layer, rows).reshape(-1, 1)
    a = quantize(rows.float() / scale, scheme.act_dtype)
    b = layer.weight_codes.view(FORMATS[scheme.weight_dtype].dtype)
    y = _scaled_mm(
        _pad(a, 1), _pad(_pad(b, 1), 0).contiguous().t(), scale, layer.weight_scale.reshape(1, -1), bias, dtype, n
    )
    return y.reshape(*x.shape[:-1], n)


def _scaled_mm(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, dtype: torch.dtype, n: int) -> Tensor:
    """a [M, K] × b [K, N ≥ n], scales [M or 1, 1] and [1, n or 1] → [M, n] with one rounding to `dtype`."""
    per_tensor = sb.numel() == 1 and sa.numel() == 1  # comparing them would tie the batch to N under torch.compile
    short = dtype in (torch.bfloat16, torch.float16)
    if short and (bias is None or bias.dtype == dtype):  # the kernel's epilogue scales, adds and rounds once
        wide = None if bias is None else _pad(bias, 0)
        if per_tensor:
            return _call(a, b, sa, sb, "TensorWise", wide, dtype)[:, :n]
    if dtype == torch.bfloat16 and not per_tensor and (bias is None or bias.dtype == dtype):
        wide = None if bias is None else _pad(bias, 0)
        sa, sb = sa.expand(a.shape[0], 1).contiguous(), _pad(sb.expand(1, n), 1).contiguous()
        return _call(a, b, sa, sb, "RowWise", wide, dtype)[:, :n]
    if per_tensor:
        y = _call(a, b, sa, sb, "TensorWise", None, torch.float32)[:, :n]
    else:  # row-wise kernels can't return float32: leave the scales to the epilogue here
        one = torch.ones_like(sb[:, :1])
        y = _call(a, b, one, one, "TensorWise", None, torch.float32)[:, :n] * sa * sb
    return (y if bias is None else y + bias.float()).to(dtype)


def _call(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, recipe: str, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind: Any = getattr(F.ScalingType, recipe)
    out: Tensor = torch.nn.functional.scaled_mm(a, b, sa, kind, sb, kind, bias=bias, output_dtype=dtype)
    return out


def _pad(x: Tensor, axis: int) -> Tensor:
    """Zeros up to the next multiple of 16 along `axis`; float8 is padded as bytes (not every device can as float8)."""
    missing = -x.shape[axis] % 16
    if not missing:
        return x
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return F.pad(raw, [0, 0] * (x.dim() - 1 - axis) + [0, missing]).view(x.dtype)


class _Differentiable(torch.autograd.Function):
    """scaled_mm has no derivative; this is the emulation's: straight through the rounding, zero where it clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        ctx.layer, ctx.bias = layer, None if bias is None else bias.dtype
        ctx.save_for_backward(x)
        return _linear(layer, x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        grad_x = grad.float() @ layer.decoded(torch.float32)
        if not layer.scheme.act_dynamic:
            grad_x = grad_x * _inside(x.float() / layer.input_scale, FORMATS[layer.scheme.act_dtype].max)
        grad_bias = None if ctx.bias is None else grad.float().reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias)
        return grad_x.to(x.dtype), grad_bias, None


def _inside(x: Tensor, top: float) -> Tensor:
    """The derivative of clamp, which at ±top is 1 or 0 by torch's version; the emulation has the same."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (inside,) = torch.autograd.grad(x.clamp(-top, top).sum(), x)
    return inside
