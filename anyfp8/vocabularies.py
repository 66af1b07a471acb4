"""Other producers' words for a quantization scheme, turned into the fields of `QuantizationScheme`.

Sources: auto-round 0.16.1, compressed-tensors 0.19.0 and 0.20.1. Nothing is guessed: an unknown key or value, or one of
another type, is a SchemeError that lists the valid ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyfp8.errors import SchemeError

_E4M3, _FP6, _FP4 = "float8_e4m3fn", "float6_e2m3fn", "float4_e2m1fn"
_WIDTHS = {8: _E4M3, 6: _FP6, 4: _FP4}


@dataclass(frozen=True)
class _Family:
    """A kind of quantization: dtype by bits, the one group size it has (None: any tile), how its scales are stored, and
    how those of a dynamic input are rounded."""

    dtypes: Mapping[int, str]
    group: int | None = None
    scale_dtype: str = "float32"
    act_scale: str = "float32"


_FLOAT = _Family({8: _E4M3})
_MX = _Family(_WIDTHS, 32, "float8_e8m0fnu", "e8m0_floor")
_NV = _Family({4: _FP4}, 16, "float8_e4m3fn", "e4m3")

_AUTO_ROUND_KEYS = (
    *("bits", "group_size", "sym", "data_type", "act_bits", "act_group_size", "act_sym", "act_data_type"),
    *("act_dynamic", "super_bits", "super_group_size", "rotation_config"),
)
_AUTO_ROUND_TYPES = {
    "fp": _FLOAT,
    "fp8": _FLOAT,
    "fp8_e4m3": _FLOAT,
    "mx_fp": _MX,
    "mx_fp_rceil": _Family(_WIDTHS, 32, "float8_e8m0fnu", "e8m0_ceil"),
    "nv_fp": _NV,
    "nv_fp4_with_static_gs": _NV,
    "nvfp4_v2": _Family({4: _FP4}, 16, "float8_e5m3", "e5m3"),
}

_CT_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_CT_ARGS_KEYS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
)
_CT_MX = _Family(_WIDTHS, 32, "float8_e8m0fnu", "e8m0_even")


def one_of(key: str, value: Any, valid: tuple[Any, ...]) -> None:
    """SchemeError unless `value` is one of `valid`."""
    if value not in valid:
        raise SchemeError(f"{key} is {value!r}; valid: {', '.join(map(str, valid))}")


def known_keys(what: str, values: Any, valid: tuple[str, ...]) -> None:
    """SchemeError unless `values` is a mapping with no other keys than these."""
    if not isinstance(values, Mapping):
        raise SchemeError(f"{what} is {values!r}; valid: a mapping with the keys {', '.join(valid)}")
    unknown = [k for k in values if k not in valid]
    if unknown:
        raise SchemeError(f"{what} has unknown key {', '.join(map(repr, unknown))}; valid: {', '.join(valid)}")


# --- auto-round ---
def auto_round_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a scheme in auto-round's keys, with auto-round's defaults; see `QuantizationScheme.from_auto_round`."""
    known_keys("auto-round scheme", values, _AUTO_ROUND_KEYS)

    def get(key: str, default: Any) -> Any:
        return default if values.get(key) is None else values[key]

    if values.get("rotation_config") or values.get("super_bits") or values.get("super_group_size"):
        raise SchemeError("rotation_config, super_bits and super_group_size are not supported for FP8")
    size, act_bits = get("group_size", -1), get("act_bits", 16)
    family, dtype = _auto_round_side("", get("data_type", "int"), get("bits", 4), get("sym", True))
    tile = _group("group_size", size, family)
    weights = {"weight_dtype": dtype, "tile": tile, "scale_dtype": family.scale_dtype}
    if isinstance(act_bits, int) and act_bits >= 16:
        return weights
    act = _auto_round_side("act_", get("act_data_type", values["data_type"]), act_bits, get("act_sym", True))
    family, dtype = act
    act_size = get("act_group_size", size[-1] if isinstance(size, (list, tuple)) else size)
    if isinstance(act_size, (list, tuple)):
        raise SchemeError(f"act_group_size is {act_size!r}; valid: positive sizes, -1 (token), 0 (tensor)")
    dynamic = get("act_dynamic", True)
    if family.group is not None:
        one_of("act_dynamic", dynamic, (True,))
    act_tile = _group("act_group_size", act_size, family)
    return weights | {
        "act_dtype": dtype,
        "act_dynamic": dynamic,
        "act_tile": act_tile,
        "act_scale": family.act_scale,
    }


def _auto_round_side(prefix: str, kind: Any, bits: Any, symmetric: Any) -> tuple[_Family, str]:
    """Family and dtype of the weight or (prefix "act_") the input."""
    one_of(f"{prefix}data_type", kind, tuple(_AUTO_ROUND_TYPES))
    family = _AUTO_ROUND_TYPES[kind]
    one_of(f"{prefix}bits", bits, tuple(family.dtypes))
    one_of(f"{prefix}sym", symmetric, (True,))
    return family, family.dtypes[bits]


def _group(key: str, size: Any, family: _Family) -> tuple[int, ...]:
    """auto-round's group size as a tile: −1 a row, 0 everything, [rows, columns] a block."""
    if family.group is not None:
        one_of(key, size, (family.group,))
        return (1, family.group)
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int for n in size):
        return tuple(size)
    if type(size) is not int or size < -1:
        raise SchemeError(f"{key} is {size!r}; valid: positive sizes, [rows, columns], -1 (channel, token), 0 (tensor)")
    return {-1: (1, -1), 0: (-1, -1)}.get(size, (1, size))


# --- compressed-tensors ---
def compressed_tensors_fields(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a scheme in the words of a compressed-tensors config group."""
    known_keys("compressed-tensors group", group, _CT_GROUP_KEYS)
    weights = _Args("weights", group.get("weights"))
    fields: dict[str, Any] = {
        "weight_dtype": weights.family.dtypes[weights.bits],
        "tile": weights.weight_tile(),
        "scale_dtype": weights.family.scale_dtype,
        "symmetric": weights.symmetric,
    }
    if group.get("input_activations"):
        act = _Args("input_activations", group["input_activations"])
        fields |= {
            "act_dtype": act.family.dtypes[act.bits],
            "act_tile": act.act_tile(),
            "act_dynamic": bool(act.dynamic),
            "act_scale": act.family.act_scale,
            "act_symmetric": act.symmetric,
        }
    if group.get("output_activations"):
        output = _Args("output_activations", group["output_activations"])
        one_of("output_activations: strategy", output.strategy, ("tensor",))
        one_of("output_activations: dynamic", output.dynamic, (False,))
        one_of("output_activations: symmetric", output.symmetric, (True,))
        fields["out_dtype"] = output.family.dtypes[output.bits]
    return fields


class _Args:
    """One args block with compressed-tensors' defaults filled in, checked."""

    def __init__(self, where: str, args: Any) -> None:
        known_keys(f"compressed-tensors {where}", args, _CT_ARGS_KEYS)

        def get(key: str, default: Any) -> Any:
            return default if args.get(key) is None else args[key]

        self.where, self.block = where, args.get("block_structure")
        self.size = size = args.get("group_size")
        self.bits, self.symmetric = get("num_bits", 8), get("symmetric", True)
        self.strategy = get("strategy", "tensor" if size is None else "channel" if size == -1 else "group")
        self.dynamic = get("dynamic", False)
        one_of(f"{where}: num_bits", self.bits, tuple(_WIDTHS))
        one_of(f"{where}: type", get("type", "int"), ("float",))  # a missing type is int
        one_of(f"{where}: symmetric", self.symmetric, (True, False))
        self.family = self._family(str(args.get("scale_dtype")).removeprefix("torch."))
        if self.family is not _FLOAT:
            one_of(f"{where}: symmetric", self.symmetric, (True,))
        # "local": the blocks' scales are computed, the one that multiplies them all is the file's
        two_level = self.family is _NV and where != "weights"
        one_of(f"{where}: dynamic", self.dynamic, ("local",) if two_level else (True, False))
        if self.family is _CT_MX and where != "weights":
            one_of(f"{where}: dynamic", self.dynamic, (True,))

    def _family(self, scale_dtype: str) -> _Family:
        powers = scale_dtype in ("uint8", "float8_e8m0fnu")
        # early files leave scale_dtype out; 4 and 6 bits have no other reading
        if self.strategy == "group" and self.size == 32 and (powers or self.bits < 8):
            return _CT_MX
        if self.strategy in ("tensor_group", "group") and self.size == 16 and self.bits == 4:
            return _NV
        if self.bits != 8:
            detail = "4 and 6 need strategy 'group' with group_size 32, 4 also goes with 'tensor_group' of 16"
            raise SchemeError(f"{self.where}: num_bits is {self.bits}; valid: 8 ({detail})")
        if powers or (scale_dtype == _E4M3 and self.where != "weights"):
            raise SchemeError(
                f"{self.where}: scale_dtype is {scale_dtype!r}; valid: float types (uint8 with strategy 'group' and "
                "group_size 32, float8_e4m3fn with 'tensor_group' of 16 and num_bits 4)"
            )
        return _FLOAT

    def weight_tile(self) -> tuple[int, ...]:
        """The tile of a weight."""
        one_of(f"{self.where}: strategy", self.strategy, ("tensor", "channel", "group", "block", *self._two_level()))
        if self.strategy == "block":
            return self._block()
        return (1, -1) if self.strategy == "channel" else (-1, -1) if self.strategy == "tensor" else (1, self._size())

    def act_tile(self) -> tuple[int, int]:
        """The tile of an input."""
        if self.strategy not in ("tensor", "token", "group", *self._two_level()):
            raise SchemeError(
                f"{self.where}: strategy is {self.strategy!r}; valid: tensor (static or dynamic), token, group"
            )
        return (-1, -1) if self.strategy == "tensor" else (1, -1) if self.strategy == "token" else (1, self._size())

    def _two_level(self) -> tuple[str, ...]:
        return ("tensor_group",) if self.family is _NV else ()

    def _size(self) -> int:
        if type(self.size) is not int or self.size < 1:
            raise SchemeError(f"{self.where}: strategy {self.strategy!r} needs a group_size, not {self.size!r}")
        return self.size

    def _block(self) -> tuple[int, ...]:
        text = isinstance(self.block, str)  # old files: "128x128"
        parts = self.block.split("x") if text else self.block
        if not isinstance(parts, (list, tuple)) or len(parts) != 2:
            parts = [None]
        sizes = [int(n) if text and n.isdecimal() else n for n in parts]
        if any(type(n) is not int for n in sizes):
            raise SchemeError(
                f"{self.where}: strategy 'block' needs a block_structure such as [128, 128], not {self.block!r}"
            )
        return tuple(sizes)
