"""Intel neural-compressor's FP8 files in QDQ form (`FP8Config(use_qdq=True)`, the one it writes on a CPU).

Read from neural-compressor-pt 3.10. The config is the whole FP8Config, without a quant_method. A Linear's weight is
stored [in, out], a convolution's as it is; `dequant_weights.scale` and `quant_input.scale` multiply, in bfloat16
whatever the model's dtype; `quant_input.scale_inv` is 1 / scale.
"""

from __future__ import annotations

from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import NO_SHIFT, ManifestBuilder, is_zero, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.manifest import Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import FLOATS, Codes, Scale

_WEIGHT = "dequant_weights.scale"
_INPUT = "quant_input.scale"
#: what Gaudi's own (not QDQ) files call their scales
_GAUDI = ("scale_weight", "scale_input")
_QUANTIZERS = ("dequant_weights", "quant_input", "quant_output", "dequant_output")


def match(checkpoint: Checkpoint) -> str | None:
    """FP8Config's keys without a quant_method, or (without any config) `dequant_weights.scale` beside an FP8 weight."""
    config, where = quantization_config(checkpoint)
    if config:
        known = config.get("quant_method") in (None, "inc") and "fp8_config" in config
        return f"{where}: fp8_config" if known else None
    for name in checkpoint.tensors:
        weight = checkpoint.tensors.get(name.removesuffix(_WEIGHT) + "weight")
        if name.endswith(_WEIGHT) and weight is not None and weight.is_fp8:
            return f"{name} beside an FP8 weight"
    return None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """Every FP8 weight is a static W8A8 layer; the scale's shape says per tensor or per output channel."""
    config, _ = quantization_config(checkpoint)
    builder = ManifestBuilder(checkpoint, "neural-compressor", evidence)
    for module, ref in builder.fp8_weights().items():
        _layer(builder, module, ref)
    _quantizers(builder)
    _lists(builder, config)
    return builder.build()


def _layer(builder: ManifestBuilder, module: str, ref: TensorRef) -> None:
    scale, act = builder.find(module, _WEIGHT), builder.find(module, _INPUT)
    builder.claim(ref, scale, act)
    if scale is None and builder.find(module, *_GAUDI):
        builder.claim(*(builder.find(module, name) for name in _GAUDI))
        builder.problem("unsupported", ref, "has Gaudi's own scales; only files with use_qdq are read")
        return
    if scale is None:
        builder.problem("missing", ref, f"is {ref.dtype}, but has no scale (looked for {_WEIGHT})")
        return
    if act is None:
        detail = f"the weight is {ref.dtype}, but its input has no scale (looked for {_INPUT})"
        builder.problem("missing", ref, detail)
        return
    format = dtype_name(ref.torch_dtype)
    codes = Codes(ref, format, transposed=len(ref.shape) == 2)  # square ones too: only the format says so
    tile = (-1, -1) if set(scale.shape) <= {1} else (1, -1)
    scheme = QuantizationScheme(format, tile, act_dtype=format)
    builder.layer(module, scheme, codes=codes, scale=Scale(scale), input_scale=Scale(act))


def _quantizers(builder: ManifestBuilder) -> None:
    """Name what the other tensors of quantizers are: reciprocals, zero points, those of attention and KV cache."""
    for name, ref in builder.checkpoint.tensors.items():
        path, _, leaf = name.rpartition(".")
        module, _, quantizer = path.rpartition(".")
        if quantizer not in _QUANTIZERS or leaf not in ("scale", "scale_inv", "zero_point"):
            continue
        weight, scale = builder.find(module, "weight"), builder.find(path, "scale")
        if leaf == "zero_point" and is_zero(ref):
            builder.exceptions[name] = NO_SHIFT
        elif weight is None:
            builder.exceptions[name] = "a quantizer without a weight (attention, KV cache): reported, not applied"
        elif weight.dtype in FLOATS:
            builder.exceptions[name] = "a scale beside a weight that is stored in float: the weight is taken as it is"
        elif quantizer == "quant_input" and leaf == "scale_inv" and scale is not None:
            builder.exceptions[name] = "the reciprocal of the input's scale, which is used"
            if scale.shape != ref.shape:
                builder.problem("contradiction", ref, f"has another shape than {scale.name}")
                continue
            product = scale.read().float() * ref.read().float()
            if not bool((product.sub(1).abs() < 0.02).all()):  # both are rounded to bfloat16
                builder.problem("contradiction", ref, f"is not 1 / {scale.name}")


def _lists(builder: ManifestBuilder, config: dict[str, Any]) -> None:
    blocked = [str(name) for name in (config.get("blocklist") or {}).get("names") or ()]
    types = [str(name) for name in (config.get("allowlist") or {}).get("types") or ()]
    stored = [module for module in builder.layers if any(name in module for name in blocked)]
    if stored:
        builder.notes.append(list_notes("blocked by the config, but stored in FP8", stored, "the tensors decide"))

    def expects(module: str, classes: tuple[str, ...]) -> bool:
        return classes[:1] in [(name,) for name in types] and not any(name in module for name in blocked)

    builder.expects = expects
