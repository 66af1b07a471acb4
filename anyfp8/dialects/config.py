"""What several dialects need from a checkpoint's JSON: the `quantization_config`, wherever it is kept."""

from __future__ import annotations

import json
from typing import Any

from anyfp8.checkpoint import Checkpoint


def quantization_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The quantization config and where it was found; ({}, "") if there is none.

    Places, in order: config.json (`quantization_config`, its old name `compression_config`, either inside `text_config`
    for multimodal models), then quantization_config.json, then the header of the weights (ModelOpt's single files). One
    extra nesting is unwrapped, as transformers does.
    """
    config = checkpoint.configs.get("config.json", {})
    for where, table in (("config.json", config), ("config.json: text_config", config.get("text_config"))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(table, dict) and isinstance(found := table.get(key), dict) and found:
                inner = found.get("quantization_config")
                return (inner if isinstance(inner, dict) else found), f"{where}: {key}"
    if alone := checkpoint.configs.get("quantization_config.json", {}):
        return alone, "quantization_config.json"
    try:
        header = json.loads(checkpoint.metadata.get("quantization_config", "null"))
    except (ValueError, RecursionError):
        header = None
    return (header, "the header: quantization_config") if header and isinstance(header, dict) else ({}, "")


#: JSON files that say how a checkpoint is quantized, besides those that `quantization_config` reads
_OTHERS = ("anyfp8.json", "hf_quant_config.json", "quanto_qmap.json", "quantization_map.json")


def has_config(checkpoint: Checkpoint) -> bool:
    """Does any JSON file say how the checkpoint is quantized? If so, it is none of the dialects that have no config."""
    return bool(quantization_config(checkpoint)[0]) or any(name in checkpoint.configs for name in _OTHERS)
