"""Our own manifest, `anyfp8.json` beside the weights, where every contradiction is an error.

    {"format": "anyfp8", "version": 1, "producer": "...", "ignore": ["exact module name", ...],
     "layer_config": {"<module path>": {"weight_dtype": "float8_e4m3fn", "tile": [-1, -1], "scale_dtype": "float32",
                                        "act_dtype": "float8_e4m3fn", "act_dynamic": false, "act_tile": [-1, -1]}}}

Tensors: `<module>.weight` (codes), `<module>.weight_scale`, `<module>.input_scale` (static only), the rest as it is.
A parameter of another name (`attn.in_proj_weight`, `mlp.experts.gate_up_proj`) is listed by its own path and stored
with `<path>_scale`; its input is not quantized.
"""

from __future__ import annotations

from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder
from anyfp8.errors import DialectError, SchemeError
from anyfp8.folding import join
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
        owner, param = _place(checkpoint, module)
        weight = builder.find(owner, param)
        if weight is not None and set(scheme.tile) != {-1} and len(scheme.tile) != len(weight.shape):
            detail = f"tile {list(scheme.tile)} for a weight of shape {list(weight.shape)}"
            builder.refuse(module, "contradiction", detail)
            continue
        if param != "weight" and not scheme.symmetric:
            detail = "a parameter that is no module's weight can't have zero points: they would have no name"
            builder.refuse(module, "contradiction", detail)
            continue
        builder.layer(owner, scheme, why_static=f"{FILE} says that the input is static", param=param)
        scale = builder.find(owner, f"{param}_scale")
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


def _place(checkpoint: Checkpoint, path: str) -> tuple[str, str]:
    """Module and parameter of an entry: `<path>.weight`, unless the path itself is a tensor's of another name."""
    owner, _, param = path.rpartition(".")
    if path in checkpoint.tensors and join(path, "weight") not in checkpoint.tensors and param != "weight":
        return owner, param
    return path, "weight"


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
