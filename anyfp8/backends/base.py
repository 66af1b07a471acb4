"""What a backend is, and what it sees of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from anyfp8.backends.device import DeviceInfo
from anyfp8.numerics import dynamic_scale, round_to_grid
from anyfp8.scheme import QuantizationScheme


class Layer(Protocol):
    """The parts of an FP8 layer that a backend computes with."""

    scheme: QuantizationScheme
    weight_codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    weight_zero_point: Tensor | None
    input_zero_point: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """Any float dtype, shape [out]."""

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The weight as real values."""


class Rounds(Protocol):
    """The parts of an FP8 layer that rounding its output needs."""

    scheme: QuantizationScheme
    output_scale: Tensor | None


class Backend(Protocol):
    """One way to compute FP8 layers. Stateless, chosen before the forward, never inside it."""

    @property
    def name(self) -> str:
        """What users call it."""

    def check(self, scheme: QuantizationScheme, shape: Sequence[int], device: DeviceInfo) -> str | None:
        """Why this backend can't compute a layer with this scheme and weight shape on this device; None if it can."""

    def avoid(self, device: DeviceInfo) -> str | None:
        """Why `auto` should not choose it on this device although it could compute; None if it should."""

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """x [..., in] → [..., out], in x's dtype or autocast's."""

    def conv(self, layer: Layer, x: Tensor) -> Tensor:
        """The layer's convolution of x, in x's dtype or autocast's."""


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype that the float layer's output would have: x's own, or autocast's (which leaves float64 alone)."""
    if x.dtype != torch.float64 and autocasting(x):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def autocasting(x: Tensor) -> bool:
    """Is autocast on for x's device? (There is none for meta, and asking is an error.)"""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def input_scale(layer: Layer, x: Tensor) -> Tensor:
    """The scale of an input: the file's (shape (1,)), or computed (see `numerics.dynamic_scale`)."""
    scheme = layer.scheme
    if not scheme.act_dynamic:
        assert layer.input_scale is not None
        return layer.input_scale
    assert scheme.act_dtype is not None
    return dynamic_scale(x, scheme.act_dtype, scheme.act_tile, scheme.act_scale, layer.input_scale)


def round_output(layer: Rounds, y: Tensor) -> Tensor:
    """The output as the scheme's `out_dtype` holds it, scaled by the file's `output_scale`; y itself if it has none."""
    if layer.output_scale is None:
        return y
    assert layer.scheme.out_dtype is not None
    return (round_to_grid(y.float() / layer.output_scale, layer.scheme.out_dtype) * layer.output_scale).to(y.dtype)


def is_rowwise(tile: Sequence[int]) -> bool:
    """True for the tiles whose scale can be taken out of a dot product: per tensor and per output channel."""
    return set(tile[1:]) <= {-1} and tile[0] in (-1, 1)
