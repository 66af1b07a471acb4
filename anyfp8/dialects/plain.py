"""A checkpoint without FP8 tensors, loaded strictly and as it is; refuses what looks quantized but isn't understood."""

from __future__ import annotations

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError
from anyfp8.folding import fold
from anyfp8.manifest import Manifest


def read(checkpoint: Checkpoint, known: list[str]) -> Manifest:
    """The manifest of a checkpoint that no dialect recognised, if it has no FP8 tensor; else a DialectError."""
    config, where = quantization_config(checkpoint)
    method = config.get("quant_method")
    if method is not None:
        raise DialectError(
            f"{checkpoint.name}: {where} says quant_method {method!r}, which no dialect reads; "
            f"known: {', '.join(known)}"
        )
    if fp8 := [name for name, ref in checkpoint.tensors.items() if ref.is_fp8]:
        names = fold(fp8)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise DialectError(
            f"{checkpoint.name} holds {len(fp8)} FP8 tensors ({', '.join(names[:5])}{more}), but no manifest that says "
            f"what they mean: no dialect recognised it (tried {', '.join(known)}; looked for anyfp8.json and for "
            'quantization_config in config.json). Pass dialect="bare" if they are plain casts without scales.'
        )
    scaled = {name.rpartition(".")[0] for name in checkpoint.tensors if name.rpartition(".")[2] == "weight_scale"}
    for name, ref in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and module in scaled and ref.dtype in ("U8", "I8", "I32")):
            raise DialectError(
                f"{ref} ({ref.dtype}) looks quantized, but no manifest says how (tried {', '.join(known)})"
            )
    return ManifestBuilder(checkpoint, "plain", "no FP8 tensors and no quantization config").build()
