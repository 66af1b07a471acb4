"""Raw FP8 casts without any scale: the code's own value is the weight. Read only on request (`dialect="bare"`).

Seen from ComfyUI's plain `fp8_e4m3fn` and `fp8_e5m2` files, in which everything may be FP8, biases and norms included,
and from diffusers' layerwise casting, which casts some layers and says so nowhere. Nothing in such a file tells it from
one that has lost its scales, so no file is ever recognised as bare, and one that holds any scale is refused.

Matrices and convolutions stay FP8 (weight-only, scale 1); everything else is decoded to the model's dtype.
"""

from __future__ import annotations

import re

import torch

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import ManifestBuilder
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError
from anyfp8.folding import fold
from anyfp8.manifest import Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import Codes, Scale

#: what only files with scales have, however they spell them ("norm.scale" is a weight in Flux's own names)
_SCALE = re.compile(
    r"(.*\.)?(\w*weight_scale\w*|\w*scale_weight\w*|input_scale\w*|scale_input|scale_inv|_scale|_amax"
    r"|\w*quantizer\.scale|(dequant_weights|quant_input)\.scale|scaled_fp8|comfy_quant)"
)


def match(checkpoint: Checkpoint) -> str | None:
    """Never: only the user can know that there are no scales."""
    return None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """Every FP8 tensor at face value."""
    cast = {name: ref for name, ref in checkpoint.tensors.items() if ref.is_fp8}
    beside = {name + suffix for name in cast for suffix in ("_scale", "_scale_inv")}
    scales = fold(name for name in checkpoint.tensors if name in beside or (cast and _SCALE.fullmatch(name)))
    if scales:
        more = f" and {len(scales) - 5} more" if len(scales) > 5 else ""
        raise DialectError(
            f"{checkpoint.name} is not bare: it has scales ({', '.join(scales[:5])}{more}), without which its FP8 "
            "tensors are not weights. Leave dialect out, or name the one that it is in."
        )
    builder = ManifestBuilder(checkpoint, "bare", evidence)
    for name, ref in cast.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(ref.shape) > 1:
            format = dtype_name(ref.torch_dtype)
            one = TensorRef(f"{name} (scale 1)", "no file", "F32", (), torch.ones((), device="cpu"))
            builder.layer(module, QuantizationScheme(format), codes=Codes(ref, format), scale=Scale(one))
        else:
            builder.plain[name] = ref
    if cast:
        builder.notes.append(f"{len(cast)} FP8 tensors without scales were taken at face value, as asked")
    config, where = quantization_config(checkpoint)
    if config.get("quant_method") is not None:
        builder.notes.append(f"{where} says quant_method {config['quant_method']!r}, but the file has no scales")
    return builder.build()
