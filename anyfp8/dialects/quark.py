"""AMD Quark's real-quantized exports in its own mode (`quant_method: quark`; its "fp8" mode is transformers' layout).

Read from amd-quark 0.13. Scales multiply and have the model's dtype: `weight_scale`, `input_scale`, and in diffusers
components `weight_quantizer.scale`, `input_quantizer.scale`. Layers that Quark only fake-quantized are stored in float,
already rounded, with `_weight_quantizer.scale` beside them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import KV_SCALE, NO_SHIFT, ManifestBuilder, is_zero, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import SchemeError
from anyfp8.manifest import Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import FLOATS, Scale

_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
#: names of a layer's scales; the second one is what diffusers components keep
_NAMES = {
    kind: (f"{kind}_scale", f"{kind}_quantizer.scale", f"{kind}_zero_point", f"{kind}_quantizer.zero_point")
    for kind in ("weight", "input", "output")
}
_QUANTIZER = re.compile(r"(?P<module>.*)\._?(weight|input|output|bias)_quantizer\.(?P<leaf>.+)")
#: projections whose outputs are rounded for attention and its cache
_ATTENTION = ("k_proj", "v_proj", "q_proj", "kv_proj", "qkv_proj")


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'quark'."""
    config, where = quantization_config(checkpoint)
    return f"{where}: quant_method 'quark'" if config.get("quant_method") == "quark" else None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized; the config that matches first says how."""
    config, where = quantization_config(checkpoint)
    builder = ManifestBuilder(checkpoint, "quark", evidence)
    excluded: list[str] = []
    shared: list[str] = []
    for module, ref in builder.fp8_weights().items():
        if _matches(config.get("exclude") or (), module):
            excluded.append(module)
        choices = _configs(module, config)
        if not choices:
            detail = (
                f"is {ref.dtype}, but the config doesn't quantize its layer's weight, so its granularity is unknown"
            )
            builder.problem("contradiction", ref, detail)
            builder.claim(ref, *_scales(builder, module))
            continue
        cached = _is_cached(module, config)
        try:
            schemes = {kind: _scheme(spec, ref, cached) for kind, spec in choices.items()}
        except SchemeError as error:
            builder.problem("unsupported", ref, f"its layer's config: {error}")
            builder.claim(ref, *_scales(builder, module))
            continue
        _layer(builder, module, ref, schemes, f"{where} says that its input is not dynamic")
        if any(_per_position(spec) for spec in choices.values()):
            shared.append(module)
    _leftovers(builder)
    _expectations(builder, config)
    if excluded:
        builder.notes.append(list_notes("excluded by the config, but stored in FP8", excluded, "the tensors decide"))
    if shared:
        what = "each row has a scale of its own here; Quark's kernels share one a position across the batch"
        builder.notes.append(list_notes("dynamic inputs per token", shared, what))
    if config.get("kv_cache_quant_config") or config.get("softmax_quant_spec"):
        builder.notes.append("KV-cache and attention quantization are reported, not applied")
    return builder.build()


def _matches(patterns: Any, module: str) -> bool:
    return any(fnmatch.fnmatchcase(module, str(pattern)) for pattern in patterns)


def _configs(module: str, config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Class name → config for a module, "Module" being any class: the first name pattern that matches, else those of
    classes and the global one, between which the model decides."""
    for pattern, spec in (config.get("layer_quant_config") or {}).items():
        if fnmatch.fnmatchcase(module, pattern):
            return {"Module": spec} if spec and spec.get("weight") else {}
    by_class = {re.split(r"\W+", kind.strip("<>'"))[-1]: s for kind, s in _items(config, "layer_type_quant_config")}
    if config.get("global_quant_config"):
        by_class["Module"] = config["global_quant_config"]
    return {kind: spec for kind, spec in by_class.items() if spec and spec.get("weight")}


def _items(config: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    return list((config.get(key) or {}).items())


def _is_cached(module: str, config: Mapping[str, Any]) -> bool:
    """Is the output of this module rounded for attention or its cache, not for the next layer?"""
    groups = [*(config.get("kv_cache_quant_config") or {}), *((config.get("export") or {}).get("kv_cache_group") or ())]
    return module.rpartition(".")[2] in _ATTENTION or _matches(groups, module)


def _scheme(spec: Mapping[str, Any], ref: TensorRef, cached: bool) -> QuantizationScheme:
    """The scheme that a layer's config means."""
    weight, act, out = _spec(spec, "weight"), _spec(spec, "input_tensors"), _spec(spec, "output_tensors")
    if weight is None:
        raise SchemeError(f"has no weight, but the weight is {ref.dtype}")
    stored = dtype_name(ref.torch_dtype)
    if _dtype(weight) != stored:
        raise SchemeError(f"weight is {weight['dtype']}, but the tensor is {ref.dtype}")
    tile = _weight_tile(weight)
    options: dict[str, Any] = {}
    if out is not None and not cached:
        if out.get("is_dynamic") or out.get("qscheme") != "per_tensor":
            raise SchemeError("output_tensors: only static per_tensor outputs are supported")
        options["out_dtype"] = _dtype(out)
    if act is not None:
        dynamic = bool(act.get("is_dynamic"))
        options |= {"act_dtype": _dtype(act), "act_dynamic": dynamic, "act_tile": _act_tile(act, dynamic)}
    return QuantizationScheme(stored, tile, **options)


def _spec(spec: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """One tensor's part of a config; older versions allow a list of stages, of which one is understood."""
    found = spec.get(key)
    if isinstance(found, list):
        if len(found) > 1:
            raise SchemeError(f"{key} is quantized in {len(found)} stages: not supported")
        found = found[0] if found else None
    return found or None


def _dtype(spec: Mapping[str, Any]) -> str:
    if spec.get("dtype") not in _DTYPES:
        raise SchemeError(f"dtype is {spec.get('dtype')!r}; valid: {', '.join(_DTYPES)}")
    if spec.get("symmetric") is False:
        raise SchemeError("symmetric is False: not supported")
    return _DTYPES[spec["dtype"]]


def _weight_tile(spec: Mapping[str, Any]) -> tuple[int, ...]:
    kind, axis = spec.get("qscheme"), spec.get("ch_axis")
    if kind == "per_tensor":
        return (-1, -1)
    if kind == "per_channel" and axis in (0, None):
        return (1, -1)
    if kind == "per_group" and axis in (1, -1, None):
        return (1, spec["group_size"])
    if kind == "per_block":
        return tuple(spec["block_size"])
    raise SchemeError(f"weight: qscheme {kind!r} over axis {axis} is not supported")


def _act_tile(spec: Mapping[str, Any], dynamic: bool) -> tuple[int, int]:
    kind = spec.get("qscheme")
    if kind == "per_tensor":
        return (-1, -1)
    if dynamic and (kind == "per_token" or _per_position({"input_tensors": spec})):
        return (1, -1)
    if dynamic and kind == "per_group" and spec.get("ch_axis") in (1, -1, None):
        return (1, spec["group_size"])
    how = "dynamic" if dynamic else "static"
    raise SchemeError(f"input_tensors: {how} qscheme {kind!r} over axis {spec.get('ch_axis')} is not supported")


def _per_position(spec: Mapping[str, Any]) -> bool:
    """Dynamic "per channel" over axis 1 of an input [batch, position, channel]: meant as per token."""
    act = _spec(spec, "input_tensors") or {}
    return bool(act.get("is_dynamic")) and act.get("qscheme") == "per_channel" and act.get("ch_axis") in (1, -2, None)


def _scales(builder: ManifestBuilder, module: str) -> list[TensorRef]:
    """All tensors of the module's quantizers."""
    found = (builder.find(module, name) for names in _NAMES.values() for name in names)
    return [ref for ref in found if ref is not None]


def _layer(
    builder: ManifestBuilder, module: str, ref: TensorRef, schemes: dict[str, QuantizationScheme], why: str
) -> None:
    likeliest = schemes.get("Linear") or next(iter(schemes.values()))
    scale, act, out = (builder.find(module, *_NAMES[kind][:2]) for kind in ("weight", "input", "output"))
    if scale is None:
        detail = f"is {ref.dtype}, but has no scale (looked for {' and '.join(_NAMES['weight'][:2])})"
        builder.problem("missing", ref, detail)
        builder.claim(ref, *_scales(builder, module))
        return
    builder.layer(
        module,
        likeliest,
        scale=Scale(scale),
        input_scale=Scale(act) if act is not None and any(s.static for s in schemes.values()) else None,
        extras={"output_scale": Scale(out)} if out is not None and any(s.out_dtype for s in schemes.values()) else None,
        why_static=why,
        by_class=schemes if len(schemes) > 1 else None,
    )


def _leftovers(builder: ManifestBuilder) -> None:
    """Name what the other tensors of quantizers are."""
    for name, ref in builder.checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "prob_output_scale" or (leaf == "output_scale" and module.rpartition(".")[2] in _ATTENTION):
            builder.exceptions[name] = KV_SCALE
        if (found := _QUANTIZER.fullmatch(name)) is None:
            continue
        weight = builder.find(found["module"], "weight")
        if weight is not None and weight.dtype in FLOATS:
            reason = "Quark stored this layer's weight in float, already rounded: it is taken as it is"
            builder.exceptions[name] = reason + ", and its input is not quantized"
        elif found["leaf"] == "zero_point" and is_zero(ref):
            builder.exceptions[name] = NO_SHIFT


def _expectations(builder: ManifestBuilder, config: Mapping[str, Any]) -> None:
    def expects(module: str, classes: tuple[str, ...]) -> bool:
        if classes[:1] not in (("Linear",), ("Conv2d",)) or _matches(config.get("exclude") or (), module):
            return False
        return bool(_configs(module, config))

    builder.expects = expects
