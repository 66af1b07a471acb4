"""How scales are stored (E8M0, E5M3, swizzled) and how those of an input are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from anyfp8.numerics.codes import FORMATS, decode, quantize
from anyfp8.numerics.tiles import tile_amax

#: Dynamic scales come from an amax of at least this: a row of zeros stays zero instead of becoming 0/0.
AMAX_FLOOR = 1e-12


def decode_e8m0(codes: Tensor) -> Tensor:
    """uint8 exponents → float32: 2^(byte − 127), 255 is NaN (OCP Microscaling specification v1.0, section 5.4.1)."""
    bits = codes.to(torch.int32) << 23
    values = torch.where(codes == 0, torch.full_like(bits, 1 << 22), bits).view(torch.float32)  # 2^-127 is subnormal
    return values.masked_fill(codes == 255, float("nan"))


@lru_cache(maxsize=1)
def _e5m3_values() -> Tensor:
    codes = range(255)
    values = [(c & 7) * 2.0**-17 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 15) for c in codes]
    return torch.tensor([*values, float("nan")], dtype=torch.float32, device="cpu")


def decode_e5m3(codes: Tensor) -> Tensor:
    """uint8 → float32: unsigned, 5 exponent bits (bias 15), 3 mantissa bits, 0xFF is NaN (auto-round's NVFP4_E5M3)."""
    return _e5m3_values().to(codes.device)[codes.to(torch.int64)]


def _round_to_e5m3(x: Tensor) -> Tensor:
    """Non-negative float32 → nearest E5M3 value, ties to even, saturating at 114688."""
    x = x.clamp(max=1.75 * 2.0**16)
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_min(2.0**-14)
    step = binade * (1.5 * 2.0**20)
    return (x + step) - step


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Undo cuBLAS's 128×4 block-scale layout → [rows, columns], cutting off its padding.

    Source: cuBLAS documentation, "1D Block Scaling Factors Layout": tiles of 128 rows × 4 columns, in which row
    32·i + j, column c lies at 16·j + 4·i + c. Stored tensors have any shape with the right number of elements.
    """
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    tiles = scale.reshape(row_tiles, column_tiles, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns]


def dynamic_scale(
    x: Tensor, format: str, act_tile: Sequence[int], kind: str = "float32", outer: Tensor | None = None
) -> Tensor:
    """Scale of an input of any rank, computed from its values.

    act_tile (−1, −1): one scale, shape (1,) * rank. (1, −1): per token, (..., 1). (1, g): per group, (..., ⌈K / g⌉).
    kind: "float32": amax / max(format), amax at least `AMAX_FLOOR`. "e8m0_*": a power of two: "floor" 2^(⌊log2 amax⌋ −
    emax), "even" the same after rounding amax to the format's mantissa (compressed-tensors), "ceil" the smallest with
    amax / scale ≤ max. "e4m3": NVFP4's two levels, e4m3(amax / max / outer) × outer. "e5m3": e5m3(amax / max).
    """
    rank = max(x.dim(), 1)
    tile = (-1,) * rank if act_tile[0] == -1 else (1,) * (rank - 1) + (act_tile[1],)
    amax = tile_amax(x.detach().reshape(x.shape or (1,)), tile)
    top = FORMATS[format].max
    if kind == "float32":
        return amax.clamp_min(AMAX_FLOOR) / top
    if kind == "e4m3":
        assert outer is not None
        inner = decode(quantize(amax / top / outer, "float8_e4m3fn").view(torch.uint8), "float8_e4m3fn")
        return _nonzero(inner * outer)
    if kind == "e5m3":
        return _nonzero(_round_to_e5m3(amax / top))
    return _power_of_two(amax, format, kind.removeprefix("e8m0_"))


def _nonzero(scale: Tensor) -> Tensor:
    # where a block's scale underflows to 0 its values become 0: x / inf = 0, and 0 × inf never happens as 0 is rounded
    return torch.where(scale == 0, torch.full_like(scale, torch.finfo(torch.float32).max), scale)


def _power_of_two(amax: Tensor, format: str, rounding: str) -> Tensor:
    spec = FORMATS[format]
    if rounding == "ceil":
        fraction, exponent = torch.frexp(amax / spec.max)  # in [0.5, 1): 2^e is the next power of two, unless exact
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    else:
        if rounding == "even":
            # compressed-tensors adds a quarter (fp6: a sixteenth) of the binade's last bit before truncating
            bump = 1 << (23 - spec.mantissa - 1) if spec.bits < 8 else 1 << 21
            amax = (amax.view(torch.int32) + bump).view(torch.float32)
        emax = torch.frexp(torch.tensor(spec.max)).exponent.to(amax.device) - 1
        exponent = torch.frexp(amax).exponent - 1 - emax
    exponent = torch.where(amax == 0, torch.full_like(exponent, -127), exponent)
    scale = torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127))
    return torch.where(amax.isfinite(), scale, amax)  # NaN and inf inputs stay visible
