"""FP8Conv1d, FP8Conv2d, FP8Conv3d."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from anyfp8.backends.base import Layer, round_output
from anyfp8.layers.mixin import FP8Layer, leaf_in_fx


class _FP8Conv(FP8Layer):
    @leaf_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """[N, in, ...] or [in, ...] → [N, out, ...] or [out, ...], in the input's dtype or autocast's."""
        return round_output(self, self.backend.conv(cast(Layer, self), input))


class FP8Conv1d(_FP8Conv, nn.Conv1d):
    """An `nn.Conv1d` with an FP8 weight."""


class FP8Conv2d(_FP8Conv, nn.Conv2d):
    """An `nn.Conv2d` with an FP8 weight."""


class FP8Conv3d(_FP8Conv, nn.Conv3d):
    """An `nn.Conv3d` with an FP8 weight."""
