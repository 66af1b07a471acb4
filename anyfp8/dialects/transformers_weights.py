"""From a transformers FP8 file's tensors to layers: the scales of a weight, alone or in a stack of experts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from anyfp8.checkpoint import TensorRef
from anyfp8.claims import ManifestBuilder
from anyfp8.dialects.transformers_rules import E4M3, Rules
from anyfp8.experts import STACKS, stacked_place
from anyfp8.numerics import grid_shape
from anyfp8.sources import Codes, Scale

#: names of a weight's scale and of its input's, in the order they are looked for
_SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_INPUTS = ("activation_scale", "input_scale", "act_scale", "qscale_act")
#: parameters that stack experts → their parts, as the single experts are called
STACKED = {stacked: names[0] for stacked, names in STACKS.items()}


def is_expert(name: str) -> bool:
    """Is this a weight of experts: one, or a stack of them?"""
    module, _, leaf = name.rpartition(".")
    return stacked_place(name) is not None or (module.rpartition(".")[2] == "experts" and leaf in STACKED)


@dataclass(frozen=True)
class Weights:
    """Makes layers of quantized tensors."""

    builder: ManifestBuilder
    rules: Rules

    def add(self, ref: TensorRef) -> None:
        """One FP8 (or packed FP4) tensor: find its scales, and make a layer of it, or one of each expert in it."""
        module, _, leaf = ref.name.rpartition(".")
        stem = "" if leaf == "weight" else f"{leaf}_"
        wanted = (f"{stem}scale_inv", f"{stem}scale") if stem else _SCALES
        scales = self._find(module, wanted)
        acts = self._find(module, (f"{stem}activation_scale", f"{stem}input_scale") if stem else _INPUTS)
        index, part, parts = None, 0, 1
        if (place := stacked_place(ref.name)) and not scales:
            # what transformers 5.24 writes and can't read: the experts one by one, but their scales stacked
            stack, index, part, parts = place
            head, _, param = stack.rpartition(".")
            scales = self._find(head, (f"{param}_scale_inv", f"{param}_scale"))
            acts = acts or self._find(head, (f"{param}_activation_scale",))
        acts = acts if self.rules.activation == "static" else []
        self.builder.claim(ref, *scales, *acts)
        codes = Codes(ref, E4M3 if ref.is_fp8 else "float4_e2m1fn")
        if ref.is_fp8 and ref.dtype != "F8_E4M3":
            self.builder.problem("unsupported", ref, f"is {ref.dtype}; weights of this format are F8_E4M3")
        elif not scales:
            detail = f"is {ref.dtype}, but has no scale (looked for {', '.join(wanted)})"
            self.builder.problem("missing", ref, detail)
        elif len(scales) > 1 or len(acts) > 1:
            names = ", ".join(scale.name for scale in (scales if len(scales) > 1 else acts))
            self.builder.problem("contradiction", ref, f"has more than one scale: {names}")
        elif index is None and self._separable(codes, scales[0]):
            self._experts(codes, scales[0], acts)
        else:
            act = _scale(acts[0], index) if acts else None
            self._layer(module, codes, _scale(scales[0], index, part, parts), act, leaf)

    def _find(self, module: str, names: tuple[str, ...]) -> list[TensorRef]:
        return [ref for name in names if (ref := self.builder.find(module, name))]

    def _separable(self, codes: Codes, scale: TensorRef) -> bool:
        """Is this a stack [experts, rows, columns] whose experts and parts have scales of their own?

        Not so where blocks run on from one part of the rows into the next; and FBGEMM's are stored [experts, in, out].
        """
        module, _, param = codes.ref.name.rpartition(".")
        if module.rpartition(".")[2] != "experts" or param not in STACKED or len(codes.shape) != 3:
            return False
        experts, rows, columns = codes.shape
        parts = len(STACKED[param])
        if self.rules.method == "fbgemm_fp8" or rows % parts:
            return False
        if prod(scale.shape) == 1 or self.rules.block is None:
            return True
        whole = grid_shape((rows, columns), self.rules.block)
        fresh = parts * grid_shape((rows // parts, columns), self.rules.block)[0]
        return scale.shape != (experts, *whole) or fresh == whole[0]

    def _experts(self, whole: Codes, scale: TensorRef, acts: list[TensorRef]) -> None:
        """A stack as single experts, which fit a model that has them one by one as well as one that stacks them."""
        module, _, param = whole.ref.name.rpartition(".")
        parts = STACKED[param]
        each = whole.shape[1] // len(parts)
        for index in range(whole.shape[0]):
            for part, name in enumerate(parts):
                rows = None if len(parts) == 1 else (part * each, (part + 1) * each)
                codes = Codes(whole.ref, whole.format, index=index, rows=rows)
                act = _scale(acts[0], index) if acts else None
                self._layer(f"{module}.{index}.{name}", codes, _scale(scale, index, part, len(parts)), act)

    def _layer(self, module: str, codes: Codes, scale: Scale, act: Scale | None, param: str = "weight") -> None:
        for source in (scale, act):
            if source is not None and source.index is not None and source.index >= source.ref.shape[0]:
                detail = f"shape {list(source.ref.shape)}, but there is an expert {source.index}"
                self.builder.problem("mismatched", source.ref, detail)
                return
        stacked = param != "weight" and len(codes.shape) == 3
        if (
            stacked and self.rules.method == "fbgemm_fp8"
        ):  # [experts, in, out]; `down_proj` has scales [experts, out, 1]
            tile: tuple[int, ...] | None = (1, -1, 1)
            if scale.shape == (codes.shape[0], codes.shape[2], 1):
                scale = Scale(scale.ref, scale.encoding, transposed=True)
        else:
            tile = self.rules.tile(codes.shape, scale.shape, stacked)
        if codes.format != E4M3:
            tile = (1,) * (len(codes.shape) - 1) + (32,)
        if tile is None:
            block = self.rules.block
            blocks = "" if block is None else f", or one for each block of {block[0]}×{block[1]}"
            detail = f"shape {list(scale.shape)}, but a weight of shape {list(codes.shape)} has one scale, one a row"
            self.builder.problem("mismatched", scale.ref, detail + blocks)
            return
        scheme = self.rules.scheme(codes.format, tile, "float8_e8m0fnu" if scale.encoding == "e8m0" else "float32")
        why = f"{self.rules.where} says activation_scheme static"
        self.builder.layer(module, scheme, codes=codes, scale=scale, input_scale=act, why_static=why, param=param)


def _scale(ref: TensorRef, index: int | None = None, part: int = 0, parts: int = 1) -> Scale:
    """A stored scale; with `index` one expert's, and where its rows are those of several parts, one part's.

    One value is everybody's. A byte is an exponent, whatever its dtype says.
    """
    encoding = "e8m0" if ref.dtype in ("F8_E8M0", "U8") else "float"
    if index is None or prod(ref.shape) == 1:
        return Scale(ref, encoding)
    rows, rest = None, ref.shape[1:]
    if parts > 1 and rest and rest[0] > 1 and rest[0] % parts == 0:
        each = rest[0] // parts
        rows = (part * each, (part + 1) * each)
    return Scale(ref, encoding, index=index, rows=rows)
