"""compressed-tensors (llm-compressor, auto-round's `llm_compressor` format): FP8, MXFP8, MXFP6, MXFP4 and NVFP4.

Read from compressed-tensors 0.19.0 and 0.20.1. `config_groups` name targets (exact path, `re:` regex, class name) and
args. Scales multiply, but for NVFP4's `weight_global_scale` and `input_global_scale`, which divide; zero points are
subtracted from the codes. The tensors decide which layers are quantized, the groups with what granularity.
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

_FP8 = {"num_bits": 8, "type": "float"}
_TENSOR = _FP8 | {"strategy": "tensor"}
_GROUP_128 = _FP8 | {"strategy": "group", "group_size": 128, "dynamic": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def _mx(bits: int) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


#: what compressed-tensors means where a group's name is a preset and its value a list of targets: weights, inputs
_PRESETS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "FP8": (_TENSOR, _TENSOR),
    "FP8_DYNAMIC": (_FP8 | {"strategy": "channel"}, _FP8 | {"strategy": "token", "dynamic": True}),
    "FP8_BLOCK": (_FP8 | {"strategy": "block", "block_structure": [128, 128]}, _GROUP_128),
    "MXFP8": (_mx(8), _mx(8) | {"dynamic": True}),
    "MXFP8A16": (_mx(8), None),
    "MXFP6A8": (_mx(6), _mx(8) | {"dynamic": True}),
    "MXFP6A16": (_mx(6), None),
    "MXFP4": (_mx(4), _mx(4) | {"dynamic": True}),
    "MXFP4A16": (_mx(4), None),
    "MXFP4XFP8": (_mx(4), _GROUP_128),
    "NVFP4": (_NVFP4, _NVFP4 | {"dynamic": "local"}),
    "NVFP4A16": (_NVFP4, None),
}


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method, or (old files) the `compression_config` key with config groups."""
    config, where = quantization_config(checkpoint)
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return f"{where}: quant_method 'compressed-tensors'"
    if method is None and "config_groups" in config:
        return f"{where}: config_groups"
    return None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized; the best matching group says how."""
    config, where = quantization_config(checkpoint)
    where = f"{checkpoint.name}: {where}"
    _refuse(config, where)
    groups = _Groups(config, where)
    builder = ManifestBuilder(checkpoint, "compressed-tensors", evidence)
    builder.expects = groups.expects
    disagree: list[str] = []
    for module, ref in quantized_weights(builder).items():
        if any(_matches(entry, module) for entry in groups.ignore):
            disagree.append(module)
        candidates = groups.candidates(module, builder)
        if not candidates:
            detail = f"{ref} is {ref.dtype}, but no config group targets it, so its granularity is unknown"
            builder.refuse(module, "contradiction", detail)
            continue
        schemes, problems = groups.schemes(candidates)
        if not schemes:
            builder.refuse(module, "unsupported", "; ".join(problems))
            continue
        by_class = schemes if len(schemes) > 1 else None
        likeliest = schemes.get("Linear") or next(iter(schemes.values()))
        why = "its config group says that the input is static"
        if likeliest.act_scale == "e4m3":
            why = "its config group says that the input's scales have two levels, the outer one static"
        builder.layer(module, likeliest, why_static=why, by_class=by_class)
    if disagree:
        builder.notes.append(list_notes("ignored by the config, but stored quantized", disagree, "the tensors decide"))
    if config.get("kv_cache_scheme"):
        builder.notes.append("the KV-cache scheme is reported, not applied")
    return builder.build()


def _refuse(config: Mapping[str, Any], where: str) -> None:
    if config.get("transform_config"):
        raise DialectError(f"{where} has a transform_config (online rotations), which must be executed: not supported")
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise DialectError(f"{where} has sparsity format {sparsity['format']!r}: not supported")


class _Groups:
    """The config groups and the ignore list, and which of them a module belongs to."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.ignore: list[str] = config.get("ignore") or []
        self.groups = {n: _expanded(n, g, where) for n, g in (config.get("config_groups") or {}).items()}
        owners: dict[str, str] = {}
        for name, group in self.groups.items():
            for target in group["targets"]:
                if self.groups[owners.setdefault(target, name)] != group:
                    raise DialectError(
                        f"{where}: target {target!r} is in two different groups, {owners[target]!r} and {name!r}"
                    )
        #: (target, group) in order of preference inside one kind: by the alphabet
        self.targets = sorted(owners.items())
        _check_entries("ignore", self.ignore, where)
        _check_entries("targets", owners, where)

    def candidates(self, module: str, builder: ManifestBuilder) -> dict[str, str]:
        """target → group for a module, in compressed-tensors' order: exact path, then regex, then class name.

        More than one only for class names: which class the module has isn't in the file. A target is a class name if it
        is no regex and no module of the file.
        """
        if named := self._named(module):
            return {named: dict(self.targets)[named]}
        return {t: g for t, g in self.targets if not t.startswith("re:") and "." not in t and not stored(builder, t)}

    def _named(self, module: str) -> str | None:
        for is_regex in (False, True):
            for target, _ in self.targets:
                if target.startswith("re:") == is_regex and _matches(target, module):
                    return target
        return None

    def schemes(self, candidates: Mapping[str, str]) -> tuple[dict[str, QuantizationScheme], list[str]]:
        """target → scheme of the candidates that have one, and why the others have none."""
        found: dict[str, QuantizationScheme] = {}
        problems: list[str] = []
        for target, name in candidates.items():
            try:
                found[target] = QuantizationScheme.from_compressed_tensors(self.groups[name])
            except SchemeError as error:
                problems.append(f"config group {name}: {error}")
        return found, problems

    def expects(self, module: str, classes: tuple[str, ...]) -> bool:
        """Do the lists mean this module, of a class with these names, to be quantized? (Of others than these two
        classes compressed-tensors quantizes none, whatever the targets say.)"""
        if not {"Linear", "Embedding"} & set(classes):
            return False
        if any(_matches(entry, module) or entry in classes for entry in self.ignore):
            return False
        return self._named(module) is not None or any(target in classes for target, _ in self.targets)


def _expanded(name: str, group: Any, where: str) -> dict[str, Any]:
    """One config group; `{"FP8": ["Linear"]}` is a preset with its targets."""
    if isinstance(group, list):
        if name.upper() not in _PRESETS:
            raise DialectError(
                f"{where}: group {name!r} is a list of targets, but its name is no compressed-tensors preset for "
                f"floats; known: {', '.join(_PRESETS)}"
            )
        weights, inputs = _PRESETS[name.upper()]
        group = {"targets": group, "weights": weights, "input_activations": inputs}
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list) or "weights" not in group:
        raise DialectError(f"{where}: config group {name!r} needs targets and weights")
    return group


def _check_entries(what: str, entries: Iterable[Any], where: str) -> None:
    for entry in entries:
        if not isinstance(entry, str):
            raise DialectError(f"{where}: {what} must be names, not {entry!r}")
        if entry.startswith("re:"):
            re.compile(entry[3:])


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module
