"""FP8HFConv1D: transformers' `Conv1D`, a linear layer whose weight is [in, out]. Imported only where one is met."""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from anyfp8.backends.base import round_output
from anyfp8.layers.mixin import FP8Layer, leaf_in_fx


class FP8HFConv1D(FP8Layer, Conv1D):  # type: ignore[misc]
    """A transformers `Conv1D` with FP8 codes, which are [out, in] as in every file; `weight` reads [in, out]."""

    transposed = True

    @leaf_in_fx
    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out], in the input's dtype or autocast's."""
        return round_output(self, self.backend.linear(self, x))
