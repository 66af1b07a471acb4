"""`QuantizationScheme`: how one layer's weight and input are quantized, as a frozen value with dict-style access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from anyfp8.errors import SchemeError
from anyfp8.vocabularies import auto_round_fields, compressed_tensors_fields, known_keys, one_of

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
WEIGHT_DTYPES = (*FP8_DTYPES, "float6_e2m3fn", "float4_e2m1fn")
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m3")
#: how the scale of a dynamic input is formed; see `numerics.dynamic_scale`
ACT_SCALES = ("float32", "e8m0_floor", "e8m0_even", "e8m0_ceil", "e4m3", "e5m3")

Tile = tuple[int, ...]


@dataclass(frozen=True)
class QuantizationScheme(Mapping[str, Any]):
    """How one layer is quantized. `real = code × scale`, always.

    weight_dtype: dtype of the stored codes, one of `WEIGHT_DTYPES` (FP6 and FP4 are packed into bytes).
    tile: the shape of the patch of weight that shares one scale; −1 is the whole axis. Tensor (−1, −1), output channel
        (1, −1), group (1, g), block (128, 128), convolution per channel (1, −1, −1, −1). Edge tiles are clipped.
    scale_dtype: dtype of the stored scales (in memory they are float32).
    act_dtype: dtype the input is rounded to, or None: weight-only.
    act_dynamic: True: the input's scale is computed at each call. False: it is the file's `input_scale`.
    act_tile: the patch of input that shares one scale: (−1, −1) whole tensor, (1, −1) token (one row of the last
        dimension, whatever the rank), (1, g) groups of g along the last dimension. Static inputs have one scale.
    act_scale: what a dynamic scale is rounded to: "float32" (not at all), "e8m0_floor", "e8m0_even" or "e8m0_ceil" (MX:
        powers of two), "e4m3" (NVFP4: times the file's `input_scale`), "e5m3".
    symmetric, act_symmetric: False: codes are shifted by the file's `weight_zero_point`, `input_zero_point`.
    out_dtype: dtype that the output is rounded to with the file's `output_scale`, or None.
    The last four are left out of iteration and of `to_dict()` where they have their defaults.

    >>> scheme = QuantizationScheme.from_preset("FP8_STATIC")
    >>> scheme["act_dynamic"], scheme.tile, "act_dtype" in scheme
    (False, (1, -1), True)

    Raises SchemeError for an unknown key or value; the message lists the valid ones.
    """

    weight_dtype: str = "float8_e4m3fn"
    tile: Tile = (-1, -1)
    scale_dtype: str = "float32"
    act_dtype: str | None = None
    act_dynamic: bool = False
    act_tile: Tile = (-1, -1)
    act_scale: str = "float32"
    symmetric: bool = True
    act_symmetric: bool = True
    out_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("tile", "act_tile"):
            object.__setattr__(self, name, _tile(name, getattr(self, name)))
        for name in ("weight_dtype", "scale_dtype", "act_dtype", "out_dtype"):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else str(value).removeprefix("torch."))
        one_of("weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        one_of("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        one_of("act_scale", self.act_scale, ACT_SCALES)
        one_of("act_dtype", self.act_dtype, (None, *WEIGHT_DTYPES))
        one_of("out_dtype", self.out_dtype, (None, *FP8_DTYPES))
        for name in ("act_dynamic", "symmetric", "act_symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise SchemeError(f"{name} is {getattr(self, name)!r}; valid: True, False")
        if len(self.act_tile) != 2 or self.act_tile[0] not in (1, -1) or self.act_tile[0] == -1 != self.act_tile[1]:
            raise SchemeError(
                f"act_tile is {list(self.act_tile)}; valid: [-1, -1] per tensor, [1, -1] per token, [1, g] per group"
            )
        if self.act_dtype is None and (self.act_dynamic or self.act_tile != (-1, -1)):
            raise SchemeError("act_dtype is null (weight-only), so act_dynamic must be false and act_tile [-1, -1]")
        if not self.act_dynamic and self.act_scale != "float32":
            raise SchemeError(f"act_scale {self.act_scale!r} is for dynamic inputs")
        if not self.act_symmetric and (self.act_dtype is None or self.act_dynamic):
            raise SchemeError("only a static input can have a zero point: act_symmetric must be true")
        if self.act_dtype and not self.act_dynamic and self.act_tile != (-1, -1):
            raise SchemeError(f"a static input has one scale: act_tile must be [-1, -1], not {list(self.act_tile)}")

    # --- dict-style access (the field passes schemes as dicts) ---
    def __getitem__(self, key: str) -> Any:
        if key not in _FIELDS:
            raise KeyError(f"{key!r}; a QuantizationScheme has {', '.join(_FIELDS)}")
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in _FIELDS if name not in _RARE or self[name] != _RARE[name])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def to_dict(self) -> dict[str, Any]:
        """The scheme as plain JSON types, as written in `anyfp8.json`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationScheme:
        """A scheme from this class's own keys; an unknown key is an error that lists the valid ones."""
        known_keys("QuantizationScheme", values, _FIELDS)
        return cls(**values)

    @classmethod
    def from_preset(cls, name: str) -> QuantizationScheme:
        """One of the field's named schemes (case-insensitive); see `PRESETS`."""
        try:
            return PRESETS[name.upper()]
        except KeyError:
            raise SchemeError(f"unknown preset {name!r}; valid: {', '.join(PRESETS)}") from None

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | QuantizationScheme) -> QuantizationScheme:
        """A scheme from a scheme, a preset name, or a dict in our, auto-round's or compressed-tensors' words."""
        if isinstance(value, QuantizationScheme):
            return value
        if isinstance(value, str):
            return cls.from_preset(value)
        if not isinstance(value, Mapping):
            raise SchemeError(f"{value!r} is no scheme; valid: a QuantizationScheme, a preset's name, or a mapping")
        if set(value) & {"bits", "group_size", "data_type", "act_bits"}:
            return cls.from_auto_round(value)
        if "weights" in value:
            return cls.from_compressed_tensors(value)
        return cls.from_dict(value)

    @classmethod
    def from_auto_round(cls, values: Mapping[str, Any]) -> QuantizationScheme:
        """A scheme from auto-round's keys (bits, group_size, data_type, act_bits, act_dynamic ...).

        data_type: fp (8 bits, any tile), mx_fp and mx_fp_rceil (8, 6 or 4 bits, groups of 32), nv_fp (NVFP4), nvfp4_v2
        (NVFP4 with E5M3 scales).

        Defaults are auto-round's: act_bits absent is 16 (weight-only), act_dynamic absent is True, missing activation
        fields copy the weight's.
        """
        return cls(**auto_round_fields(values))

    @classmethod
    def from_compressed_tensors(cls, group: Mapping[str, Any]) -> QuantizationScheme:
        """A scheme from one of compressed-tensors' config groups (`weights`, `input_activations`, ...).

        Groups of 32 with scale_dtype uint8 are MX (8, 6 or 4 bits), groups of 16 with 4 bits NVFP4.

        An unknown key inside the group or its args blocks is an error, as it is in compressed-tensors.
        """
        return cls(**compressed_tensors_fields(group))

    # --- questions that code asks of a scheme ---
    @property
    def weight_only(self) -> bool:
        """True if the input is not quantized."""
        return self.act_dtype is None

    @property
    def static(self) -> bool:
        """True if the input is quantized with the file's `input_scale`."""
        return self.act_dtype is not None and not self.act_dynamic

    @property
    def needs_input_scale(self) -> bool:
        """True for static inputs, and for NVFP4's, whose dynamic block scales are multiplied by one of the file."""
        return self.static or self.act_scale == "e4m3"

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the further tensors that the scheme needs."""
        wanted = {
            "weight_zero_point": not self.symmetric,
            "input_zero_point": not self.act_symmetric,
            "output_scale": self.out_dtype is not None,
        }
        return tuple(name for name, needed in wanted.items() if needed)

    def weight_only_twin(self) -> QuantizationScheme:
        """The same weight, with input and output left alone."""
        return QuantizationScheme(self.weight_dtype, self.tile, self.scale_dtype, symmetric=self.symmetric)

    def for_rank(self, rank: int) -> QuantizationScheme:
        """The scheme with `tile` spelled out for a weight of `rank` dimensions.

        A preset says (−1, −1) or (1, −1); a convolution's weight needs (−1, −1, −1, −1) or (1, −1, −1, −1).
        """
        if len(self.tile) == rank or set(self.tile[1:]) - {-1}:
            return self
        return replace(self, tile=(self.tile[0],) + (-1,) * (rank - 1))

    def __str__(self) -> str:
        def name(dtype: str, tile: Tile, token: str) -> str:
            short = dtype.removeprefix("float8_").replace("float6_e2m3fn", "fp6").replace("float4_e2m1fn", "fp4")
            if set(tile) == {-1}:
                return f"{short} per tensor"
            if tile[0] == 1 and set(tile[1:]) == {-1}:
                return f"{short} per {token}"
            return f"{short} per {'×'.join('·' if n == -1 else str(n) for n in tile)}"

        text = name(self.weight_dtype, self.tile, "channel") + ("" if self.symmetric else " with zero points")
        if self.scale_dtype.startswith("float8"):
            text += f" ({self.scale_dtype.removeprefix('float8_').removesuffix('fnu').removesuffix('fn')} scales)"
        if self.act_dtype is None:
            return f"{text}, weight-only"
        text += f", input {'dynamic' if self.act_dynamic else 'static'} {name(self.act_dtype, self.act_tile, 'token')}"
        text += "" if self.act_scale == "float32" else f" ({self.act_scale} scales)"
        text += "" if self.act_symmetric else " with a zero point"
        return text + ("" if self.out_dtype is None else f", output {self.out_dtype.removeprefix('float8_')}")


_FIELDS = tuple(f.name for f in fields(QuantizationScheme))
_RARE = {"act_scale": "float32", "symmetric": True, "act_symmetric": True, "out_dtype": None}


def _tile(name: str, value: Any) -> Tile:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise SchemeError(f"{name} is {value!r}; valid: a list of sizes, -1 for a whole axis")
    tile = tuple(value)
    if not tile or any(isinstance(n, bool) or not isinstance(n, int) or (n < 1 and n != -1) for n in tile):
        raise SchemeError(f"{name} is {list(tile)}; valid: positive sizes, -1 for a whole axis")
    return tile


def _mx(weight: str, act: str | None) -> QuantizationScheme:
    """OCP microscaling: powers of two over 32 columns, for weight and (dynamically) input."""
    if act is None:
        return QuantizationScheme(weight, (1, 32), "float8_e8m0fnu")
    return QuantizationScheme(weight, (1, 32), "float8_e8m0fnu", act, True, (1, 32), "e8m0_floor")


_E4M3 = "float8_e4m3fn"
#: The field's names. FP8_STATIC is auto-round's (per output channel), FP8 compressed-tensors' (per tensor).
PRESETS: dict[str, QuantizationScheme] = {
    "FP8_STATIC": QuantizationScheme(tile=(1, -1), act_dtype=_E4M3),
    "FP8": QuantizationScheme(tile=(-1, -1), act_dtype=_E4M3),
    "FP8_DYNAMIC": QuantizationScheme(tile=(1, -1), act_dtype=_E4M3, act_dynamic=True, act_tile=(1, -1)),
    "FP8_BLOCK": QuantizationScheme(tile=(128, 128), act_dtype=_E4M3, act_dynamic=True, act_tile=(1, 128)),
    "FP8_WEIGHT_ONLY": QuantizationScheme(tile=(1, -1)),
    "FPW8A16": QuantizationScheme(tile=(-1, -1)),
    "MXFP8": _mx("float8_e4m3fn", "float8_e4m3fn"),
    "MXFP8A16": _mx("float8_e4m3fn", None),
    "MXFP6A8": _mx("float6_e2m3fn", "float8_e4m3fn"),
    "MXFP6A16": _mx("float6_e2m3fn", None),
    "MXFP4": _mx("float4_e2m1fn", "float4_e2m1fn"),
    "MXFP4A16": _mx("float4_e2m1fn", None),
    "NVFP4": QuantizationScheme("float4_e2m1fn", (1, 16), _E4M3, "float4_e2m1fn", True, (1, 16), "e4m3"),
}
