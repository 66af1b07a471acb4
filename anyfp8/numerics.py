"""FP8 arithmetic: saturating quantization, exact decoding, and scale grids described by a `tile`.

Formats are those of "FP8 Formats for Deep Learning" (Micikevicius et al., arXiv:2209.05433; `fn` = finite, no
infinity) and, for the `fnuz` variants (no negative zero, one NaN), "8-bit Numerical Formats for Deep Neural Networks"
(Noune et al., arXiv:2206.02915). A code is one byte; `real = code value × scale`, and the scale is dimensionless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Dynamic activation scales are at least this amax / max(format): a row of zeros stays zero instead of becoming 0/0.
AMAX_FLOOR = 1e-12


@dataclass(frozen=True)
class Format:
    """One FP8 format: torch dtype, largest finite value, mantissa bits, exponent bias, and its NaN codes."""

    dtype: torch.dtype
    max: float
    mantissa: int
    bias: int
    nan_codes: tuple[int, ...]


FORMATS: dict[str, Format] = {
    "float8_e4m3fn": Format(torch.float8_e4m3fn, 448.0, 3, 7, (0x7F, 0xFF)),
    "float8_e5m2": Format(torch.float8_e5m2, 57344.0, 2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e4m3fnuz": Format(torch.float8_e4m3fnuz, 240.0, 3, 8, (0x80,)),
    "float8_e5m2fnuz": Format(torch.float8_e5m2fnuz, 57344.0, 2, 16, (0x80,)),
}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float8_e4m3fn` → `"float8_e4m3fn"`."""
    return str(dtype).removeprefix("torch.")


def quantize(x: Tensor, format: str) -> Tensor:
    """Round `x` (float32 or narrower, already divided by its scale) to the nearest FP8 value, ties to even.

    Values beyond the largest finite one saturate (infinities too), NaN stays NaN. Returns float8 of the same shape.
    The clamp comes first because casts don't agree: e4m3fn overflow was NaN before torch 2.12, e5m2 still gives inf.
    """
    spec = FORMATS[format]
    return x.clamp(-spec.max, spec.max).to(spec.dtype)


def round_to_grid(x: Tensor, format: str, *, saturate: bool = True) -> Tensor:
    """`decode(quantize(x))` without leaving float32: the nearest FP8 value of each element, saturating, ties to even.

    x: float32. Plain arithmetic, so it runs on devices without float8 dtypes, compiles into one kernel, and has the
    straight-through gradient (identity inside ±max, zero outside). Adding and subtracting 1.5 · 2^(e + 23 − mantissa)
    makes the float32 addition itself round at the format's last bit of the binade 2^e.

    saturate: False if x is known to be at most max (but for a rounding error), as after a dynamic scale; then no
    element's gradient is cut off.
    """
    spec = FORMATS[format]
    if saturate:
        x = x.clamp(-spec.max, spec.max)
    binade = (x.detach().view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min_(2.0 ** (1 - spec.bias))
    step = binade.mul_(1.5 * 2.0 ** (23 - spec.mantissa))
    return (x + step).sub_(step)


def decode(codes: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact value of each code byte (uint8, any shape), as `dtype`; NaN codes give NaN, e5m2's infinities inf.

    Done on the bits: shifting a code into a float16's exponent and mantissa gives its value times a power of two, which
    is several times faster on a CPU than torch's own float8 casts.
    """
    spec = FORMATS[format]
    if format == "float8_e5m2":  # the upper byte of a float16
        return (codes.to(torch.int16) << 8).view(torch.float16).to(dtype)
    if format == "float8_e5m2fnuz":  # its largest exponent would be a float16's infinity: spend an exponent bit less
        signed = (codes.view(torch.int8).to(torch.int32) << 21) & -0x70200000
        values = _rescale_bits(signed, spec, dtype)
    else:
        half = (codes.view(torch.int8).to(torch.int16) << 7) & -0x4001  # sign-extended; bit 14 is a copy of the sign
        values = half.view(torch.float16).to(dtype).mul_(2.0 ** (15 - spec.bias))
    return values.masked_fill_(_is_nan(codes, spec), float("nan"))


def _rescale_bits(bits: Tensor, spec: Format, dtype: torch.dtype) -> Tensor:
    # int32 bits of a float32 whose exponent field still has the FP8 bias. Done in float64: float32 subnormals may be
    # flushed to zero (torch.set_flush_denormal), and the rare format need not be fast.
    exponent, fraction = (bits >> 23) & 0xFF, (bits & 0x7FFFFF).double() * 2.0**-23
    normal = torch.ldexp(1.0 + fraction, exponent - spec.bias)
    value = torch.where(exponent > 0, normal, fraction * 2.0 ** (1 - spec.bias))
    return torch.where(bits < 0, -value, value).to(dtype)


def _is_nan(codes: Tensor, spec: Format) -> Tensor:
    if spec.nan_codes == (0x80,):
        return codes == 0x80
    return (codes & 0x7F) >= min(spec.nan_codes)


def _is_nonfinite(codes: Tensor, spec: Format) -> Tensor:
    # e5m2 has infinities just below its NaNs; the other formats have none
    return (codes & 0x7F) >= 0x7C if spec.dtype == torch.float8_e5m2 else _is_nan(codes, spec)


def count_nonfinite(codes: Tensor, format: str, chunk: int = 1 << 22) -> int:
    """How many codes (uint8, any shape) are NaN or infinite; looks at `chunk` bytes at a time, without a copy."""
    spec = FORMATS[format]
    flat = codes.reshape(-1)
    return sum(int(_is_nonfinite(flat[i : i + chunk], spec).sum()) for i in range(0, flat.numel(), chunk))


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


def dequantize(codes: Tensor, scale: Tensor, format: str, tile: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`decode(codes) × scale` in float32 (float64 for a float64 `dtype`), rounded once to `dtype`.

    codes: uint8, any shape. scale: float32, shape `grid_shape(codes.shape, tile)`.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    return (decode(codes, format, work) * expand_scale(scale, codes.shape, tile)).to(dtype)


def tile_amax(x: Tensor, tile: Sequence[int]) -> Tensor:
    """Largest magnitude in each tile, shape `grid_shape(x.shape, tile)`, float32. NaN if a tile holds a NaN."""
    grid = grid_shape(x.shape, tile)
    x = x.abs()
    for axis, (n, t) in enumerate(zip(tuple(x.shape), tile, strict=True)):
        if t == -1 or n <= t:
            x = x.amax(axis, keepdim=True) if n else x.new_zeros(()).expand(*x.shape[:axis], 1, *x.shape[axis + 1 :])
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


def dynamic_scale(x: Tensor, format: str, act_tile: Sequence[int]) -> Tensor:
    """Scale of an input of any rank, computed from its values: amax / max(format), with amax at least `AMAX_FLOOR`.

    act_tile (−1, −1): one scale, shape (1,) * rank. (1, −1): per token, (..., 1). (1, g): per group, (..., ⌈K / g⌉).
    """
    rank = max(x.dim(), 1)
    tile = (-1,) * rank if act_tile[0] == -1 else (1,) * (rank - 1) + (act_tile[1],)
    return tile_amax(x.detach().reshape(x.shape or (1,)), tile).clamp_min(AMAX_FLOOR) / FORMATS[format].max
