"""FP8Embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anyfp8.layers.mixin import FP8Layer
from anyfp8.numerics import decode, expand_scale


class FP8Embedding(FP8Layer, nn.Embedding):
    """An `nn.Embedding` with an FP8 table: only the rows that are looked up are decoded."""

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape → [..., embedding_dim], in the compute dtype."""
        tile, scale = self.scheme.tile, self.weight_scale
        rows = decode(self.weight_codes[input], self.scheme.weight_dtype)
        if scale.shape[0] > 1:
            scale = scale[torch.div(input, tile[0], rounding_mode="floor")]
        else:
            scale = scale.reshape(*[1] * input.dim(), -1)
        return (rows * expand_scale(scale, rows.shape, (1,) * input.dim() + (tile[1],))).to(self.compute_dtype)
