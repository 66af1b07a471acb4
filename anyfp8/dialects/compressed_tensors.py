"""compressed-tensors (llm-compressor, auto-round's `llm_compressor` format): float-quantized and naive-quantized FP8.

Read from compressed-tensors 0.19.0 and 0.20.1. `config_groups` name targets (exact path, `re:` regex, class name) and
args; every scale multiplies. The tensors decide which layers are quantized, the groups with what granularity.
"""

from __future__ import annotations

import re
from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError, SchemeError
from anyfp8.manifest import Manifest
from anyfp8.scheme import PRESETS, QuantizationScheme


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
    _refuse(config, f"{checkpoint.name}: {where}")
    groups = _groups(config, f"{checkpoint.name}: {where}")
    ignore = config.get("ignore") or []
    builder = ManifestBuilder(checkpoint, "compressed-tensors", evidence)
    disagree: list[str] = []
    for module, ref in builder.fp8_weights().items():
        if any(_matches(target, module) for target in ignore):
            disagree.append(module)
        candidates = _candidates(module, groups, checkpoint)
        if not candidates:
            detail = f"{ref} is {ref.dtype}, but no config group targets it, so its granularity is unknown"
            builder.refuse(module, "contradiction", detail)
            continue
        try:
            schemes = {
                target: QuantizationScheme.from_compressed_tensors(groups[g]) for target, g in candidates.items()
            }
        except SchemeError as error:
            builder.refuse(
                module, "unsupported", f"config group {' or '.join(sorted(set(candidates.values())))}: {error}"
            )
            continue
        by_class = schemes if len(schemes) > 1 else None
        likeliest = schemes.get("Linear") or next(iter(schemes.values()))
        builder.layer(module, likeliest, why_static="its config group says that the input is static", by_class=by_class)
    if disagree:
        builder.notes.append(list_notes("ignored by the config, but stored in FP8", disagree, "the tensors decide"))
    if config.get("kv_cache_scheme"):
        builder.notes.append("the KV-cache scheme is reported, not applied")
    return builder.build()


def _refuse(config: dict[str, Any], where: str) -> None:
    if config.get("transform_config"):
        raise DialectError(f"{where} has a transform_config (online rotations), which must be executed: not supported")
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise DialectError(f"{where} has sparsity format {sparsity['format']!r}: not supported")


def _groups(config: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Group name → group; `{"FP8": ["Linear"]}` is a preset with its targets."""
    groups = {}
    for name, group in (config.get("config_groups") or {}).items():
        if isinstance(group, list):
            if name.upper() not in PRESETS:
                raise DialectError(f"{where}: group {name!r} is a list of targets, but its name is no known preset")
            args = {"num_bits": 8, "type": "float"}
            presets: dict[str, dict[str, Any]] = {
                "FP8": {"weights": args | {"strategy": "tensor"}, "input_activations": args | {"strategy": "tensor"}},
                "FP8_DYNAMIC": {
                    "weights": args | {"strategy": "channel"},
                    "input_activations": args | {"strategy": "token", "dynamic": True},
                },
                "FP8_BLOCK": {
                    "weights": args | {"strategy": "block", "block_structure": [128, 128]},
                    "input_activations": args | {"strategy": "group", "group_size": 128, "dynamic": True},
                },
            }
            if name.upper() not in presets:
                raise DialectError(f"{where}: preset group {name!r} is not a compressed-tensors FP8 preset")
            group = presets[name.upper()] | {"targets": group}
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list) or "weights" not in group:
            raise DialectError(f"{where}: config group {name!r} needs targets and weights")
        groups[name] = group
    owners: dict[str, str] = {}
    for name, group in groups.items():
        for target in group["targets"]:
            if groups[owners.setdefault(target, name)] != group:
                raise DialectError(
                    f"{where}: target {target!r} is in two different groups, {owners[target]!r} and {name!r}"
                )
    return groups


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target == module


def _candidates(module: str, groups: dict[str, dict[str, Any]], checkpoint: Checkpoint) -> dict[str, str]:
    """target → group for a module, in compressed-tensors' order: exact path, then regex, then class name; inside one
    kind, alphabetical by target.

    More than one only for class names: which class the module has isn't in the file. A target is a class name if it is
    no regex and no module of the file.
    """
    targets = sorted((target, name) for name, group in groups.items() for target in group["targets"])
    for is_regex in (False, True):
        for target, name in targets:
            if target.startswith("re:") == is_regex and _matches(target, module):
                return {target: name}
    return {t: name for t, name in targets if not t.startswith("re:") and f"{t}.weight" not in checkpoint.tensors}
