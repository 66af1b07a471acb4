"""Scale grids described by a `tile`, the shape of the patch that shares one scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyfp8.numerics.codes import FORMATS, decode, quantize


def grid_shape(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """How many tiles cover each axis; the last tile of an axis may be clipped.

    >>> grid_shape((300, 64), (128, -1))
    (3, 1)
    """
    if len(tile) != len(shape):
        raise ValueError(f"tile {tuple(tile)} has {len(tile)} axes, the tensor {tuple(shape)} has {len(shape)}")
    return tuple(1 if t == -1 else -(-n // t) for n, t in zip(shape, tile, strict=True))


def expand_scale(scale: Tensor, shape: Sequence[int], tile: Sequence[int]) -> Tensor:
    """A grid of scales, shape `grid_shape(shape, tile)`, made broadcastable over a tensor of `shape`.

    Axes with one scale, or with one scale per element, are left to broadcasting.
    """
    for axis, (n, t) in enumerate(zip(shape, tile, strict=True)):
        if t > 1 and scale.shape[axis] > 1:
            scale = scale.repeat_interleave(t, axis).narrow(axis, 0, n)
    return scale


def dequantize(
    codes: Tensor,
    scale: Tensor,
    format: str,
    tile: Sequence[int],
    dtype: torch.dtype,
    zero_point: Tensor | None = None,
) -> Tensor:
    """`(decode(codes) − zero_point) × scale` in float32 (float64 for a float64 `dtype`), rounded once to `dtype`.

    codes: uint8, any shape (packed for FP6, FP4). scale, zero_point: float32, shape `grid_shape(shape, tile)` of the
    values' shape.
    """
    values = decode(codes, format, torch.float64 if dtype == torch.float64 else torch.float32)
    if zero_point is not None:
        values = values - expand_scale(zero_point, values.shape, tile)
    return (values * expand_scale(scale, values.shape, tile)).to(dtype)


def tile_amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Largest magnitude in each tile, shape `grid_shape(x.shape, tile)`, float32. NaN if a tile holds a NaN."""
    grid = grid_shape(x.shape, tile)
    if not x.numel():  # an empty batch
        return x.new_zeros(grid, dtype=torch.float32)
    x = x.abs()
    for axis, (n, t) in enumerate(zip(tuple(x.shape), tile, strict=True)):
        if t == -1 or n <= t:
            x = x.amax(axis, keepdim=True)
        elif t > 1:
            if n % t:
                pad = [0, 0] * (x.dim() - axis - 1) + [0, t - n % t]
                x = torch.nn.functional.pad(x, pad)
            x = x.reshape(*x.shape[:axis], -1, t, *x.shape[axis + 1 :]).amax(axis + 1)
    return x.reshape(grid).float()


def quantize_tiled(x: Tensor, format: str, tile: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Quantize a weight with one scale per tile: scale = amax / max(format), or 1 where a tile is all zero.

    Returns (codes float8 of x's shape, scale float32 of shape `grid_shape`). Raises ValueError if x isn't finite.
    """
    x = x.detach().float()
    amax = tile_amax(x, tile)
    if not bool(amax.isfinite().all()):
        raise ValueError("the weight holds NaN or infinite values")
    tiny = torch.finfo(torch.float32).tiny
    scale = torch.where(amax > 0, (amax / FORMATS[format].max).clamp_min(tiny), torch.ones_like(amax))
    return quantize(x / expand_scale(scale, x.shape, tile), format), scale
