"""torchao's flattened tensors: `Float8Tensor` and `MXTensor` in safetensors files.

Read from torchao 0.18.0, as transformers and diffusers save it. A quantized parameter `<module>.<param>` is stored as
`<module>._<param>_qdata` and `<module>._<param>_scale`, and the header's `__metadata__` holds a JSON record under the
parameter's name: class, block size, and how the input is quantized (null: not at all). Scales multiply. The records are
the truth; config.json only repeats what was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import has_config, quantization_config
from anyfp8.errors import DialectError, SchemeError
from anyfp8.header import DuplicateKey, no_duplicates
from anyfp8.manifest import Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme, Tile
from anyfp8.sources import Codes, Scale

#: MXTensor's ways to round an input's scale to a power of two that are ours as well
_SCALING = {"FLOOR": "e8m0_floor", "RCEIL": "e8m0_ceil"}

#: where a quantized parameter's codes are
_DATA = re.compile(r"(?P<param>(?:.*\.)?_\w+)_qdata")

Record = dict[str, Any]


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'torchao', or (files saved without a config) a record of a quantized tensor in the header."""
    config, where = quantization_config(checkpoint)
    if config.get("quant_method") == "torchao":
        return f"{where}: quant_method 'torchao'"
    if has_config(checkpoint):
        return None
    return next((f"the header says that {name} is a {kind}" for name, kind, _ in _records(checkpoint)), None)


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The header says which parameters are quantized, and how."""
    builder = ManifestBuilder(checkpoint, "torchao", evidence)
    known = {key for record in _records(checkpoint) for key in _add(builder, *record)}
    for name, ref in checkpoint.tensors.items():
        if (found := _DATA.fullmatch(name)) and name not in known:
            builder.problem("contradiction", ref, "the header has no record that says how it is quantized")
            builder.claim(ref, checkpoint.tensors.get(f"{found['param']}_scale"))
    kept = quantization_config(checkpoint)[0].get("modules_to_not_convert") or []
    disagree = [name for name in builder.layers if any(f".{entry}." in f".{name}." for entry in kept)]
    if disagree:
        builder.notes.append(list_notes("in modules_to_not_convert, but stored in FP8", disagree, "the tensors decide"))
    return builder.build()


def _add(builder: ManifestBuilder, name: str, kind: str, record: Record) -> Iterable[str]:
    """Claim one quantized parameter; returns the names of its tensors."""
    module, dot, param = name.rpartition(".")
    parts = {part: f"{module}{dot}_{param}_{part}" for part in record["_tensor_data_names"]}
    stored = {part: ref for part, key in parts.items() if (ref := builder.checkpoint.tensors.get(key))}
    builder.claim(*stored.values())
    if absent := [key for part, key in parts.items() if part not in stored]:
        builder.problem("missing", name, f"the header says that it is a {kind}, but {', '.join(absent)} is missing")
        return parts.values()
    try:
        scheme, scale = _scheme(kind, record["_data"], stored)
    except SchemeError as error:
        builder.problem("unsupported", name, f"is a {kind}: {error}")
        return parts.values()
    codes = Codes(stored["qdata"], scheme.weight_dtype)
    builder.layer(module, scheme, codes=codes, scale=scale, param=param)
    return parts.values()


def _records(checkpoint: Checkpoint) -> Iterator[tuple[str, str, Record]]:
    """Name, class and record of every parameter that the header says is no ordinary tensor."""
    for name, text in checkpoint.metadata.items():
        if not text.lstrip().startswith("{") or '"_type"' not in text:  # "format": "pt", the list tensor_names ...
            continue
        try:
            record = json.loads(text, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError, DuplicateKey) as error:
            raise DialectError(
                f"{checkpoint.name}: the header's record of {name} is no usable JSON ({error})"
            ) from None
        if (kind := record.get("_type")) not in ("Tensor", "torch.Tensor", None):
            yield name, str(kind), record


def _scheme(kind: str, data: Record, stored: dict[str, TensorRef]) -> tuple[QuantizationScheme, Scale]:
    """How a parameter of this class is quantized, and how its scale is stored; SchemeError if it can't be read."""
    if kind not in ("Float8Tensor", "MXTensor"):
        raise SchemeError("only Float8Tensor and MXTensor are read")
    if set(stored) != {"qdata", "scale"}:
        raise SchemeError(f"it consists of {', '.join(stored)}; qdata and scale are expected")
    weight, scale, act = stored["qdata"], stored["scale"], data.get("act_quant_kwargs")
    if not weight.is_fp8:
        raise SchemeError(f"{weight} is {weight.dtype}, not FP8")
    dtype = dtype_name(weight.torch_dtype)
    if kind == "Float8Tensor":
        tile = _tile(data.get("block_size") or weight.shape, weight.shape)
        return QuantizationScheme(dtype, tile, **_input(act)), Scale(scale)
    if len(weight.shape) != 2 and data.get("is_swizzled_scales"):
        raise SchemeError(f"swizzled scales of a weight of shape {list(weight.shape)}")
    tile = (*(1,) * (len(weight.shape) - 1), _size(data["block_size"]))
    scheme = QuantizationScheme(dtype, tile, "float8_e8m0fnu", **_mx_input(act))
    return scheme, Scale(scale, "e8m0", swizzled=bool(data.get("is_swizzled_scales")))


def _size(value: Any) -> int:
    if type(value) is not int:
        raise SchemeError(f"block_size {value!r} is no size")
    return value


def _tile(block: list[int] | Tile, shape: tuple[int, ...]) -> Tile:
    if len(block) != len(shape):
        raise SchemeError(f"block_size {list(block)} for a weight of shape {list(shape)}")
    return tuple(-1 if b == n else _size(b) for b, n in zip(block, shape, strict=True))


def _input(act: Record | None) -> dict[str, Any]:
    """The scheme's fields for the input of a Float8Tensor."""
    if act is None:
        return {}
    data = act["_data"]
    if data.get("hp_value_lb") is not None or data.get("hp_value_ub") is not None:
        raise SchemeError("its input's scale has bounds (hp_value_lb, hp_value_ub)")
    granularity, where = data["granularity"]["_type"], data["granularity"].get("_data") or {}
    tile = {"PerTensor": (-1, -1), "PerRow": (1, -1), "PerToken": (1, -1)}.get(granularity)
    if granularity == "PerBlock":
        tile = tuple(where["block_size"])
    elif granularity == "PerGroup":
        tile = (1, where["group_size"])
    if tile is None or where.get("dim", -1) != -1:
        raise SchemeError(f"its input's granularity is {granularity} {where or ''}".rstrip())
    return {"act_dtype": _dtype(data["float8_dtype"]), "act_dynamic": True, "act_tile": tile}


def _mx_input(act: Record | None) -> dict[str, Any]:
    """The scheme's fields for the input of an MXTensor."""
    if act is None:
        return {}
    data = act["_data"]
    mode = data["scaling_mode"]["_data"]
    if mode not in _SCALING:
        raise SchemeError(f"its input's scaling_mode is {mode}; those that are read are {', '.join(_SCALING)}")
    tile = (1, _size(data["block_size"]))
    fields = {"act_dtype": _dtype(data["elem_dtype"]), "act_dynamic": True, "act_tile": tile}
    return fields | {"act_scale": _SCALING[mode]}


def _dtype(value: Record) -> str:
    return str(value["_data"])
