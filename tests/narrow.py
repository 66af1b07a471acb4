"""Packed FP4 and FP6, power-of-two and two-level scales, made and read without anyfp8: values come from ml_dtypes."""

import ml_dtypes
import numpy as np
import torch

from tests.helpers import code_values, oracle_round

FP4, FP6, E4M3 = "float4_e2m1fn", "float6_e2m3fn", "float8_e4m3fn"
BITS = {FP4: 4, FP6: 6, E4M3: 8}
TOP = {FP4: 6.0, FP6: 7.5, E4M3: 448.0}
EMAX = {FP4: 2, FP6: 2, E4M3: 8}


def draw(format, rows, columns, seed=0):
    """(codes as stored, float64 values) of a random weight; no NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** BITS[format], (rows, columns), generator=generator).to(torch.uint8)
    if format == E4M3:
        codes = torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes)
        return codes.view(torch.float8_e4m3fn), torch.from_numpy(code_values(E4M3))[codes.long()]
    values = np.arange(2 ** BITS[format], dtype=np.uint8).view(getattr(ml_dtypes, format)).astype(np.float64)
    return pack(codes, BITS[format]), torch.from_numpy(values)[codes.long()]


def pack(codes, bits):
    """Little-endian: the first column is in the lowest bits."""
    stream = ((codes.long()[..., None] >> torch.arange(bits)) & 1).reshape(codes.shape[0], -1, 8)
    return (stream << torch.arange(8)).sum(-1).to(torch.uint8)


def exponents(rows, columns, seed=1):
    """(bytes, float64 scales): real = 2^(byte − 127)."""
    stored = torch.randint(118, 130, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return stored, torch.exp2(stored.double() - 127)


def spread(scale, size, columns):
    """Scales of groups of columns, one for each column."""
    return scale.repeat_interleave(size, 1)[:, :columns]


def rounded(x, format):
    """float64 values of the nearest codes, ties to even, saturating."""
    if format == E4M3:
        return oracle_round(x, E4M3)
    top = TOP[format]
    nearest = np.clip(x.double().numpy(), -top, top).astype(np.float32).astype(getattr(ml_dtypes, format))
    return torch.from_numpy(nearest.astype(np.float64))


def groups(x, size):
    """The largest magnitude of each group of columns, for each of its columns."""
    parts = [part.abs().amax(-1, keepdim=True).expand(part.shape) for part in x.double().split(size, -1)]
    return torch.cat(parts, -1)


def mx_input(x, format, rounding):
    """An input after MX rounding, float64."""
    amax = groups(x, 32)
    if rounding == "ceil":
        exponent = torch.ceil(torch.log2(amax / TOP[format]))
    else:
        exponent = torch.floor(torch.log2(amax))
        if rounding == "even":  # the binade's last quarter (FP6: sixteenth) counts as the next binade
            exponent += (amax / torch.exp2(exponent) >= (1.9375 if format == FP6 else 1.75)).double()
        exponent = exponent - EMAX[format]
    scale = torch.exp2(exponent)
    return rounded(x.double() / scale, format) * scale


def nv_input(x, outer):
    """An input after NVFP4's rounding with the file's `input_global_scale`, float64."""
    inner = rounded((groups(x, 16) / 6 * outer).float(), E4M3)
    scale = (inner / outer).float().double()
    return torch.where(scale > 0, rounded(x.double() / scale.clamp_min(1e-30), FP4) * scale, 0.0)


def linear(x, weight, bias=None):
    """float64 x @ weight.T + bias."""
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
