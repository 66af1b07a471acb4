"""auto-round's own formats: static, dynamic, block and weight-only FP8, MXFP8, MXFP4, NVFP4 and NVFP4 with E5M3 scales.

Read from auto-round 0.16.1. Flat config keys with per-module overrides in `extra_config` (exact names, else regexes
that are searched); codes are [out, in], for transformers' Conv1D too. Scales multiply (block FP8's `weight_scale_inv`
as well), but for NVFP4's `weight_global_scale` and `input_global_scale`, which divide. `activation_scheme` also says
"dynamic" for weight-only files, so only `act_bits` is believed; `packing_format` says nothing that the tensors don't.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.dialects.packed import quantized_weights, stored
from anyfp8.errors import DialectError, SchemeError
from anyfp8.manifest import Manifest
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import Scale

_SCHEME_KEYS = (
    *("bits", "group_size", "sym", "data_type", "super_bits", "super_group_size", "rotation_config"),
    *("act_bits", "act_group_size", "act_sym", "act_data_type", "act_dynamic"),
)
#: what auto-round's reader takes where a config for plain FP8 (unlike a scheme) leaves a key out
_ABSENT = {"act_dynamic": False, "act_group_size": 0}


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'auto-round' (FP8_BLOCK exports may say 'fp8', which is transformers' layout)."""
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
    if integers := [name for name in checkpoint.tensors if name.endswith("qweight")]:
        raise DialectError(
            f"{checkpoint.name} holds integer codes ({integers[0]} ...): anyfp8 reads float formats only"
        )
    builder = ManifestBuilder(checkpoint, "auto-round", evidence)
    words = _Words(config, builder, f"{checkpoint.name}: {where}")
    builder.expects = words.expects
    disagree: list[str] = []
    for module in quantized_weights(builder):
        own = words.of(module)
        if not words.quantizes(own):  # listed as kept, stored quantized: the tensors decide
            disagree.append(module)
            own = words.of("")
        try:
            scheme = QuantizationScheme.from_auto_round(own)
        except SchemeError as error:
            builder.refuse(module, "unsupported", str(error))
            continue
        block = builder.find(module, "weight_scale_inv") if builder.find(module, "weight_scale") is None else None
        why = f"{where} says act_dynamic false"
        if scheme.act_scale == "e4m3":
            why = f"{where} says that the input's scales have two levels, the outer one static"
        builder.layer(module, scheme, scale=None if block is None else Scale(block), why_static=why)
    if disagree:
        kind = "16 bits in extra_config, but stored quantized"
        builder.notes.append(list_notes(kind, disagree, "the tensors decide"))
    if config.get("static_kv_dtype") or config.get("static_attention_dtype"):
        builder.notes.append("KV-cache and attention quantization are reported, not applied")
    return builder.build()


class _Words:
    """What the config says about each module."""

    def __init__(self, config: Mapping[str, Any], builder: ManifestBuilder, where: str) -> None:
        self.top = _scheme_keys(config)
        # `layer_config` is the writer's name for it
        self.extra = {**(config.get("layer_config") or {}), **(config.get("extra_config") or {})}
        for name, values in self.extra.items():
            if not isinstance(values, Mapping):
                raise DialectError(f"{where}: extra_config for {name!r} is {values!r}; valid: a mapping of scheme keys")
        # a key that names another module of the file is no regex ("fc" would be found in "fc2")
        self.patterns = [(re.compile(key), key) for key in self.extra if not stored(builder, key)]
        self.kept = {name for key in ("ignored_layers", "modules_to_not_convert") for name in config.get(key) or ()}
        self.blocks = tuple(_names(config.get("block_name_to_quantize")))

    def of(self, module: str) -> dict[str, Any]:
        """The scheme keys for a module: its own entry's (by exact name, else the first regex found in it), else the top
        level's, each key on its own. "": the top level's alone."""
        key: str | None = module if module in self.extra else None
        if module and key is None:
            key = next((key for pattern, key in self.patterns if pattern.search(module)), None)
        own = self.top if key is None else self.top | _scheme_keys(self.extra[key])
        plain = str(own.get("act_data_type") or own.get("data_type")).startswith("fp")
        return _ABSENT | own if plain else own  # MX and NVFP4 have no static inputs

    @staticmethod
    def quantizes(own: Mapping[str, Any]) -> bool:
        """Do these keys say less than 16 bits?"""
        return (own.get("bits") or 16) < 16

    def expects(self, module: str, classes: tuple[str, ...]) -> bool:
        """Do the lists mean this module, of a class with these names, to be quantized? Exact types are candidates."""
        named = module in self.extra or (classes[0] in ("Linear", "Conv1D") and module.startswith(self.blocks))
        return named and module not in self.kept and self.quantizes(self.of(module))


def _scheme_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in _SCHEME_KEYS if key in values}


def _names(value: Any) -> Iterable[str]:
    """`block_name_to_quantize`: one name, several with commas between, or (nested) lists of them."""
    if isinstance(value, str):
        yield from (f"{name.strip()}." for name in value.split(",") if name.strip())
    elif isinstance(value, list):
        for part in value:
            yield from _names(part)
