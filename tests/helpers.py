"""Plain functions that the tests share: comparisons, an independent FP8 oracle, hand-made files, FP8 layers.

The oracle takes nothing from anyfp8: code values come from ml_dtypes, rounding is a search among the 256 of them, and
sums are float64.
"""

import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from torch import nn

from anyfp8.layers import FP8Conv1d, FP8Conv2d, FP8Conv3d, FP8Embedding, FP8Linear
from anyfp8.scheme import QuantizationScheme

E4M3, E5M2, E4M3Z, E5M2Z = ORACLES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
MAX = {E4M3: 448.0, E5M2: 57344.0, E4M3Z: 240.0, E5M2Z: 57344.0}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# --- data ---
def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- comparisons ---
def bytes_of(tensor):
    """The bytes of a tensor in logical order."""
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same_bytes(got, want):
    assert got.dtype == want.dtype, f"{got.dtype} is not {want.dtype}"
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    assert bytes_of(got) == bytes_of(want), "the bytes differ"


def max_relative_error(got, want):
    """Largest error as a part of the largest wanted magnitude."""
    got, want = got.detach().double(), want.detach().double()
    scale = want.abs().max() if want.numel() else want.new_ones(())
    return float((got - want).abs().max() / scale) if want.numel() and scale > 0 else float(got.abs().sum())


def assert_close(got, want, tolerance=1e-6):
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    assert torch.isfinite(got).all(), "not finite"
    assert torch.isfinite(want).all(), "the wanted values are not finite"
    error = max_relative_error(got, want)
    assert error <= tolerance, f"max relative error {error:.3g} > {tolerance:.3g}"


def sqnr(got, want):
    """Signal to quantization noise, in dB."""
    got, want = got.detach().double(), want.detach().double()
    noise = float((got - want).square().sum())
    return 10 * math.log10(float(want.square().sum()) / noise) if noise else math.inf


# --- the oracle ---
def code_values(format):
    """float64 values of the 256 codes."""
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, format)).astype(np.float64)


def oracle_decode(codes, format):
    return torch.from_numpy(code_values(format))[codes.long()]


def oracle_codes(x, format):
    """Nearest code of each float64 value, ties to the even code, saturating; NaN to a NaN code."""
    values = code_values(format)
    finite = [c for c in range(256) if math.isfinite(values[c]) and (c < 128 or values[c] != 0)]
    order = sorted(finite, key=lambda c: values[c])
    grid = values[order]
    flat = np.clip(np.asarray(x, dtype=np.float64).reshape(-1), grid[0], grid[-1])
    nan = np.isnan(flat)
    flat = np.where(nan, 0.0, flat)
    high = np.clip(np.searchsorted(grid, flat), 1, len(grid) - 1)
    low = high - 1
    down, up = flat - grid[low], grid[high] - flat
    even = np.asarray(order)[low] % 2 == 0
    index = np.where((down < up) | ((down == up) & even), low, high)
    codes = np.asarray(order, dtype=np.uint8)[index]
    nan_code = next(c for c in range(256) if math.isnan(values[c]))
    return torch.from_numpy(np.where(nan, np.uint8(nan_code), codes)).reshape(tuple(np.shape(x)))


def oracle_round(x, format):
    """float64 values of the nearest codes."""
    return oracle_decode(oracle_codes(x.detach().double().numpy(), format), format)


def oracle_expand(scale, shape, tile):
    """A grid of scales spread over `shape`: element i of an axis takes the scale of tile i // t."""
    cells = [np.arange(n) * 0 if t == -1 else np.arange(n) // t for n, t in zip(shape, tile, strict=True)]
    return torch.from_numpy(scale.detach().double().numpy()[np.ix_(*cells)])


def oracle_weight(layer):
    """float64 weight of an FP8 layer."""
    codes = oracle_decode(layer.weight_codes, layer.scheme.weight_dtype)
    return codes * oracle_expand(layer.weight_scale, codes.shape, layer.scheme.tile)


def oracle_input(x, scheme, input_scale=None):
    """float64 values of an input after quantization; `x / scale` is float32 arithmetic, as the contract says."""
    x = x.detach()
    if scheme.act_dtype is None:
        return x.double()
    if not scheme.act_dynamic:
        spread = input_scale.float()
    else:
        rows, group = scheme.act_tile
        amax = x.float().abs()
        if rows == -1:
            amax = amax.amax()
        elif group == -1:
            amax = amax.amax(-1, keepdim=True)
        else:
            parts = [part.amax(-1, keepdim=True).expand(part.shape) for part in amax.split(group, -1)]
            amax = torch.cat(parts, -1)
        spread = amax.clamp_min(1e-12) / MAX[scheme.act_dtype]
    return oracle_round(x.float() / spread, scheme.act_dtype) * spread.double()


def oracle_forward(layer, x):
    """float64 output of an FP8 linear or convolution layer."""
    inputs, weight = oracle_input(x, layer.scheme, layer.input_scale), oracle_weight(layer)
    bias = None if layer.bias is None else layer.bias.detach().double()
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(inputs, weight, bias)
    return layer._conv_forward(inputs, weight, bias)


# --- FP8 layers ---
FP8_TYPES = {
    nn.Linear: FP8Linear,
    nn.Conv1d: FP8Conv1d,
    nn.Conv2d: FP8Conv2d,
    nn.Conv3d: FP8Conv3d,
    nn.Embedding: FP8Embedding,
}


def make_fp8(module, scheme="FP8_STATIC", input_scale=0.02):
    """The FP8 twin of a float layer; `input_scale` is used if the scheme is static."""
    scheme = QuantizationScheme.of(scheme)
    static = torch.tensor([input_scale]) if scheme.static else None
    return FP8_TYPES[type(module)].from_float(module, scheme, static)


def float_linear(k=32, n=16, bias=True, dtype=torch.float32, bias_dtype=None, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Linear(k, n, bias=bias).to(dtype)
    if bias and bias_dtype is not None:
        module.bias.data = module.bias.data.to(bias_dtype)
    return module


# --- files made by hand ---
def safetensors_bytes(header, data=b"", *, length=None):
    """A .safetensors file. header: bytes, or an object for JSON. length: what the file says its header has."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def write_tensors(path, tensors, metadata=None):
    """A well-formed .safetensors file, written without the safetensors package; returns its path."""
    words = {
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.uint8: "U8",
        torch.int64: "I64",
    }
    header = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes_of(tensor)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": words[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    path = Path(path)
    raw = json.dumps(header).encode()
    path.write_bytes(safetensors_bytes(raw + b" " * (-len(raw) % 8), data))  # aligned, as the real writer does
    return path
