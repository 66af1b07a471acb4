"""Black Forest Labs' own quantized Flux files: FP8 per output row (fp8r) and NVFP4. Neither marker nor config.

Read from diffusers 0.42.1 (`BFLQuantizationConfig`), single files. fp8r: `weight` e4m3fn, `weight_scale` float32 [out];
inputs are quantized per row at each call, on hardware that can. NVFP4: `weight` uint8 [out, in / 2], even column in the
low nibble, `weight_scale` e4m3fn [out, in / 16], `weight_scale_2` and `input_scale` of one value. The names of Flux's
blocks and these shapes, in all quantized layers, are what tells such a file.
"""

from __future__ import annotations

import re

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import ManifestBuilder
from anyfp8.dialects import comfy
from anyfp8.dialects.config import has_config
from anyfp8.manifest import Manifest
from anyfp8.scheme import PRESETS
from anyfp8.sources import FLOATS, Codes, Scale

#: (single_)transformer_blocks are diffusers' names, double_blocks and single_blocks BFL's own
_BLOCK = re.compile(r"(?:.*\.)?(?:transformer|double|single)\w*_blocks\.\d+\..+")
_FP4 = "float4_e2m1fn"
_NVFP4 = PRESETS["NVFP4"]


def match(checkpoint: Checkpoint) -> str | None:
    """Flux's blocks, and every quantized weight with the scales of fp8r or NVFP4; nobody says otherwise."""
    if has_config(checkpoint) or comfy.match(checkpoint) is not None:
        return None
    builder = ManifestBuilder(checkpoint, "bfl", "")
    kinds = {module: _kind(builder, module) for module in _modules(checkpoint)}
    if not all(kinds.values()) or not any(map(_BLOCK.fullmatch, kinds)):
        return None
    return f"{' and '.join(sorted(set(kinds.values())))} weights in Flux's blocks, e.g. {next(iter(kinds))}"


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """What each layer is, its tensors say."""
    builder = ManifestBuilder(checkpoint, "bfl", evidence)
    for module in _modules(checkpoint):
        weight, scale = builder.find(module, "weight"), builder.find(module, "weight_scale")
        assert weight is not None
        if (outer := builder.find(module, "weight_scale_2")) is not None:
            inner = None if scale is None else Scale(scale, factor=outer)
            builder.layer(module, _NVFP4, codes=Codes(weight, _FP4), scale=inner, why_static="NVFP4 inputs have one")
            builder.claim(outer)
        else:
            builder.layer(module, PRESETS["FP8_DYNAMIC"])
            if (unused := builder.find(module, "input_scale")) is not None:
                builder.exceptions[unused.name] = "fp8r quantizes inputs per row at each call"
    return builder.build()


def _modules(checkpoint: Checkpoint) -> list[str]:
    """Modules whose weight is FP8, or bytes with the two scales of NVFP4."""
    tensors = checkpoint.tensors
    found = []
    for name, ref in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and (ref.is_fp8 or (ref.dtype == "U8" and f"{name}_scale_2" in tensors)):
            found.append(module)
    return found


def _kind(builder: ManifestBuilder, module: str) -> str:
    """ "fp8r" or "NVFP4", if the tensors beside the weight are exactly theirs; else ""."""
    weight, scale = builder.find(module, "weight"), builder.find(module, "weight_scale")
    outer = builder.find(module, "weight_scale_2")
    if weight is None or scale is None or len(weight.shape) != 2:
        return ""
    rows, columns = weight.shape
    if weight.dtype == "F8_E4M3" and outer is None and _is_float(scale, (rows,)) and rows > 1:
        return "fp8r"
    blocks = scale.dtype == "F8_E4M3" and scale.shape == (rows, columns // 8) and columns % 8 == 0
    return "NVFP4" if weight.dtype == "U8" and blocks and outer is not None else ""


def _is_float(ref: TensorRef, shape: tuple[int, ...]) -> bool:
    return ref.dtype in FLOATS and ref.shape == shape
