"""What several dialects need from a checkpoint's JSON: the `quantization_config`, wherever it is kept."""

from __future__ import annotations

from typing import Any

from anyfp8.checkpoint import Checkpoint


def quantization_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """The quantization config and where it was found; ({}, "") if there is none.

    Places, in order: config.json (`quantization_config`, its old name `compression_config`, either inside `text_config`
    for multimodal models), then quantization_config.json. One extra nesting is unwrapped, as transformers does.
    """
    config = checkpoint.configs.get("config.json", {})
    for where, table in (("config.json", config), ("config.json: text_config", config.get("text_config"))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(table, dict) and isinstance(found := table.get(key), dict) and found:
                inner = found.get("quantization_config")
                return (inner if isinstance(inner, dict) else found), f"{where}: {key}"
    alone = checkpoint.configs.get("quantization_config.json", {})
    return (alone, "quantization_config.json") if alone else ({}, "")
