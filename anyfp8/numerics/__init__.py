"""The arithmetic: codes (FP8, FP6, FP4), grids of scales described by a tile, stored and computed scales."""

from anyfp8.numerics.codes import (
    FORMATS,
    Format,
    count_nonfinite,
    decode,
    dtype_name,
    logical_shape,
    quantize,
    round_to_grid,
    unpack,
)
from anyfp8.numerics.scales import AMAX_FLOOR, decode_e5m3, decode_e8m0, dynamic_scale, unswizzle
from anyfp8.numerics.tiles import dequantize, expand_scale, grid_shape, quantize_tiled, tile_amax

__all__ = [
    "AMAX_FLOOR",
    "FORMATS",
    "Format",
    "count_nonfinite",
    "decode",
    "decode_e5m3",
    "decode_e8m0",
    "dequantize",
    "dtype_name",
    "dynamic_scale",
    "expand_scale",
    "grid_shape",
    "logical_shape",
    "quantize",
    "quantize_tiled",
    "round_to_grid",
    "tile_amax",
    "unpack",
    "unswizzle",
]
