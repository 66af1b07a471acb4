"""`FP8Storage`: codes and scales as buffers that keep their bytes through every cast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8.numerics import dequantize, logical_shape
from anyfp8.scheme import QuantizationScheme

#: the buffers, of which all but the first two may be None
STORED = ("weight_codes", "weight_scale", "input_scale", "weight_zero_point", "input_zero_point", "output_scale")


class FP8Storage(nn.Module):
    """Buffers `weight_codes` (uint8), `weight_scale`, `input_scale` and, where the scheme has them, zero points and
    `output_scale` (float32); and the dtype they decode to.

    `.to(dtype)`, `.half()` ... change `compute_dtype` only; `.to(device)` moves the bytes.
    """

    scheme: QuantizationScheme
    weight_codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    weight_zero_point: Tensor | None
    input_zero_point: Tensor | None
    output_scale: Tensor | None
    compute_dtype: torch.dtype

    def _store(
        self, scheme: QuantizationScheme, values: Mapping[str, Tensor | None], compute_dtype: torch.dtype
    ) -> None:
        self.scheme, self.compute_dtype = scheme, compute_dtype
        for name in STORED:
            self.register_buffer(name, values.get(name))

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the codes' values, [out, in, ...]."""
        return logical_shape(self.weight_codes.shape, self.scheme.weight_dtype)

    def decoded(self, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """The weight as real values [out, in, ...]: code × scale in float32, rounded once to `dtype`.

        index: only this slice of the first axis, where tiles don't reach over several.
        """
        tile, codes, scale, zero_point = self.scheme.tile, self.weight_codes, self.weight_scale, self.weight_zero_point
        if index is not None:
            assert tile[0] == 1, "a tile that reaches over several slices"
            tile, codes, scale = tile[1:], codes[index], scale[index]
            zero_point = None if zero_point is None else zero_point[index]
        return dequantize(codes, scale, self.scheme.weight_dtype, tile, dtype, zero_point)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        buffers = {name: self._buffers.pop(name) for name in STORED}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            # fn sees bytes, which casts to a float dtype leave alone; should it convert them all the same (a bare
            # `lambda t: t.half()`), only the move to another device is taken over
            for name, buffer in buffers.items():
                if buffer is not None:
                    # floats as flat bytes, so that no memory format tears one apart
                    raw = buffer if buffer.dtype == torch.uint8 else buffer.contiguous().view(-1).view(torch.uint8)
                    moved = fn(raw)
                    moved = moved if moved.dtype == torch.uint8 else raw.to(moved.device)
                    moved = moved if raw is buffer else moved.view(buffer.dtype).view(buffer.shape)
                    if torch._has_compatible_shallow_copy_type(buffer, moved):
                        buffer.data = moved  # as for parameters: layers that are tied hold the same tensor
                    else:
                        buffer = moved
                self._buffers[name] = buffer
        probe = torch.empty(0, dtype=self.compute_dtype, device=self.weight_codes.device)
        self.compute_dtype = fn(probe).dtype
        return self
