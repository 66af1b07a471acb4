"""`Manifest`: one complete reading of a checkpoint, in the file's own names. Every tensor has exactly one owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.errors import Problem
from anyfp8.folding import fold, join
from anyfp8.numerics import FORMATS, count_nonfinite, decode, dequantize, dtype_name, expand_scale, grid_shape
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import Codes, Scale, problem_of


@dataclass(frozen=True)
class LayerSpec:
    """One quantized layer in the file's names: its scheme and where its codes and scales are.

    name: module path. param: which of its parameters. codes: the weight. scale: its scales, in any shape that says the
    scheme's grid. input_scale: one value, for static schemes (and NVFP4's outer one). extras: further tensors that the
    scheme names (`QuantizationScheme.extras`). by_class: where the file lets the module's class decide, class name →
    spec; the first one that is in the class's MRO counts, and this spec is only the likeliest.
    """

    name: str
    scheme: QuantizationScheme
    codes: Codes
    scale: Scale
    input_scale: Scale | None = None
    extras: tuple[tuple[str, Scale], ...] = ()
    param: str = "weight"
    by_class: tuple[tuple[str, LayerSpec], ...] = ()

    @property
    def weight(self) -> TensorRef:
        """The tensor that holds the codes."""
        return self.codes.ref

    @property
    def weight_name(self) -> str:
        """Full name of the parameter that the codes are for."""
        return join(self.name, self.param)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.codes.shape

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of its scales."""
        return grid_shape(self.shape, self.scheme.tile)

    @property
    def scales(self) -> tuple[tuple[str, Scale, tuple[int, ...]], ...]:
        """Name, source and grid of every scale and zero point."""
        found: list[tuple[str, Scale, tuple[int, ...]]] = [("weight_scale", self.scale, self.grid)]
        if self.input_scale is not None:
            found.append(("input_scale", self.input_scale, (1,)))
        return (*found, *((n, s, self.grid if n == "weight_zero_point" else (1,)) for n, s in self.extras))

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """All tensors of the file that this layer owns."""
        return (self.weight, *(ref for _, scale, _ in self.scales for ref in scale.refs))

    @property
    def nbytes(self) -> int:
        """Bytes of all of them (of its own part, where several layers share a tensor)."""
        return self.codes.nbytes + sum(scale.nbytes for _, scale, _ in self.scales)

    def cropped(self, shape: tuple[int, ...]) -> LayerSpec:
        """The same with the true shape of padded codes, which a model knows (`Codes.fits`)."""
        return self if shape == self.shape else replace(self, codes=replace(self.codes, crop=shape))

    def read(self) -> dict[str, Tensor]:
        """Everything as it is inside: `weight_codes` (uint8), and `weight_scale`, `input_scale` ... (float32)."""
        codes, scales = self.codes.read(), {name: scale.read(grid) for name, scale, grid in self.scales}
        if (dead := self._dead(codes, scales["weight_scale"])) is not None:
            codes = codes.masked_fill(dead, 0)
        return {"weight_codes": codes} | scales

    def decoded(self, dtype: torch.dtype, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """The weight as real values [out, in, ...], from `values` if they have been read already."""
        values = self.read() if values is None else values
        codes, scale, zero_point = values["weight_codes"], values["weight_scale"], values.get("weight_zero_point")
        return dequantize(codes, scale, self.scheme.weight_dtype, self.scheme.tile, dtype, zero_point)

    def has_dead_codes(self) -> bool:
        """Are there NaN codes under a scale of 0, which `read` turns into 0?"""
        scale = self.scale.read(self.grid)
        return bool((scale == 0).any()) and self._dead(self.codes.read(), scale) is not None

    def _dead(self, codes: Tensor, scale: Tensor) -> Tensor | None:
        """Where codes are NaN because a producer divided tiles of zeros by their scale, which is 0 as well."""
        zero, format = scale == 0, self.scheme.weight_dtype
        if FORMATS[format].bits < 8 or not bool(zero.any()):
            return None
        dead = decode(codes, format).isfinite().logical_not_()
        dead &= expand_scale(zero, codes.shape, self.scheme.tile)
        return dead if bool(dead.any()) else None

    def weight_only(self) -> LayerSpec:
        """The same weight, with input and output left alone."""
        extras = tuple(pair for pair in self.extras if pair[0] == "weight_zero_point")
        return replace(self, scheme=self.scheme.weight_only_twin(), input_scale=None, extras=extras)

    def without_input(self) -> LayerSpec:
        """The same weight and output, with the input left alone."""
        scheme = replace(self.scheme.weight_only_twin(), out_dtype=self.scheme.out_dtype)
        extras = tuple(pair for pair in self.extras if pair[0] != "input_zero_point")
        return replace(self, scheme=scheme, input_scale=None, extras=extras)

    def header_problems(self) -> list[Problem]:
        """What is wrong with dtypes and shapes, as far as the headers tell."""
        found = [problem] if (problem := self.codes.problem()) else []
        if len(self.scheme.tile) != len(self.shape):
            detail = f"the manifest's tile {list(self.scheme.tile)} has another rank than the shape {list(self.shape)}"
            return [*found, problem_of("mismatched", self.weight, detail)]
        what = f"tile {list(self.scheme.tile)} over a weight of shape {list(self.shape)}"
        for _, scale, grid in self.scales:
            found += scale.problems(grid, "a static input's scale" if grid == (1,) else what)
        return found

    def _representable(self, values: Mapping[str, Tensor]) -> bool:
        scale = values["weight_scale"]
        largest = FORMATS[self.scheme.weight_dtype].max
        if not scale.numel() or not bool(scale.isfinite().all()) or bool((scale.max() * largest).isfinite()):
            return True  # the usual case, or a problem of its own
        return bool(self.decoded(torch.float32, values).isfinite().all())

    def value_problems(self) -> list[Problem]:
        """What is wrong with the values: NaN or infinite codes; scales that are NaN, infinite, negative, or zero where
        something is divided by them."""
        found = []
        values = self.read()
        if bad := count_nonfinite(values["weight_codes"], self.scheme.weight_dtype):
            found.append(problem_of("invalid", self.weight, f"{bad} of its codes are NaN or infinite"))
        elif not self._representable(values):
            found.append(problem_of("invalid", self.scale.ref, "times its codes is beyond float32"))
        for name, scale, _ in self.scales:
            value = values[name]
            if scale.factor is not None and not bool(scale.factor.read().float().isfinite().all()):
                found.append(problem_of("invalid", scale.factor, "is NaN or infinite"))  # x / inf would look like a 0
            elif not bool(value.isfinite().all()):
                found.append(problem_of("invalid", scale.ref, "holds NaN or infinite scales"))
            elif name.endswith("zero_point"):
                continue
            elif bool((value < 0).any()):
                found.append(problem_of("invalid", scale.ref, "holds negative scales"))
            elif name != "weight_scale" and bool((value == 0).any()):
                found.append(problem_of("invalid", scale.ref, "is 0, and values are divided by it"))
        return found


@dataclass(frozen=True, eq=False)
class Manifest:
    """A dialect's complete reading of a checkpoint, in the file's names.

    layers: quantized layers by module path. plain: tensors to be taken as they are. exceptions: tensors that are
    knowingly not used, with the reason. unclaimed: tensors that nothing explains (an error under strict).
    problems: what makes the checkpoint unusable whatever the model. notes: what a user should know. expects: do the
    file's lists mean this module, of a class with these names, to be quantized? (None: it has no such lists.)
    """

    dialect: str
    evidence: str
    checkpoint: Checkpoint
    layers: Mapping[str, LayerSpec] = field(default_factory=dict)
    plain: Mapping[str, TensorRef] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    expects: Callable[[str, tuple[str, ...]], bool] | None = field(default=None, repr=False, compare=False)

    @property
    def layer_config(self) -> dict[str, QuantizationScheme]:
        """Module path → scheme, as the field passes it around."""
        return {name: spec.scheme for name, spec in self.layers.items()}

    def value_problems(self) -> list[Problem]:
        """`LayerSpec.value_problems` of every layer, and NaN codes in plain FP8 tensors; reads these tensors once."""
        found = [problem for spec in self.layers.values() for problem in spec.value_problems()]
        for ref in (ref for ref in self.plain.values() if ref.is_fp8):
            if bad := count_nonfinite(ref.read().view(torch.uint8), dtype_name(ref.torch_dtype)):
                found.append(problem_of("invalid", ref, f"{bad} of its codes are NaN or infinite"))
        return found

    def value_notes(self) -> list[str]:
        """What a user should know of the values."""
        dead = [spec.weight_name for spec in self.layers.values() if spec.has_dead_codes()]
        return [f"NaN codes under a scale of 0 were taken as 0: {', '.join(fold(dead))}"] if dead else []

    def to_dict(self) -> dict[str, Any]:
        """The reading as plain JSON types."""
        return {
            "source": self.checkpoint.name,
            "dialect": self.dialect,
            "evidence": self.evidence,
            "layer_config": {name: spec.scheme.to_dict() for name, spec in self.layers.items()},
            "scales": {
                name: {kind: {"dtype": scale.ref.dtype, "shape": list(scale.shape)} for kind, scale, _ in s.scales}
                for name, s in self.layers.items()
            },
            "plain": sorted(self.plain),
            "exceptions": dict(self.exceptions),
            "unclaimed": dict(self.unclaimed),
            "ignored_files": dict(self.checkpoint.ignored),
            "problems": [{"kind": p.kind, "name": p.name, "detail": p.detail} for p in self.problems],
            "notes": list(self.notes),
            "bytes": {
                "quantized": sum(spec.nbytes for spec in self.layers.values()),
                "plain": sum(ref.nbytes for ref in self.plain.values()),
                "total": sum(ref.nbytes for ref in self.checkpoint.tensors.values()),
            },
        }

    def __str__(self) -> str:
        size = self.to_dict()["bytes"]
        lines = [f"{self.checkpoint.name}: {self.dialect} ({self.evidence})"]
        lines.append(
            f"  {len(self.layers)} FP8 layers, {size['quantized'] / 1e6:.1f} MB; "
            f"{len(self.plain)} plain tensors, {size['plain'] / 1e6:.1f} MB"
        )
        lines += [f"  {scheme}: {', '.join(names)}" for scheme, names in by_scheme(self.layer_config).items()]
        scales: dict[str, int] = {}
        for kind, scale, _ in (found for spec in self.layers.values() for found in spec.scales):
            kind = f"{kind} {scale.ref.dtype}"
            scales[kind] = scales.get(kind, 0) + 1
        lines += [f"  scales: {', '.join(f'{count} {kind}' for kind, count in scales.items())}"] * bool(scales)
        for title, table in (
            ("not used", self.exceptions),
            ("unclaimed", self.unclaimed),
            ("ignored", self.checkpoint.ignored),
        ):
            for reason, names in group_by_reason(table).items():
                lines.append(f"  {title}: {', '.join(fold(names))} ({reason})")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  problem: {p.name}: {p.detail}" for p in self.problems]
        return "\n".join(lines)


def by_scheme(layer_config: Mapping[str, QuantizationScheme]) -> dict[str, list[str]]:
    """Scheme (as text) → folded layer names."""
    return {text: fold(names) for text, names in group_by_reason({k: str(s) for k, s in layer_config.items()}).items()}


def group_by_reason(table: Mapping[str, str]) -> dict[str, list[str]]:
    """name → reason, turned round: reason → names."""
    out: dict[str, list[str]] = {}
    for name, reason in table.items():
        out.setdefault(reason, []).append(name)
    return out
