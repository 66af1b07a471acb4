"""The formats that can be written: one file each, imported when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from anyfp8.errors import AnyFP8Error, with_reasons
from anyfp8.writers.base import Layer, Writer

__all__ = ["WRITERS", "Layer", "Writer", "check", "get"]

#: format → module of this package
WRITERS = {
    "anyfp8": "native",
    "compressed-tensors": "compressed_tensors",
    "auto-round": "auto_round",
    "transformers": "transformers_fp8",
    "modelopt": "modelopt",
    "comfy": "comfy",
}


def get(format: str) -> Writer:
    """The writer of a format; raises AnyFP8Error, listing the formats, if there is none."""
    if format not in WRITERS:
        raise AnyFP8Error(f"unknown format {format!r}; valid: {', '.join(WRITERS)}")
    return cast(Writer, import_module(f"{__name__}.{WRITERS[format]}"))


def check(writer: Writer, format: str, layers: Sequence[Layer]) -> None:
    """Raise, naming every layer with its reason, if the format can't say these layers; nothing is written then."""
    refusals = {layer.path: why for layer in layers if (why := _no_weight(format, layer) or writer.refuse(layer))}
    if refusals:
        raise AnyFP8Error(with_reasons(f"format {format!r} can't say {len(refusals)} of the layers:", refusals))
    if why := writer.refuse_all(layers):
        raise AnyFP8Error(f"format {format!r} can't say this: {why}")


def _no_weight(format: str, layer: Layer) -> str | None:
    if layer.param == "weight" or format == "anyfp8":
        return None
    return "it is no module's `weight`, and only format 'anyfp8' describes other parameters"
