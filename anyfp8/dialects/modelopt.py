"""NVIDIA ModelOpt: exported checkpoints, and models saved with their quantizers.

Read from nvidia-modelopt 0.47.0. Exports have `hf_quant_config.json` and, or only, `quantization_config` in config.json
(a single file may have it in its header); `quant_algo` says the scheme, `quantized_layers` one per layer if it is
MIXED_PRECISION. Tensors: `weight`, `weight_scale`, NVFP4's `weight_scale_2` (all multiply), `input_scale`.

A model saved after `mtq.compress` (`enable_huggingface_checkpointing`) has no such config; its quantizers are pickled,
which is never opened. Its tensors say enough for static FP8: `weight`, `weight_quantizer._scale`, and
`input_quantizer._amax` (the scale times 448).
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import replace
from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError
from anyfp8.manifest import Manifest
from anyfp8.scheme import PRESETS, QuantizationScheme
from anyfp8.sources import Scale

FILE = "hf_quant_config.json"
_E4M3, _FP4 = "float8_e4m3fn", "float4_e2m1fn"
_NVFP4 = PRESETS["NVFP4"]
_SCHEMES = {
    "FP8": PRESETS["FP8"],
    "FP8_PER_CHANNEL_PER_TOKEN": PRESETS["FP8_DYNAMIC"],
    "FP8_PB_WO": QuantizationScheme(tile=(128, 128)),
    "MXFP8": replace(PRESETS["MXFP8"], act_scale="e8m0_ceil"),
    "NVFP4": _NVFP4,
    "NVFP4_AWQ": _NVFP4,  # layers whose pre_quant_scale went into the layer before
    "W4A16_NVFP4": _NVFP4.weight_only_twin(),
    "W4A8_NVFP4_FP8": QuantizationScheme(_FP4, (1, 16), _E4M3, _E4M3),
    "W4A8_MXFP4_FP8": QuantizationScheme(_FP4, (1, 32), "float8_e8m0fnu", _E4M3),
}
_QUANTIZER = re.compile(r"((?P<module>.+)\.)?(?P<kind>[a-z]\w*_quantizer)(\.\d+)?\.(?P<leaf>_\w+)")
#: what changes a layer's input or output beyond rounding (AWQ, SmoothQuant, SVDQuant)
_TRANSFORM = re.compile(r"((?P<module>.+?)\.)?((input_quantizer\._)?pre_quant_scale|(weight_quantizer\.)?svdquant_\w+)")


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'modelopt', `hf_quant_config.json`, or quantizers' tensors by their names, where no config is."""
    _, where = _config(checkpoint)
    if where:
        return where if where == FILE else f"{where}: quant_method 'modelopt'"
    if quantization_config(checkpoint)[0].get("quant_method") is not None:
        return None
    found = (m for m in map(_QUANTIZER.fullmatch, checkpoint.tensors) if m and m["leaf"] in ("_scale", "_amax"))
    return next((f"tensors named like {m[0]}" for m in found), None)


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized, quant_algo how."""
    config, where = _config(checkpoint)
    reader = _Reader(checkpoint, evidence, config, where)
    reader.refuse_transforms()
    for module, ref in reader.weights().items():
        reader.layer(module, ref)
    reader.leftovers()
    return reader.build()


class _Reader:
    def __init__(self, checkpoint: Checkpoint, evidence: str, config: dict[str, Any], where: str) -> None:
        self.checkpoint, self.where = checkpoint, where
        self.builder = ManifestBuilder(checkpoint, "modelopt", evidence)
        self.algo = str(config.get("quant_algo") or "").upper()
        self.group_size = config.get("group_size")
        self.mixed: dict[str, dict[str, Any]] | None = None
        if self.algo == "MIXED_PRECISION":
            self.mixed = dict(config.get("quantized_layers") or {})
        elif self.algo and self.algo not in _SCHEMES:
            raise DialectError(
                f"{checkpoint.name}: {where} has quant_algo {config['quant_algo']!r}, which is not supported; "
                f"supported: {', '.join(_SCHEMES)}, MIXED_PRECISION"
            )
        self.exclude: list[str] = config.get("exclude_modules") or config.get("ignore") or []
        if not isinstance(self.exclude, list) or not all(isinstance(name, str) for name in self.exclude):
            raise DialectError(f"{checkpoint.name}: {where}: exclude_modules must be a list of module names")
        self.kv_cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
        self.disagree: list[str] = []
        #: layouts of NVFP4 scales that shapes tell
        self.layouts: set[str | None] = set()

    def weights(self) -> dict[str, TensorRef]:
        """Module path → codes: FP8, or bytes beside a scale."""
        found = self.builder.fp8_weights()
        for name, ref in self.checkpoint.tensors.items():
            module, _, leaf = name.rpartition(".")
            packed = ref.dtype in ("U8", "I8") and leaf == "weight"
            if packed and self.builder.find(module, "weight_scale", "weight_quantizer._scale"):
                found[module] = ref
        for module, ref in found.items():
            scale = self.builder.find(module, "weight_scale")
            if scale is not None and (ref.dtype, scale.dtype) == ("U8", "F8_E4M3"):
                self.layouts |= {_layout(ref, scale)} - {None}
        refused = {problem.name for problem in self.builder.problems}
        return {module: ref for module, ref in found.items() if module not in refused}

    def layer(self, module: str, ref: TensorRef) -> None:
        """One layer, as its tensors and the config say."""
        if self.builder.find(module, "weight_quantizer._scale"):
            self._compressed(module, ref)
            return
        entry = (self.mixed or {}).get(module, {})
        algo = self.algo if self.mixed is None else str(entry.get("quant_algo") or "").upper()
        if algo not in _SCHEMES:
            kind, what = "missing", f"has no scale (looked for {module}.weight_quantizer._scale)"
            if algo:
                kind, what = (
                    "unsupported",
                    f"{self.where} says {entry['quant_algo']!r}; supported: {', '.join(_SCHEMES)}",
                )
            elif self.where:
                kind, what = "contradiction", f"{self.where} has no quant_algo for it, so its scheme is unknown"
            self.builder.refuse(module, kind, f"{ref} is {ref.dtype}, but {what}")
            return
        if self._excluded(module):
            self.disagree.append(module)
        scheme = _resized(_SCHEMES[algo], entry.get("group_size") or self.group_size)
        why = f"{self.where} says quant_algo {algo}"
        if scheme.weight_dtype != _FP4 or scheme.scale_dtype != _E4M3:
            self.builder.layer(module, scheme, why_static=why)
            return
        scale, outer = self.builder.find(module, "weight_scale"), self.builder.find(module, "weight_scale_2")
        if scale is None or outer is None:
            lost = "weight_scale" if scale is None else "weight_scale_2"
            self.builder.refuse(module, "missing", f"{ref} is {algo}, but has no {module}.{lost}")
        else:
            whole = Scale(scale, factor=outer, swizzled=self._swizzled(ref, scale))
            self.builder.layer(module, scheme, scale=whole, why_static=why)

    def _swizzled(self, weight: TensorRef, scale: TensorRef) -> bool:
        """Is an NVFP4 scale in cuBLAS's layout (an option of exports for single-file runtimes)? See `_layout`."""
        layout = _layout(weight, scale)
        if layout is None and len(self.layouts) == 1:
            return "swizzled" in self.layouts
        # such an export repeats its config in the header; without that, the layout is ModelOpt's own
        if layout is None and "quantization_config" in self.checkpoint.metadata:
            self.builder.problem("ambiguous", scale, "its layout may be row by row or cuBLAS's, and nothing says which")
        return layout == "swizzled"

    def _compressed(self, module: str, ref: TensorRef) -> None:
        """A layer of a model that was saved with its quantizers."""
        scale = self.builder.find(module, "weight_quantizer._scale")
        amax = self.builder.find(module, "input_quantizer._amax")
        assert scale is not None
        if ref.dtype != "F8_E4M3":
            detail = f"{ref} is {ref.dtype}; of models saved with their quantizers, only FP8 weights (F8_E4M3) are read"
            self.builder.refuse(module, "unsupported", detail)
        elif amax is None:
            detail = f"no {module}.input_quantizer._amax: only modelopt_state.pth, a pickle, says what its input is"
            self.builder.refuse(module, "unsupported", detail)
        else:
            single = set(scale.shape) <= {1}
            scheme = QuantizationScheme(tile=(-1, -1) if single else (1, -1), act_dtype=_E4M3)
            self.builder.layer(module, scheme, scale=Scale(scale), input_scale=Scale(amax, divisor=448.0))

    def refuse_transforms(self) -> None:
        """AWQ's and SVDQuant's tensors change what a layer computes."""
        for name, ref in self.checkpoint.tensors.items():
            if found := _TRANSFORM.fullmatch(name):
                detail = f"{name} changes what the layer computes (AWQ, SmoothQuant or SVDQuant): not supported"
                self.builder.refuse(found["module"] or "", "unsupported", detail)
                self.builder.claim(ref)

    def leftovers(self) -> None:
        """Quantizers that no FP8 layer owns: reported, not applied."""
        owned = {ref.name for spec in self.builder.layers.values() for ref in spec.refs}
        for name in self.checkpoint.tensors:
            module, _, leaf = name.rpartition(".")
            if leaf in ("k_bias", "v_bias") and module.endswith(leaf[0] + "_proj") and self.kv_cache:
                self.builder.exceptions[name] = "a KV-cache bias: reported, not applied"
            elif name not in owned and (found := _QUANTIZER.fullmatch(name)):
                self.builder.exceptions[name] = self._why_left(found["module"] or "", found["kind"])

    def _why_left(self, module: str, kind: str) -> str:
        if "bmm" in kind or "softmax" in kind:
            return "an attention quantizer: reported, not applied"
        if kind == "output_quantizer":
            return "an output quantizer (of a KV cache): reported, not applied"
        if module in self.builder.layers:
            return "what the weight's scale was computed from"
        return "a quantizer of a module without FP8 weight (a norm, a pooling, a float layer): reported, not applied"

    def build(self) -> Manifest:
        """The manifest, with notes on lists that disagree with the tensors."""
        builder = self.builder
        if self.disagree:
            builder.notes.append(list_notes("excluded, but stored in FP8", self.disagree, "the tensors decide"))
        if self.kv_cache:
            builder.notes.append("the KV-cache quantization is reported, not applied")
        if self.algo:
            builder.expects = self._expects
        return builder.build()

    def _expects(self, module: str, classes: tuple[str, ...]) -> bool:
        if self.mixed is not None:
            return module in self.mixed
        return "Linear" in classes and not self._excluded(module)

    def _excluded(self, module: str) -> bool:
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude)


def _layout(weight: TensorRef, scale: TensorRef) -> str | None:
    """Which layout the shape of an NVFP4 scale tells: cuBLAS's is padded to tiles of 128×4; None if both would fit."""
    flat = (weight.shape[0], -(-weight.shape[-1] * 2 // 16))
    tiles = (-(-flat[0] // 128) * 128, -(-flat[1] // 4) * 4)
    if flat == tiles:
        return None
    return "swizzled" if scale.shape == tiles else "flat"


def _resized(scheme: QuantizationScheme, size: int | None) -> QuantizationScheme:
    """The scheme with the file's own group or block size."""
    if not size:
        return scheme

    def resized(tile: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size if n > 1 else n for n in tile)

    return replace(scheme, tile=resized(scheme.tile), act_tile=resized(scheme.act_tile))


def _config(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The config and where it is: config.json (or the header), else `hf_quant_config.json`; ({}, "") if there is none.

    Raises DialectError if they say different algorithms.
    """
    config, where = quantization_config(checkpoint)
    alone = _inner(checkpoint.configs.get(FILE, {}))
    if str(config.get("quant_method")).startswith("modelopt"):
        config = _inner(config)
        both = [str(c.get("quant_algo")).upper() for c in (config, alone)]
        if alone and both[0] != both[1]:
            raise DialectError(f"{checkpoint.name}: {where} says quant_algo {both[0]}, {FILE} says {both[1]}")
        return config, where
    return (alone, FILE) if alone else ({}, "")


def _inner(table: dict[str, Any]) -> dict[str, Any]:
    """The table inside of `quantization`, where there is one."""
    inner = table.get("quantization")
    return inner if isinstance(inner, dict) else table
