"""FP8Embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyfp8.backends.base import round_output
from anyfp8.layers.mixin import FP8Layer, leaf_in_fx
from anyfp8.numerics import decode, expand_scale


class FP8Embedding(FP8Layer, nn.Embedding):
    """An `nn.Embedding` with an FP8 table: only the rows that are looked up are decoded."""

    @leaf_in_fx
    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape → [..., embedding_dim], in the compute dtype."""
        # F.embedding refuses negative indices and masks, which indexing would accept
        work = torch.float64 if self.compute_dtype == torch.float64 else torch.float32
        rows = decode(F.embedding(input, self.weight_codes), self.scheme.weight_dtype, work)
        if self.weight_zero_point is not None:
            rows = rows - self._rows_of(self.weight_zero_point, input)
        return round_output(self, (rows * self._rows_of(self.weight_scale, input)).to(self.compute_dtype))

    def _rows_of(self, grid: Tensor, input: Tensor) -> Tensor:
        """The grid's entries for the rows that are looked up, made broadcastable over them."""
        tile = self.scheme.tile
        if grid.shape[0] > 1:
            grid = grid[torch.div(input, tile[0], rounding_mode="floor")]
        else:
            grid = grid.reshape(*[1] * input.dim(), -1)
        return expand_scale(grid, (*input.shape, self.embedding_dim), (1,) * input.dim() + (tile[1],))
