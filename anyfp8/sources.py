"""Where a layer's codes and scales are in the files, and how the stored form becomes the one inside.

Inside, codes are uint8 of the module's [out, in, ...] orientation (FP6 and FP4 packed, low nibble first), and scales
are float32 multipliers of the tile's grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyfp8.checkpoint import TensorRef
from anyfp8.errors import Problem
from anyfp8.numerics import FORMATS, decode, decode_e5m3, decode_e8m0, dtype_name, logical_shape, unswizzle

#: dtype words that ordinary scales and plain weights are stored in
FLOATS = ("F64", "F32", "F16", "BF16")


def problem_of(kind: str, ref: TensorRef, detail: str) -> Problem:
    """A problem of a stored tensor."""
    return Problem(kind, ref.name, detail, ref.file)


def plain_values(ref: TensorRef) -> Tensor:
    """A plain tensor's values; float32 where they are stored as FP8 without a scale (not every device casts FP8)."""
    value = ref.read()
    return decode(value.view(torch.uint8), dtype_name(value.dtype)) if ref.is_fp8 else value


@dataclass(frozen=True)
class Codes:
    """A quantized weight in the files.

    ref: the stored tensor. format: a key of `numerics.FORMATS`. transposed: stored [in, out]. high_first: FP4 with the
    even column in the high nibble. crop: the shape of the values, where the stored tensor is padded. index: which slice
    of the first axis, where several layers are stacked; rows: which rows of it, where several are fused. raw: FP8 codes
    that the dialect stores as U8. padded_to: both axes are padded to a multiple of it, and only the model knows from
    which size (`fits`).
    """

    ref: TensorRef
    format: str
    transposed: bool = False
    high_first: bool = False
    crop: tuple[int, ...] | None = None
    index: int | None = None
    rows: tuple[int, int] | None = None
    raw: bool = False
    padded_to: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, in the module's orientation (with their padding, until `crop` says what is padding)."""
        if self.crop is not None:
            return self.crop
        shape = logical_shape(_part(self.ref, self.index, self.rows), self.format)
        return shape[::-1] if self.transposed else shape

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is meant."""
        return _nbytes(self.ref, self.index, self.rows)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Can the values have this shape: theirs, or one that padding to `padded_to` makes theirs?"""
        if self.padded_to == 1 or self.crop is not None:
            return shape == self.shape
        whole_bytes = shape[-1:] and shape[-1] * FORMATS[self.format].bits % 8 == 0
        return bool(whole_bytes) and tuple(-(-n // self.padded_to) * self.padded_to for n in shape) == self.shape

    def read(self) -> Tensor:
        """The codes as uint8; the file's own bytes, mapped, wherever the stored form is the one inside."""
        raw = self.ref.read()
        raw = raw if self.index is None else raw[self.index]
        raw = raw if self.rows is None else raw[self.rows[0] : self.rows[1]]
        raw = raw.view(torch.uint8)
        if self.transposed:
            raw = raw.t().contiguous()
        if self.high_first:
            raw = raw << 4 | raw >> 4
        if self.crop is not None and logical_shape(raw.shape, self.format) != self.crop:
            rows, columns = self.crop
            raw = raw[:rows, : columns * FORMATS[self.format].bits // 8].contiguous()
        return raw

    def problem(self) -> Problem | None:
        """What is wrong with the stored dtype or shape, as far as the header tells."""
        bits, dtype = FORMATS[self.format].bits, self.ref.dtype
        if bits == 8 and not (self.raw and dtype == "U8") and dtype_name(self.ref.torch_dtype) != self.format:
            detail = f"is {dtype_name(self.ref.torch_dtype)}, the manifest says {self.format}"
            return problem_of("mismatched", self.ref, detail)
        if bits < 8 and dtype not in ("U8", "I8"):
            return problem_of("mismatched", self.ref, f"is {dtype}; packed {self.format} codes are U8")
        if bits < 8 and len(self.ref.shape) < 2:
            return problem_of("mismatched", self.ref, f"shape {list(self.ref.shape)}, but a matrix is expected")
        if (self.transposed or self.crop is not None or self.padded_to > 1) and len(self.ref.shape) != 2:
            return problem_of("mismatched", self.ref, f"shape {list(self.ref.shape)}, but a matrix is expected")
        return None


@dataclass(frozen=True)
class Scale:
    """A scale, or a zero point, in the files.

    encoding: "float" (any float dtype, FP8 included), "e8m0" (exponent bytes), "e4m3", "e5m3" (bytes). swizzled: in
    cuBLAS's 128×4 layout. factor: a further scale, of one value, that multiplies it; divide: that divides it. divisor:
    the number that turns the stored value into a scale, where it is an amax (the format's largest value). index, rows:
    as in `Codes` (rows counted in the grid). transposed: its last two axes are stored the other way round. inverse:
    values are stored that divide (1 / scale).
    """

    ref: TensorRef
    encoding: str = "float"
    swizzled: bool = False
    factor: TensorRef | None = None
    divide: bool = False
    divisor: float = 1.0
    index: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    inverse: bool = False

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """The stored tensors."""
        return (self.ref,) if self.factor is None else (self.ref, self.factor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part that is meant."""
        shape = _part(self.ref, self.index, self.rows)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is meant."""
        return _nbytes(self.ref, self.index, self.rows) + (0 if self.factor is None else self.factor.nbytes)

    def read(self, grid: tuple[int, ...]) -> Tensor:
        """The scales as float32 multipliers, shape `grid`."""
        raw = self.ref.read()
        raw = raw if self.index is None else raw[self.index]
        raw = raw if self.rows is None else raw[self.rows[0] : self.rows[1]]
        raw = raw.transpose(-1, -2) if self.transposed else raw
        if self.encoding == "e8m0":
            value = decode_e8m0(raw.view(torch.uint8))
        elif self.encoding == "e5m3":
            value = decode_e5m3(raw.view(torch.uint8))
        elif self.encoding == "e4m3" or self.ref.is_fp8:
            value = decode(raw.view(torch.uint8), dtype_name(raw.dtype) if self.ref.is_fp8 else "float8_e4m3fn")
        else:
            value = raw.float()
        value = unswizzle(value, *grid) if self.swizzled else value.reshape(grid)
        value = value if self.divisor == 1.0 else value / self.divisor
        value = 1.0 / value if self.inverse else value
        if self.factor is not None:
            factor = self.factor.read().float().reshape(())
            value = value / factor if self.divide else value * factor
        return value

    def problems(self, grid: tuple[int, ...], what: str) -> list[Problem]:
        """What is wrong with the stored dtype or shape; `what` says in words why it must be this grid."""
        found = []
        good = {"e8m0": ("F8_E8M0", "U8"), "e4m3": ("F8_E4M3", "U8"), "e5m3": ("U8",)}
        if self.ref.dtype not in good.get(self.encoding, (*FLOATS, "F8_E4M3")):
            found.append(problem_of("mismatched", self.ref, f"a scale can't be {self.ref.dtype}"))
        if self.factor is not None and (self.factor.dtype not in FLOATS or set(self.factor.shape) - {1}):
            detail = f"{self.factor.dtype} {list(self.factor.shape)}, but one float is expected"
            found.append(problem_of("mismatched", self.factor, detail))
        padded = torch.Size([-(-grid[0] // 128) * 128, -(-grid[1] // 4) * 4]).numel() if self.swizzled else 0
        fits = torch.Size(self.shape).numel() == padded if self.swizzled else _says_grid(self.shape, grid)
        if not fits:
            found.append(problem_of("mismatched", self.ref, f"shape {list(self.shape)}, but {what} needs {list(grid)}"))
        return found


def _part(ref: TensorRef, index: int | None, rows: tuple[int, int] | None) -> tuple[int, ...]:
    shape = ref.shape if index is None else ref.shape[1:]
    return shape if rows is None else (rows[1] - rows[0], *shape[1:])


def _nbytes(ref: TensorRef, index: int | None, rows: tuple[int, int] | None) -> int:
    return ref.nbytes * torch.Size(_part(ref, index, rows)).numel() // max(torch.Size(ref.shape).numel(), 1)


def _says_grid(stored: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Can a scale of shape `stored` only mean this grid? Sizes of 1 may be missing or extra, order may not change."""
    squeezed = [n for n in grid if n != 1]
    if len(stored) == len(grid):  # a transposed [1, N] beside a [N, 1] grid has the right count but the wrong meaning
        return stored == grid or (not squeezed and set(stored) == {1})
    flat = torch.Size(grid).numel()
    return [n for n in stored if n != 1] == squeezed or (len(stored) == 1 and stored[0] == flat)
