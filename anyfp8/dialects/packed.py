"""What compressed-tensors and auto-round share: where llm-compressor's names put the codes of a layer."""

from __future__ import annotations

from anyfp8.checkpoint import TensorRef
from anyfp8.claims import ManifestBuilder


def quantized_weights(builder: ManifestBuilder) -> dict[str, TensorRef]:
    """Module path → codes: an FP8 `weight`, or a `weight_packed`. A module that has both is refused."""
    found = builder.fp8_weights()
    for module, packed in builder.packed_weights().items():
        if (beside := builder.find(module, "weight")) is None:
            found[module] = packed
            continue
        found.pop(module, None)
        detail = f"stored twice, as {beside} ({beside.dtype}) and as {packed} ({packed.dtype})"
        builder.refuse(module, "contradiction", detail)
    return found


def stored(builder: ManifestBuilder, module: str) -> bool:
    """Does the file hold a weight of that module?"""
    return builder.find(module, "weight", "weight_packed") is not None
