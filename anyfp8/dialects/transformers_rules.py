"""What a transformers FP8 config says: blocks, inputs, and the list of modules to be left alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from anyfp8.errors import DialectError
from anyfp8.numerics import grid_shape
from anyfp8.scheme import QuantizationScheme

METHODS = ("fp8", "mxfp8", "fbgemm_fp8")
E4M3 = "float8_e4m3fn"
#: the block size where the config is silent
_DEFAULT = {"fp8": (128, 128), "mxfp8": (1, 32), "fbgemm_fp8": None}


@dataclass(frozen=True)
class Rules:
    """What the config says about every layer.

    where: the config, in words. method: its quant_method. block: the weights' block, or None: none. implied: the config
    doesn't name it; an "fp8" file then has transformers' blocks of 128×128 or vLLM's one scale a weight, which the
    scales themselves tell. activation: "dynamic", "static", or None: weight-only. fp4_experts: experts are packed FP4.
    kept: patterns of modules to be left alone, None: no list.
    """

    where: str
    method: str
    block: tuple[int, int] | None
    implied: bool
    activation: str | None
    fp4_experts: bool
    kept: tuple[str, ...] | None

    @classmethod
    def of(cls, config: dict[str, Any], where: str) -> Rules:
        """Read a quantization config; raises DialectError for a value that isn't understood."""
        method = config.get("quant_method", "fp8")
        block = config.get("weight_block_size", _DEFAULT.get(method)) if method != "fbgemm_fp8" else None
        activation = config.get("activation_scheme", "dynamic") if method != "fbgemm_fp8" else "dynamic"
        activation = activation.lower() if isinstance(activation, str) else activation
        pair = isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        for key, value, understood in (
            ("quant_method", method, METHODS),
            ("weight_block_size", block, (block if pair else None,)),
            ("activation_scheme", activation, (None, "dynamic", "static")),
            ("scale_fmt", config.get("scale_fmt"), (None, "float", "ue8m0")),
            ("expert_dtype", config.get("expert_dtype"), (None, "fp8", "fp4")),
            ("fmt", config.get("fmt"), (None, "e4m3")),
        ):
            if value not in understood:
                raise DialectError(f"{where} has {key} {value!r}: not understood")
        if "e5m2" in str(config.get("data_type")):
            kind = config["data_type"]
            raise DialectError(f"{where} has data_type {kind!r}: auto-round clips such codes, so they are corrupt")
        kept = config.get("modules_to_not_convert")
        kept = config.get("ignored_layers") if kept is None else kept
        return cls(
            where,
            method,
            None if block is None else tuple(block),
            "weight_block_size" not in config and method == "fp8",
            activation,
            config.get("expert_dtype") == "fp4",
            None if kept is None else (kept,) if isinstance(kept, str) else tuple(str(entry) for entry in kept),
        )

    def tile(self, shape: tuple[int, ...], stored: tuple[int, ...], stacked: bool = False) -> tuple[int, ...] | None:
        """The tile that a scale of shape `stored` means for a weight: the config's blocks, one scale for all, or one a
        row; None if it means none of them. Stacked: `shape` is [experts, rows, columns], each with scales of its own.
        """
        if stacked and prod(stored) > 1:
            inner = self.tile(shape[1:], stored[1:]) if stored[0] == shape[0] else None
            return None if inner is None else (1, *inner)
        blocks = self.block is not None and len(shape) == 2 and stored == grid_shape(shape, self.block)
        if blocks and (prod(stored) > 1 or not (self.implied or self.activation == "static")):
            return self.block
        if prod(stored) == 1:
            return (-1,) * len(shape)
        return (1, *(-1,) * (len(shape) - 1)) if prod(stored) == stored[0] == shape[0] else None

    def scheme(self, format: str, tile: tuple[int, ...], scale_dtype: str) -> QuantizationScheme:
        """The scheme of a layer whose weight has this tile."""
        if self.activation is None:
            return QuantizationScheme(format, tile, scale_dtype)
        if self.activation == "static":
            return QuantizationScheme(format, tile, scale_dtype, E4M3)
        group, kind = tile[-1], "float32"
        if self.method == "mxfp8" or format != E4M3:  # the inputs of FP4 experts are MX too
            group, kind = 32, "e8m0_ceil"
        elif self.method == "fbgemm_fp8":
            group = -1
        return QuantizationScheme(format, tile, scale_dtype, E4M3, True, (1, group), kind)

    def keeps(self, module: str, *, bounded: bool) -> bool:
        """Does an entry of the list leave this module alone?

        Each is a regex for the beginning of its name, or the end of its name. bounded: the beginning must reach to a
        dot or the end, as since transformers 5.24; before, `layers.1` kept `layers.11` as well.
        """
        kept = self.kept or ()
        return module.endswith(kept) or _beginning(kept, bounded).match(module) is not None

    def expects(self, leaves: Iterable[str]) -> Callable[[str, tuple[str, ...]], bool]:
        """`Manifest.expects`; leaves: the last names of the modules that are stored in FP8.

        Without a list readers leave the output layer alone, whatever it is called, so only known names count.
        """
        known = set(leaves)

        def expects(module: str, classes: tuple[str, ...]) -> bool:
            meant = self.kept is not None or module.rpartition(".")[2] in known
            return meant and classes[:1] == ("Linear",) and not self.keeps(module, bounded=False)

        return expects


@lru_cache(maxsize=4)
def _beginning(patterns: tuple[str, ...], bounded: bool) -> re.Pattern[str]:
    """One regex for all of them: models have tens of thousands of experts, lists have hundreds of entries."""
    boundary = r"(?:(?<=\.)|(?=\.|$))" if bounded else ""
    either = "|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)"
    try:
        return re.compile(f"(?:{either}){boundary}")
    except (
        re.error,
        OverflowError,
        RecursionError,
    ):  # lists only explain: one that is no regex is no reason not to load
        return re.compile(f"(?:{'|'.join(map(re.escape, patterns))}){boundary}")
