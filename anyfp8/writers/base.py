"""What a writer is: one format's way to say a layer. Codes are never changed; what can't be said is refused first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anyfp8.folding import join, layer_path
from anyfp8.scheme import QuantizationScheme

#: pattern for the weight files of every format; `{suffix}` becomes "" or "-00001-of-00003"
FILES = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Layer:
    """A quantized layer to be written: module path, scheme, shape of its weight, whether NVFP4's two levels of scales
    are known apart (they are in a file, not in a loaded model), and which of the module's parameters it is."""

    name: str
    scheme: QuantizationScheme
    shape: tuple[int, ...]
    two_level: bool = False
    param: str = "weight"

    @property
    def path(self) -> str:
        """Its name in a manifest."""
        return layer_path(self.name, self.param)


class Writer(Protocol):
    """One format: a module with these functions."""

    def refuse(self, layer: Layer) -> str | None:
        """Why the format can't say this layer; None if it can."""

    def refuse_all(self, layers: Sequence[Layer]) -> str | None:
        """Why the format can't say these layers together."""

    def tensors(self, layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors to store for a layer, by full name. values: as `LayerSpec.read`, and for NVFP4 from a file
        `inner_scale` (e4m3 values), `outer_scale` (a multiplier) and `outer_divisor` (its reciprocal)."""

    def configs(self, layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
        """JSON files to write; what belongs into config.json is merged into the one that is carried along.

        floats: paths of modules with a float weight of two or more dimensions.
        """


def metadata(producer: str) -> dict[str, str]:
    """The safetensors header's `__metadata__`, as transformers writes it and with us as producer."""
    return {"format": "pt", "producer": producer}


def matrices(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Of plain tensors' shapes by name, the modules whose weight has two or more dimensions: `configs`' floats."""
    names = [name for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1]
    return [name.removesuffix(".weight") for name in names]


def leaf(layer: Layer, name: str) -> str:
    """`<module>.<name>`."""
    return join(layer.name, name)


def kind(scheme: QuantizationScheme) -> str:
    """The weight's granularity in the field's word: tensor, channel, group, block."""
    tile = scheme.tile
    if set(tile) == {-1}:
        return "tensor"
    if tile[0] == 1:
        return "channel" if set(tile[1:]) == {-1} else "group"
    return "block"


def act_kind(scheme: QuantizationScheme) -> str:
    """The input's: none, static, tensor, token, group (the last three dynamic)."""
    if scheme.act_dtype is None:
        return "none"
    if not scheme.act_dynamic:
        return "static"
    return "tensor" if scheme.act_tile[0] == -1 else "token" if scheme.act_tile[1] == -1 else "group"


def is_mx(scheme: QuantizationScheme) -> bool:
    """Powers of two over 32 columns?"""
    return scheme.scale_dtype == "float8_e8m0fnu" and scheme.tile == (1, 32)


def e8m0(scale: Tensor) -> Tensor:
    """float32 powers of two → E8M0 bytes (uint8); raises ValueError for anything else."""
    fraction, exponent = torch.frexp(scale.float())
    if not bool((fraction == 0.5).all()):
        raise ValueError("a scale that is no power of two")
    return (exponent + 126).to(torch.uint8)


def scalar(value: Tensor, shape: tuple[int, ...] = (1,)) -> Tensor:
    """A one-value scale in the shape that the format stores."""
    return value.float().reshape(shape)
