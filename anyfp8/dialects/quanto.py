"""optimum-quanto: `quantization_map.json` or `quanto_qmap.json` beside a state dict, and diffusers' QuantoConfig.

Read from optimum-quanto 0.2.7 and diffusers 0.42.1. Tensors: `<module>.weight._data` (codes, in the weight's shape),
`<module>.weight._scale` ([out, 1, ...], or () if there is one output; multiplies), `<module>.input_scale` and
`<module>.output_scale` (1.0 where unused). The map says module → {"weights": type, "activations": type}.

A calibrated file is read as the model was calibrated: inputs of Linear layers are rounded with `input_scale`; inputs of
convolutions and norms, and all outputs, are not (quanto 0.2.7 drops its output hooks while calibrating, but after a
reload it rounds every output: two different models, of which only the first was measured).
"""

from __future__ import annotations

from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import ManifestBuilder
from anyfp8.dialects.config import quantization_config
from anyfp8.errors import DialectError
from anyfp8.manifest import Manifest
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import Codes, Scale

#: quanto's README names the file that its users write; Quantized...Model.save_pretrained writes the other
MAPS = ("quanto_qmap.json", "quantization_map.json")
_DATA, _SCALE = ".weight._data", ".weight._scale"
_FORMATS = {
    "qfloat8": "float8_e4m3fn",
    "qfloat8_e4m3fn": "float8_e4m3fn",
    "qfloat8_e5m2": "float8_e5m2",
    "qfloat8_e4m3fnuz": "float8_e4m3fnuz",
}
_NONE = (None, "none")


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'quanto', a quantization map, or quanto's tensor names."""
    config, where = quantization_config(checkpoint)
    if config.get("quant_method") == "quanto":
        return f"{where}: quant_method 'quanto'"
    if found := next((name for name in MAPS if _is_map(checkpoint.configs.get(name))), None):
        return found
    if config.get("quant_method") is not None:
        return None
    names = (name for name in checkpoint.tensors if name.endswith(_DATA))
    pair = next((name for name in names if name.removesuffix(_DATA) + _SCALE in checkpoint.tensors), None)
    return None if pair is None else f"tensors named like {pair}"


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized, the map whether their inputs are."""
    where, entries = _entries(checkpoint)
    builder = ManifestBuilder(checkpoint, "quanto", evidence)
    for module, data in _modules(checkpoint).items():
        problem = _layer(builder, module, data, entries.get(module), where)
        if problem is not None:
            builder.problem(problem[0], f"{module}.weight", problem[1])
            builder.claim(*(ref for name, ref in checkpoint.tensors.items() if name.startswith(f"{module}.weight._")))
    for module, entry in entries.items():
        spec = builder.layers.get(module)
        for leaf in ("input_scale", "output_scale"):
            ref = builder.find(module, leaf)
            if ref is not None and (spec is None or spec.input_scale is None or leaf == "output_scale"):
                builder.exceptions[ref.name] = _why_unused(leaf, entry)
    builder.expects = lambda module, classes: entries.get(module, {}).get("weights") not in _NONE
    return builder.build()


def _layer(
    builder: ManifestBuilder, module: str, data: TensorRef, entry: dict[str, Any] | None, where: str
) -> tuple[str, str] | None:
    """Add the layer, or return what is wrong with it: a kind and a detail."""
    if entry is None:
        return "contradiction", f"{data} is quantized, but {where} has no entry for {module}"
    kinds = [kind for kind in (entry.get("weights"), entry.get("activations")) if kind not in _NONE]
    if unknown := [str(kind) for kind in kinds if kind not in _FORMATS]:
        return "unsupported", f"{where} says {' and '.join(unknown)}; FP8 types are read ({', '.join(_FORMATS)})"
    if entry.get("weights") in _NONE:
        return "contradiction", f"{data} is quantized, but {where} says that the weights are not"
    scale = builder.checkpoint.tensors.get(module + _SCALE)
    if scale is None:
        return "missing", f"{data} is {data.dtype}, but has no scale (looked for {module}{_SCALE})"
    format, act = _FORMATS[entry["weights"]], entry.get("activations")
    scheme = QuantizationScheme(format, (1, -1))
    if act not in _NONE and len(data.shape) == 2:
        scheme = QuantizationScheme(format, (1, -1), act_dtype=_FORMATS[act])
    why = f"{where} says activations {act!r}"
    builder.layer(module, scheme, codes=Codes(data, format), scale=Scale(scale), why_static=why)
    return None


def _entries(checkpoint: Checkpoint) -> tuple[str, dict[str, dict[str, Any]]]:
    """Where the map is, and the map; diffusers' config says the same type for all layers that are quantized."""
    for name in MAPS:
        if _is_map(found := checkpoint.configs.get(name)):
            assert found is not None
            return name, found
    config, where = quantization_config(checkpoint)
    kind = config.get("weights_dtype", config.get("weights"))
    if config.get("quant_method") != "quanto" or not isinstance(kind, str):
        raise DialectError(
            f"{checkpoint.name} holds quanto tensors, but no quantization map, so whether inputs are rounded is not "
            f"known: save quanto.quantization_map(model) as {' or '.join(MAPS)} beside it"
        )
    entry = {"weights": f"q{kind}", "activations": config.get("activations")}
    return where, dict.fromkeys(_modules(checkpoint), entry)


def _modules(checkpoint: Checkpoint) -> dict[str, TensorRef]:
    """Module path → its codes."""
    return {name.removesuffix(_DATA): ref for name, ref in checkpoint.tensors.items() if name.endswith(_DATA)}


def _is_map(value: Any) -> bool:
    return bool(value) and all(isinstance(v, dict) and set(v) == {"weights", "activations"} for v in value.values())


def _why_unused(leaf: str, entry: dict[str, Any]) -> str:
    if entry.get("activations") in _NONE:
        return "a placeholder: activations are not quantized"
    if leaf == "output_scale":
        return "outputs are not rounded in the model as it was calibrated"
    return "quanto rounds inputs of Linear layers with quantized weights only"
