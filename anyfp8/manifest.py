"""`Manifest`: one complete reading of a checkpoint, in the file's own names. Every tensor has exactly one owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.errors import Problem
from anyfp8.folding import fold
from anyfp8.numerics import count_nonfinite, dtype_name, grid_shape
from anyfp8.scheme import QuantizationScheme

#: dtype words that scales and plain weights are stored in
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class LayerSpec:
    """One quantized layer in the file's names: its scheme and where its codes and scales are.

    name: module path. weight: the codes, shape as the module's weight. weight_scale: stored scales, in any shape that
    says the scheme's grid. input_scale: one value, for static schemes. by_class: where the file lets the module's class
    decide, class name → spec; the first one in the class's MRO counts, and this spec is only the likeliest.
    """

    name: str
    scheme: QuantizationScheme
    weight: TensorRef
    weight_scale: TensorRef
    input_scale: TensorRef | None = None
    by_class: tuple[tuple[str, LayerSpec], ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        """All tensors of the file that this layer owns."""
        refs = (self.weight, self.weight_scale, self.input_scale)
        return tuple(ref for ref in refs if ref is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(ref.nbytes for ref in self.refs)

    def read_codes(self) -> Tensor:
        """The codes as uint8, shape `self.shape`; the file's own bytes, mapped."""
        return self.weight.read().view(torch.uint8)

    def read_weight_scale(self) -> Tensor:
        """The scales as float32 multipliers, shape `grid_shape(self.shape, tile)`."""
        return self.weight_scale.read().float().reshape(grid_shape(self.shape, self.scheme.tile))

    def read_input_scale(self) -> Tensor | None:
        """The input's scale as a float32 multiplier of shape (1,), or None if the scheme isn't static."""
        return None if self.input_scale is None else self.input_scale.read().float().reshape(1)

    def header_problems(self) -> list[Problem]:
        """What is wrong with dtypes and shapes, as far as the headers tell."""
        found = []
        stored, scheme = dtype_name(self.weight.torch_dtype), self.scheme
        if stored != scheme.weight_dtype:
            found.append(problem_of("mismatched", self.weight, f"is {stored}, the manifest says {scheme.weight_dtype}"))
        for ref in self.refs[1:]:
            if ref.dtype not in FLOATS:
                found.append(problem_of("mismatched", ref, f"a scale can't be {ref.dtype}"))
        if len(scheme.tile) != len(self.shape):
            detail = f"the manifest's tile {list(scheme.tile)} has another rank than the shape {list(self.shape)}"
            return [*found, problem_of("mismatched", self.weight, detail)]
        grid = grid_shape(self.shape, scheme.tile)
        if not _says_grid(self.weight_scale.shape, grid):
            detail = f"shape {list(self.weight_scale.shape)}, but tile {list(scheme.tile)} over a weight of shape "
            detail += f"{list(self.shape)} needs {list(grid)}"
            found.append(problem_of("mismatched", self.weight_scale, detail))
        if self.input_scale is not None and self.input_scale.shape not in ((), (1,), (1, 1)):
            detail = f"shape {list(self.input_scale.shape)}, but a static input has one scale"
            found.append(problem_of("mismatched", self.input_scale, detail))
        return found

    def value_problems(self) -> list[Problem]:
        """What is wrong with the values: NaN codes, scales that are NaN, infinite, negative, or zero for the input."""
        found = []
        if bad := count_nonfinite(self.read_codes(), self.scheme.weight_dtype):
            found.append(problem_of("invalid", self.weight, f"{bad} of its codes are NaN or infinite"))
        for ref, scale in ((self.weight_scale, self.read_weight_scale()), (self.input_scale, self.read_input_scale())):
            if ref is None or scale is None:
                continue
            if not bool(scale.isfinite().all()):
                found.append(problem_of("invalid", ref, "holds NaN or infinite scales"))
            elif bool((scale < 0).any()):
                found.append(problem_of("invalid", ref, "holds negative scales"))
            elif ref is self.input_scale and bool((scale == 0).any()):
                found.append(problem_of("invalid", ref, "is 0, and inputs are divided by it"))
        return found


def problem_of(kind: str, ref: TensorRef, detail: str) -> Problem:
    """A problem of a stored tensor."""
    return Problem(kind, ref.name, detail, ref.file)


def _says_grid(stored: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Can a scale of shape `stored` only mean this grid? Sizes of 1 may be missing or extra, order may not change."""
    squeezed = [n for n in grid if n != 1]
    if len(stored) == len(grid):  # a transposed [1, N] beside a [N, 1] grid has the right count but the wrong meaning
        return stored == grid or (not squeezed and set(stored) == {1})
    flat = torch.Size(grid).numel()
    return [n for n in stored if n != 1] == squeezed or (len(stored) == 1 and stored[0] == flat)


@dataclass(frozen=True)
class Manifest:
    """A dialect's complete reading of a checkpoint, in the file's names.

    layers: quantized layers by module path. plain: tensors to be taken as they are. exceptions: tensors that are
    knowingly not used, with the reason. unclaimed: tensors that nothing explains (an error under strict).
    problems: what makes the checkpoint unusable whatever the model. notes: what a user should know.
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

    @property
    def layer_config(self) -> dict[str, QuantizationScheme]:
        """Module path → scheme, as the field passes it around."""
        return {name: spec.scheme for name, spec in self.layers.items()}

    def value_problems(self) -> list[Problem]:
        """`LayerSpec.value_problems` of every layer; reads the quantized tensors once."""
        return [problem for spec in self.layers.values() for problem in spec.value_problems()]

    def to_dict(self) -> dict[str, Any]:
        """The reading as plain JSON types."""
        return {
            "source": self.checkpoint.name,
            "dialect": self.dialect,
            "evidence": self.evidence,
            "layer_config": {name: spec.scheme.to_dict() for name, spec in self.layers.items()},
            "scales": {
                name: {"weight_scale": list(s.weight_scale.shape), "input_scale": s.input_scale is not None}
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
        for ref in (ref for spec in self.layers.values() for ref in spec.refs[1:]):
            kind = f"{ref.name.rpartition('.')[2]} {ref.dtype}"
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
