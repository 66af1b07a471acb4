"""FP8Linear."""

from __future__ import annotations

from torch import Tensor, nn

from anyfp8.backends.base import round_output
from anyfp8.layers.mixin import FP8Layer, leaf_in_fx


class FP8Linear(FP8Layer, nn.Linear):
    """An `nn.Linear` with an FP8 weight. Input of any rank, [..., in] → [..., out]."""

    @leaf_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] → [..., out_features], in the input's dtype or autocast's."""
        return round_output(self, self.backend.linear(self, input))
