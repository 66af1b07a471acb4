"""Our own manifest, `anyfp8.json` beside the weights, where every contradiction is an error.

    {"format": "anyfp8", "version": 1, "producer": "...", "ignore": ["exact module name", ...],
     "layer_config": {"<module path>": {"weight_dtype": "float8_e4m3fn", "tile": [-1, -1], "scale_dtype": "float32",
                                        "act_dtype": "float8_e4m3fn", "act_dynamic": false, "act_tile": [-1, -1]}}}

Tensors: `<module>.weight` (codes), `<module>.weight_scale`, `<module>.input_scale` (static only), the rest as it is.
"""

from __future__ import annotations

from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder
from anyfp8.errors import DialectError, SchemeError
from anyfp8.manifest import Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme

FILE = "anyfp8.json"
_KEYS = {"format", "version", "producer", "ignore", "layer_config"}


def match(checkpoint: Checkpoint) -> str | None:
    """The file itself is the evidence."""
    return FILE if FILE in checkpoint.configs else None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The manifest as written; entries, tensors and lists must agree exactly."""
    config = _check(checkpoint.configs.get(FILE), f"{checkpoint.name}: {FILE}")
    builder = ManifestBuilder(checkpoint, "anyfp8", evidence, lenient=False)
    stored = builder.fp8_weights()
    for module, entry in config["layer_config"].items():
        try:
            scheme = QuantizationScheme.from_dict(entry)
        except SchemeError as error:
            builder.refuse(module, "contradiction", str(error))
            continue
        weight = stored.get(module)
        if weight is not None and set(scheme.tile) != {-1} and len(scheme.tile) != len(weight.shape):
            detail = f"tile {list(scheme.tile)} for a weight of shape {list(weight.shape)}"
            builder.refuse(module, "contradiction", detail)
            continue
        builder.layer(module, scheme, why_static=f"{FILE} says that the input is static")
        scale = builder.find(module, "weight_scale")
        if scale is not None and dtype_name(scale.torch_dtype) != scheme.scale_dtype:
            detail = f"is {dtype_name(scale.torch_dtype)}, {FILE} says {scheme.scale_dtype}"
            builder.problem("contradiction", scale, detail)
        if module in config["ignore"]:
            builder.problem("contradiction", module, "listed in layer_config and in ignore")
    for module, ref in stored.items():
        if module not in config["layer_config"]:
            builder.refuse(
                module, "contradiction", f"{ref} is {ref.dtype}, but {FILE} has no layer_config entry for it"
            )
    return builder.build()


def _check(config: Any, where: str) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise DialectError(f"{where} is missing")
    if unknown := sorted(set(config) - _KEYS):
        raise DialectError(
            f"{where} has unknown field {', '.join(map(repr, unknown))}; valid: {', '.join(sorted(_KEYS))}"
        )
    if config.get("format") != "anyfp8" or config.get("version") != 1:
        raise DialectError(
            f"{where} has format {config.get('format')!r} version {config.get('version')!r}; "
            "this anyfp8 reads format 'anyfp8' version 1"
        )
    ignore, layers = config.get("ignore", []), config.get("layer_config")
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise DialectError(f"{where}: ignore must be a list of module names")
    if not isinstance(layers, dict) or not all(isinstance(entry, dict) for entry in layers.values()):
        raise DialectError(f"{where}: layer_config must map module names to schemes")
    return {"ignore": ignore, "layer_config": layers}
