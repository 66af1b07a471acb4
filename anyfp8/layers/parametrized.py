"""FP8 codes behind any parameter of any module: a parametrization that decodes on access.

For weights whose owner is no class we know (`nn.MultiheadAttention.in_proj_weight`, a Linear subclass with a forward of
its own, a bare parameter, stacked experts). The module's own forward runs, so its input is not quantized; the report
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from anyfp8.layers.readonly import read_only
from anyfp8.layers.stacked import StackedWeight
from anyfp8.layers.storage import STORED, FP8Storage
from anyfp8.numerics import quantize_tiled
from anyfp8.scheme import QuantizationScheme

#: one part of a parameter: its scheme and values (`FP8Storage`'s buffers by name)
Part = tuple[QuantizationScheme, Mapping[str, Tensor | None]]


class CodesPart(FP8Storage):
    """Codes and scales of one part."""

    def __init__(self, scheme: QuantizationScheme, values: Mapping[str, Tensor | None], dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self._store(scheme, values, dtype)

    def forward(self, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """`decoded`, as a call, which hooks (accelerate's offloading) can see."""
        return self.decoded(dtype, index)


class DecodedParameter(nn.Module):
    """The parametrization: parts that are decoded and joined along `dim`.

    What it parametrizes is an empty tensor that only carries dtype and device.
    """

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, dim: int = 0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(CodesPart(scheme, values, dtype) for scheme, values in parts)
        self.dim = dim

    def forward(self, original: Tensor) -> Tensor:
        """The decoded weight in the dtype of `original`; of a stack, one that is decoded as its experts are used."""
        stacked = len(self.weight_shape) == 3 and all(part.scheme.tile[0] == 1 for part in self.storages)
        if stacked and not torch.compiler.is_compiling():
            return StackedWeight(self, original.dtype)
        return read_only(self.decoded(original.dtype))

    def decoded(self, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """The weight as real values, or those of one slice of the first axis."""
        parts = [part(dtype, index) for part in self.storages]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim - (index is not None))

    def joined(self) -> CodesPart | None:
        """All parts as one, with the same bytes; None where their tiles don't fit together."""
        first, *others = self.storages
        rows = first.weight_shape[self.dim]
        tile = first.scheme.tile[self.dim]
        tile = rows if tile == -1 else tile
        if not others:
            return first
        if rows % tile or any(part.scheme != first.scheme or part.weight_shape[self.dim] != rows for part in others):
            return None
        tiles = tuple(tile if axis == self.dim else n for axis, n in enumerate(first.scheme.tile))
        values = {
            name: torch.cat([cast(Tensor, part._buffers[name]) for part in self.storages], self.dim)
            for name in STORED
            if first._buffers[name] is not None
        }
        return CodesPart(replace(first.scheme, tile=tiles), values, first.compute_dtype)

    @property
    def storages(self) -> list[CodesPart]:
        """The parts, typed."""
        return [part for part in self.parts if isinstance(part, CodesPart)]

    @property
    def scheme(self) -> QuantizationScheme:
        """The scheme of the first part."""
        return self.storages[0].scheme

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the weight decodes to."""
        return self.storages[0].compute_dtype

    @property
    def weight_codes(self) -> Tensor:
        """The codes of the first part."""
        return self.storages[0].weight_codes

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        shapes = [part.weight_shape for part in self.storages]
        joined = sum(shape[self.dim] for shape in shapes)
        return tuple(joined if axis == self.dim else n for axis, n in enumerate(shapes[0]))


def quantized_part(weight: Tensor, scheme: QuantizationScheme) -> Part:
    """Quantize a float parameter with one scale per tile; ValueError for values that aren't finite."""
    codes, scale = quantize_tiled(weight, scheme.weight_dtype, scheme.tile)
    return scheme, {"weight_codes": codes.view(torch.uint8), "weight_scale": scale}


def parametrize_codes(module: nn.Module, name: str, parts: Sequence[Part], dtype: torch.dtype, dim: int = 0) -> None:
    """Replace the parameter `name` of `module`, in place, by codes that are decoded at each access."""
    decoder = DecodedParameter(parts, dtype, dim)
    if parametrize.is_parametrized(module, name):  # loaded over: the codes are there already
        chain = cast(nn.ModuleDict, module.parametrizations)[name]
        cast(nn.ModuleList, chain)[0] = decoder
        return
    carrier = nn.Parameter(torch.empty(0, dtype=dtype, device=decoder.weight_codes.device), requires_grad=False)
    setattr(module, name, carrier)
    parametrize.register_parametrization(module, name, decoder, unsafe=True)  # unsafe: its shape changes on purpose


def unparametrize(module: nn.Module, name: str, weight: Tensor) -> None:
    """Undo `parametrize_codes`: an ordinary parameter with this float weight again."""
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    setattr(module, name, weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight))
