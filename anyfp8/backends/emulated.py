"""The reference: exactly what an FP8 matmul computes, in float32 arithmetic on any device.

The input is rounded to the FP8 grid, products of codes are exact, they are accumulated in float32, multiplied by the
scales, the bias is added, and the result is rounded once to the output dtype. Weight-only layers decode their weight
to the input's dtype and are otherwise ordinary layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from anyfp8.backends.base import Layer, autocasting, input_scale, is_rowwise, output_dtype
from anyfp8.backends.device import DeviceInfo
from anyfp8.numerics import decode, expand_scale, round_to_grid
from anyfp8.scheme import QuantizationScheme

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Emulated:
    """Runs every scheme on every device."""

    name = "emulated"

    def check(self, scheme: QuantizationScheme, shape: Sequence[int], device: DeviceInfo) -> str | None:
        """Accepts everything."""
        return None

    def avoid(self, device: DeviceInfo) -> str | None:
        """Never to be avoided: it is the last resort."""
        return None

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """F.linear on codes; see the module's docstring."""
        return _without_autocast(layer, x, F.linear, 0)

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """The module's own convolution (strides, groups, padding modes) on codes."""
        return _without_autocast(layer, x, layer._conv_forward, layer.weight_codes.dim() - 2)  # type: ignore[attr-defined]


class TorchFp8Static(Emulated):
    """auto-round's name for the static W8A8 emulation; accepts only what auto-round's own backend of that name does."""

    name = "auto_round:torch_fp8_static"

    def check(self, scheme: QuantizationScheme, shape: Sequence[int], device: DeviceInfo) -> str | None:
        """Accepts e4m3fn weights with a static e4m3fn input."""
        if not scheme.static:
            return "auto_round:torch_fp8_static needs a static input scale (act_dynamic false)"
        if (scheme.weight_dtype, scheme.act_dtype) != ("float8_e4m3fn", "float8_e4m3fn"):
            return "auto_round:torch_fp8_static needs e4m3fn weights and inputs"
        return None


class Dequantized(Emulated):
    """Another contract, only on request: the weight is decoded at each call, the input is left as it is."""

    name = "dequantized"

    def avoid(self, device: DeviceInfo) -> str | None:
        """Never chosen by auto: it ignores the input's quantization."""
        return "it leaves the input unquantized, another contract than the checkpoint's"

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """F.linear with the decoded weight."""
        return _weight_only(layer, x, F.linear)

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """The module's own convolution with the decoded weight."""
        return _weight_only(layer, x, layer._conv_forward)  # type: ignore[attr-defined]


def _weight_only(layer: Layer, x: Tensor, op: Op) -> Tensor:
    dtype = output_dtype(x)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return op(x.to(dtype), layer.decoded(dtype), bias)


def _without_autocast(layer: Layer, x: Tensor, op: Op, spatial: int) -> Tensor:
    if layer.scheme.act_dtype is None:
        return _weight_only(layer, x, op)
    dtype = output_dtype(x)
    if autocasting(x):  # it would round the float32 accumulation to its own dtype
        with torch.autocast(x.device.type, enabled=False):
            return _quantized(layer, x, op, spatial, layer.scheme.act_dtype).to(dtype)
    return _quantized(layer, x, op, spatial, layer.scheme.act_dtype).to(dtype)


def _quantized(layer: Layer, x: Tensor, op: Op, spatial: int, act_dtype: str) -> Tensor:
    """The float32 result. `spatial`: how many dimensions follow the channels in the output (0 for linear)."""
    scheme, weight_scale = layer.scheme, layer.weight_scale
    scale = input_scale(layer, x)
    spread = expand_scale(scale, x.shape, (1,) * (x.dim() - 1) + (scheme.act_tile[1],))
    shifted = x.float() / spread
    if layer.input_zero_point is not None:
        shifted = shifted + layer.input_zero_point
    # only a scale that is not rounded itself keeps every value within the format's range
    rounded = round_to_grid(shifted, act_dtype, saturate=not (scheme.act_dynamic and scheme.act_scale == "float32"))
    per_token = scheme.act_tile[0] != -1
    shifts = layer.input_zero_point is not None or layer.weight_zero_point is not None
    if is_rowwise(scheme.tile) and scheme.act_tile[1] == -1 and not (per_token and spatial) and not shifts:
        # scales that are constant along the sum stay outside it: the operands are codes, exact in any dtype
        y = op(rounded, decode(layer.weight_codes, scheme.weight_dtype), None)
        y = y * (scale if per_token else scale.reshape(1)) * weight_scale.reshape(-1, *[1] * spatial)
    else:
        centred = rounded if layer.input_zero_point is None else rounded - layer.input_zero_point
        y = op(centred * spread, layer.decoded(torch.float32), None)
    return y if layer.bias is None else y + layer.bias.float().reshape(-1, *[1] * spatial)
