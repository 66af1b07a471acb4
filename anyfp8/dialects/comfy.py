"""ComfyUI single files: the `scaled_fp8` marker, `comfy_quant` tensors, or labels in the header. No config.

Read from ComfyUI 0.3.64 and 0.33.0, comfy-kitchen 0.2.40, convert-to-quant 1.3.4. Three generations of one idea: an
(empty) tensor `<prefix>scaled_fp8` with `scale_weight`, `scale_input` beside each FP8 weight; for each layer a uint8
tensor `comfy_quant` that holds JSON; the same JSON for all layers as `_quantization_metadata` in the header. The last
two go with `weight_scale`, `input_scale`, but either spelling is met anywhere. All tensors of the model have one
prefix, and other components may lie beside it. How one layer is read: `comfy_layers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.comfy_layers import add_layer
from anyfp8.dialects.config import has_config
from anyfp8.errors import DialectError
from anyfp8.header import DuplicateKey, no_duplicates
from anyfp8.manifest import Manifest
from anyfp8.sources import FLOATS

HEADER, LABEL, MARKER = "_quantization_metadata", "comfy_quant", "scaled_fp8"
#: under which ComfyUI keeps the diffusion model of a whole checkpoint; the first is unmistakable
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.")
#: components that may lie beside a model without a prefix
_BESIDE = ("first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.")
#: tokenizers that ComfyUI keeps as tensors; its flags have names like `__index_timestep_zero__`
_LOADER = ("spiece_model", "tekken_model")

Label = dict[str, Any]


def match(checkpoint: Checkpoint) -> str | None:
    """Labels, a marker, or a scale in the old spelling, and nobody's quantization config."""
    if has_config(checkpoint):
        return None
    if HEADER in checkpoint.metadata:
        return f"{HEADER} in the header"
    for leaf in (LABEL, MARKER, "scale_weight"):
        if found := next((name for name in checkpoint.tensors if name.rpartition(".")[2] == leaf), None):
            return f"tensor {found}"
    return None


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """Every FP8 weight is quantized, and every labelled layer; the labels say what the tensors don't."""
    builder = ManifestBuilder(checkpoint, "comfy", evidence)
    markers = [name for name in checkpoint.tensors if name.rpartition(".")[2] == MARKER]
    labels, header = _tensor_labels(builder), _header_labels(builder)
    scaled = [module for module in builder.fp8_weights() if builder.find(module, "weight_scale", "scale_weight")]
    modules = [*scaled, *labels, *(module for module in header if builder.find(module, "weight"))]
    prefix = _prefix([name.removesuffix(MARKER) for name in markers], modules)
    _merge(builder, labels, header, prefix)
    for name in (*markers, *(name for name in checkpoint.tensors if name.rpartition(".")[2] == LABEL)):
        builder.exceptions[name] = "a format marker"
    _set_aside(builder, prefix, modules)

    # a marker of two elements says "never multiply in FP8": inputs stay as they are
    weight_only = prefix + MARKER in markers and checkpoint.tensors[prefix + MARKER].shape == (2,)
    in_float = []
    for module in dict.fromkeys((*builder.fp8_weights(), *labels)):
        weight = builder.find(module, "weight")
        if not f"{module}.".startswith(prefix) or (weight is not None and weight.name in builder.exceptions):
            continue
        if weight is not None and weight.dtype in FLOATS:
            in_float.append(module)
        else:
            add_layer(builder, module, labels.get(module), weight_only)
    if in_float:
        builder.notes.append(list_notes("labelled as quantized, but stored in float", in_float, "the tensors decide"))
    if labels and (silent := [name for name in builder.layers if name not in labels]):
        builder.notes.append(list_notes("not labelled, but stored with a scale", silent, "the tensors decide"))
    bare = [name for name, spec in builder.layers.items() if spec.scheme.weight_only]
    if bare:
        builder.notes.append(
            list_notes("weight-only", bare, "no scale for their input, or not to be multiplied in FP8")
        )
    return builder.build()


def _tensor_labels(builder: ManifestBuilder) -> dict[str, Label]:
    """Module → what its `comfy_quant` tensor says."""
    found = {}
    for name, ref in builder.checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf == LABEL:
            if ref.dtype != "U8":
                raise DialectError(f"{ref} is {ref.dtype}; the bytes (U8) of a JSON object are expected")
            found[module] = _object(bytes(ref.read().flatten().tolist()), str(ref))
    return found


def _header_labels(builder: ManifestBuilder) -> dict[str, Label]:
    """Module → what the header says of it."""
    where = f"{builder.checkpoint.name}: {HEADER}"
    layers = _object(builder.checkpoint.metadata.get(HEADER, '{"layers": {}}'), where).get("layers")
    if not isinstance(layers, dict) or not all(isinstance(label, dict) for label in layers.values()):
        raise DialectError(f"{where} needs an object `layers` that maps module names to objects")
    return layers


def _object(text: str | bytes, where: str) -> Label:
    try:
        value = json.loads(text, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError, DuplicateKey) as error:
        raise DialectError(f"{where} is no usable JSON ({error})") from None
    if not isinstance(value, dict):
        raise DialectError(f"{where} holds {value!r}; a JSON object is expected")
    return value


def _merge(builder: ManifestBuilder, labels: dict[str, Label], header: dict[str, Label], prefix: str) -> None:
    """Add the header's labels. Its names may lack the model's prefix, which ComfyUI would not notice."""
    absent = []
    for module, label in header.items():
        name = next((m for m in (module, prefix + module) if builder.find(m, "weight")), None)
        if name is None:
            absent.append(module)
        else:
            own = labels.get(name, {})
            if any(own.get(key, value) != value for key, value in label.items()):
                detail = f"its {LABEL} tensor says {own}, {HEADER} says {label}"
                builder.problem("contradiction", name, detail)
            labels[name] = label | own
    if absent:
        builder.notes.append(list_notes(f"in {HEADER}, but not in the file", absent, "the tensors decide"))


def _prefix(marked: list[str], modules: Iterable[str]) -> str:
    """The prefix of the model: a well-known one, or the only marker's, if all quantized layers have it."""
    paths = [f"{module}." for module in modules]
    if any(path.startswith(_PREFIXES[0]) for path in paths):
        return _PREFIXES[0]
    candidates = (*(marked if len(marked) == 1 else ()), *_PREFIXES)
    return next((prefix for prefix in candidates if paths and all(path.startswith(prefix) for path in paths)), "")


def _set_aside(builder: ManifestBuilder, prefix: str, modules: Iterable[str]) -> None:
    """Name what is not the model's: other components, and entries that only ComfyUI's own loader looks at."""
    beside = tuple(root for root in _BESIDE if not any(module.startswith(root) for module in modules))
    for name in builder.checkpoint.tensors:
        leaf = name.rpartition(".")[2]
        if (prefix and not name.startswith(prefix)) or (not prefix and name.startswith(beside)):
            builder.exceptions[name] = "another component's tensor under another prefix"
        elif (leaf.startswith("__") and leaf.endswith("__")) or leaf in _LOADER:
            builder.exceptions[name] = "for ComfyUI's own loader"
