"""`FP8Storage`: codes and scales as buffers that keep their bytes through every cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8.numerics import dequantize
from anyfp8.scheme import QuantizationScheme


class FP8Storage(nn.Module):
    """Buffers `weight_codes` (uint8), `weight_scale` and `input_scale` (float32), and the dtype they decode to.

    `.to(dtype)`, `.half()` ... change `compute_dtype` only; `.to(device)` moves the bytes.
    """

    scheme: QuantizationScheme
    weight_codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    compute_dtype: torch.dtype

    def _store(
        self,
        scheme: QuantizationScheme,
        codes: Tensor,
        weight_scale: Tensor,
        input_scale: Tensor | None,
        compute_dtype: torch.dtype,
    ) -> None:
        self.scheme, self.compute_dtype = scheme, compute_dtype
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("input_scale", input_scale)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The weight as real values: code × scale in float32, rounded once to `dtype`."""
        return dequantize(self.weight_codes, self.weight_scale, self.scheme.weight_dtype, self.scheme.tile, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        buffers = {name: self._buffers.pop(name) for name in ("weight_codes", "weight_scale", "input_scale")}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            # fn sees bytes, which casts to a float dtype leave alone; should it convert them all the same (a bare
            # `lambda t: t.half()`), only the move to another device is taken over
            for name, buffer in buffers.items():
                if buffer is not None:
                    raw = buffer.view(torch.uint8)
                    moved = fn(raw)
                    moved = moved if moved.dtype == torch.uint8 else raw.to(moved.device)
                    buffer = moved.view(buffer.dtype)
                self._buffers[name] = buffer
        probe = torch.empty(0, dtype=self.compute_dtype, device=self.weight_codes.device)
        self.compute_dtype = fn(probe).dtype
        return self
