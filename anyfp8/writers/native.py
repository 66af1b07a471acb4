"""Writes our own format: `anyfp8.json` beside the weights. It can say every scheme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from anyfp8.dialects.anyfp8_json import FILE
from anyfp8.numerics import FORMATS
from anyfp8.writers.base import Layer, leaf


def refuse(layer: Layer) -> str | None:
    """Nothing is refused but zero points of what is no module's weight: they would share a name."""
    if layer.param != "weight" and not layer.scheme.symmetric:
        return "zero points are written for a module's `weight` only"
    return None


def refuse_all(layers: Sequence[Layer]) -> str | None:
    """Nor is any mixture."""
    return None


def tensors(layer: Layer, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weight` (codes), and `weight_scale`, `input_scale` ... in float32, as they are inside; of another parameter
    `<param>` and `<param>_scale`."""
    out = {leaf(layer, layer.param): values["weight_codes"].view(FORMATS[layer.scheme.weight_dtype].dtype)}
    named = {"weight_scale": f"{layer.param}_scale"}
    for name in ("weight_scale", "input_scale", "weight_zero_point", "input_zero_point", "output_scale"):
        value = values.get(name)
        if value is not None:
            out[leaf(layer, named.get(name, name))] = value.reshape(1) if value.numel() == 1 else value
    return out


def configs(layers: Sequence[Layer], floats: Sequence[str], producer: str) -> dict[str, dict[str, Any]]:
    """The manifest, see `dialects.anyfp8_json`."""
    schemes = {layer.path: replace(layer.scheme, scale_dtype="float32").to_dict() for layer in layers}
    manifest = {"format": "anyfp8", "version": 1, "producer": producer}
    return {FILE: manifest | {"ignore": sorted(floats), "layer_config": schemes}}
