"""auto-round's own format: static W8A8 (`packing_format` auto_round:fp8_static) and weight-only FP8.

Read from auto-round 0.16.1. Flat config keys with per-module overrides in `extra_config` (exact names, else regexes
that are searched); tensors `weight` [out, in] e4m3fn, `weight_scale` [out], [1] or flat groups, `input_scale` [1];
scales multiply. `activation_scheme` also says "dynamic" for weight-only files, so only `act_bits` is believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError, SchemeError
from anyfp8.manifest import Manifest
from anyfp8.scheme import QuantizationScheme

_SCHEME_KEYS = (
    *("bits", "group_size", "sym", "data_type"),
    *("act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic"),
)
#: what auto-round's reader takes where a config (unlike a scheme) leaves a key out
_ABSENT = {"act_dynamic": False, "act_group_size": 0}


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'auto-round' (FP8_BLOCK exports say 'fp8', which is transformers' layout)."""
    config, where = quantization_config(checkpoint)
    method = config.get("quant_method")
    return f"{where}: quant_method {method!r}" if method in ("auto-round", "auto_round", "intel/auto-round") else None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized; extra_config, then the top level, say how."""
    config, where = quantization_config(checkpoint)
    if config.get("rotation_config"):
        raise DialectError(f"{checkpoint.name}: {where} has a rotation_config, which must be executed: not supported")
    if config.get("fmt", "e4m3") != "e4m3" or "e5m2" in str(config.get("data_type")):
        raise DialectError(
            f"{checkpoint.name}: {where} says e5m2; auto-round scales such files for e5m2 but clips their codes to "
            "e4m3 (98 % saturate), so they are corrupt"
        )
    builder = ManifestBuilder(checkpoint, "auto-round", evidence)
    top = _ABSENT | _scheme_keys(config)
    disagree: list[str] = []
    for module in builder.fp8_weights():
        own = top | _override(module, config.get("extra_config") or {}, checkpoint)
        if (own.get("bits") or 16) >= 16:  # listed as kept, stored in FP8: the tensors decide
            disagree.append(module)
            own = top
        try:
            scheme = QuantizationScheme.from_auto_round(own)
        except SchemeError as error:
            builder.refuse(module, "unsupported", str(error))
            continue
        builder.layer(module, scheme, why_static=f"{where} says act_dynamic false")
    if disagree:
        builder.notes.append(list_notes("16 bits in extra_config, but stored in FP8", disagree, "the tensors decide"))
    if config.get("static_kv_dtype") or config.get("static_attention_dtype"):
        builder.notes.append("KV-cache and attention quantization are reported, not applied")
    return builder.build()


def _scheme_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in _SCHEME_KEYS if key in values}


def _override(module: str, extra: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """The entry for this module: by its exact name, else the first regex that is found in it.

    A key that names another module of the file is no regex ("fc" would be found in "fc2").
    """
    if module in extra:
        return _scheme_keys(extra[module])
    for pattern, values in extra.items():
        if f"{pattern}.weight" not in checkpoint.tensors and re.search(pattern, module):
            return _scheme_keys(values)
    return {}
