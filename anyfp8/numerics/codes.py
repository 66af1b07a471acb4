"""FP8, FP6 and FP4 codes: saturating quantization and exact decoding.

Formats are those of "FP8 Formats for Deep Learning" (Micikevicius et al., arXiv:2209.05433; `fn` = finite, no
infinity) and, for the `fnuz` variants (no negative zero, one NaN), "8-bit Numerical Formats for Deep Neural Networks"
(Noune et al., arXiv:2206.02915). FP4 E2M1 and FP6 E2M3 are those of the OCP Microscaling specification v1.0.
Codes are bytes (packed if narrower); `real = code value × scale`, and the scale is dimensionless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Format:
    """One format: torch dtype of its codes (uint8 where several are packed into bytes), largest finite value, mantissa
    bits, exponent bias, NaN codes, and bits per code."""

    dtype: torch.dtype
    max: float
    mantissa: int
    bias: int
    nan_codes: tuple[int, ...] = ()
    bits: int = 8


FORMATS: dict[str, Format] = {
    "float8_e4m3fn": Format(torch.float8_e4m3fn, 448.0, 3, 7, (0x7F, 0xFF)),
    "float8_e5m2": Format(torch.float8_e5m2, 57344.0, 2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e4m3fnuz": Format(torch.float8_e4m3fnuz, 240.0, 3, 8, (0x80,)),
    "float8_e5m2fnuz": Format(torch.float8_e5m2fnuz, 57344.0, 2, 16, (0x80,)),
    "float6_e2m3fn": Format(torch.uint8, 7.5, 3, 1, bits=6),
    "float4_e2m1fn": Format(torch.uint8, 6.0, 1, 1, bits=4),
}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float8_e4m3fn` → `"float8_e4m3fn"`."""
    return str(dtype).removeprefix("torch.")


def quantize(x: Tensor, format: str) -> Tensor:
    """Round `x` (float32 or narrower, already divided by its scale) to the nearest FP8 value, ties to even.

    Values beyond the largest finite one saturate (infinities too), NaN stays NaN. Returns float8 of the same shape; for
    FP6 and FP4 packed uint8 (see `unpack`), whose last dimension must fill whole bytes.
    The clamp comes first because casts don't agree: e4m3fn overflow was NaN before torch 2.12, e5m2 still gives inf.
    """
    spec = FORMATS[format]
    if spec.bits < 8:
        return _pack(round_to_grid(x.float(), format), spec)
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


def logical_shape(codes: Sequence[int], format: str) -> tuple[int, ...]:
    """Shape of the values in a code tensor of this shape: packed formats hold 8 / bits of them in a byte.

    >>> logical_shape((16, 32), "float4_e2m1fn"), logical_shape((16, 24), "float6_e2m3fn")
    ((16, 64), (16, 32))
    """
    bits = FORMATS[format].bits
    return tuple(codes) if bits == 8 or not codes else (*codes[:-1], codes[-1] * 8 // bits)


def unpack(codes: Tensor, format: str) -> Tensor:
    """One code a byte. FP4: the low nibble is the even column. FP6: four codes, little-endian, in three bytes."""
    if FORMATS[format].bits == 4:
        return torch.stack((codes & 0x0F, codes >> 4), -1).flatten(-2)
    first, second, third = _groups(codes, 3).to(torch.int32).unbind(-1)
    word = first | second << 8 | third << 16
    return torch.stack([(word >> shift) & 0x3F for shift in (0, 6, 12, 18)], -1).flatten(-2).to(torch.uint8)


def _groups(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:-1], -1, size)


def _pack(values: Tensor, spec: Format) -> Tensor:
    # on-grid values: their float16 bits hold sign, 2 exponent bits (after the bias) and the mantissa
    half = (values * 2.0 ** (spec.bias - 15)).half().view(torch.int16).to(torch.int32)
    magnitude = (half & 0x7FFF) >> (10 - spec.mantissa)
    code = magnitude | ((half >> 15) & 1) << (spec.bits - 1)
    if spec.bits == 4:
        low, high = _groups(code, 2).unbind(-1)
        return (low | high << 4).to(torch.uint8)
    a, b, c, d = _groups(code, 4).unbind(-1)
    word = a | b << 6 | c << 12 | d << 18
    return torch.stack((word & 0xFF, (word >> 8) & 0xFF, (word >> 16) & 0xFF), -1).flatten(-2).to(torch.uint8)


def decode(codes: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact value of each code (uint8, any shape), as `dtype`; NaN codes give NaN, e5m2's infinities inf.

    Done on the bits: shifting a code into a float16's exponent and mantissa gives its value times a power of two, which
    is several times faster on a CPU than torch's own float8 casts. Packed formats give `logical_shape(codes.shape)`.
    """
    spec = FORMATS[format]
    if spec.bits < 8:
        bits = unpack(codes, format).to(torch.int16)
        sign, magnitude = 1 << (spec.bits - 1), (1 << (spec.bits - 1)) - 1
        half = (bits & magnitude) << (10 - spec.mantissa) | (bits & sign) << (16 - spec.bits)
        return half.view(torch.float16).to(dtype).mul_(2.0 ** (15 - spec.bias))
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
    # e5m2 has infinities just below its NaNs; the other FP8 formats have none, FP6 and FP4 have neither
    if spec.bits < 8:
        return torch.zeros_like(codes, dtype=torch.bool)
    return (codes & 0x7F) >= 0x7C if spec.dtype == torch.float8_e5m2 else _is_nan(codes, spec)


def count_nonfinite(codes: Tensor, format: str, chunk: int = 1 << 20) -> int:
    """How many codes (uint8, any shape) are NaN or infinite; looks at `chunk` bytes at a time, without a copy."""
    spec = FORMATS[format]
    flat = codes.reshape(-1)
    return sum(int(_is_nonfinite(flat[i : i + chunk], spec).count_nonzero()) for i in range(0, flat.numel(), chunk))
