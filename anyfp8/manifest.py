"""`Manifest`: one complete reading of a checkpoint, in the file's own names. Every tensor has exactly one owner."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.errors import Problem
from anyfp8.folding import fold
from anyfp8.numerics import count_nan, dtype_name, grid_shape
from anyfp8.scheme import QuantizationScheme

_FLOATS = ("F64", "F32", "F16", "BF16")
#: leaf names that only quantizers write; anything else is an ordinary tensor
_SCALE_LEAF = re.compile(
    r"(weight|input|output|act|activation|k|v|q|kv|prob)_scale(_inv|_2|_ub)?|scale_(weight|input)|_amax"
    r"|(weight|input|output)_(zero_point|global_scale)"
)
_KV_LEAF = re.compile(r"(k|v|q|kv|prob)_scale")


@dataclass(frozen=True)
class LayerSpec:
    """One quantized layer in the file's names: its scheme and where its codes and scales are.

    name: module path. weight: the codes, shape as the module's weight. weight_scale: stored scales, in any shape that
    says the scheme's grid. input_scale: one value, for static schemes.
    """

    name: str
    scheme: QuantizationScheme
    weight: TensorRef
    weight_scale: TensorRef
    input_scale: TensorRef | None = None

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
            found.append(_problem("mismatched", self.weight, f"is {stored}, the manifest says {scheme.weight_dtype}"))
        for ref in self.refs[1:]:
            if ref.dtype not in _FLOATS:
                found.append(_problem("mismatched", ref, f"a scale can't be {ref.dtype}"))
        if len(scheme.tile) != len(self.shape):
            detail = f"the manifest's tile {list(scheme.tile)} has another rank than the shape {list(self.shape)}"
            return [*found, _problem("mismatched", self.weight, detail)]
        grid = grid_shape(self.shape, scheme.tile)
        if not _says_grid(self.weight_scale.shape, grid):
            detail = f"shape {list(self.weight_scale.shape)}, but tile {list(scheme.tile)} over a weight of shape "
            detail += f"{list(self.shape)} needs {list(grid)}"
            found.append(_problem("mismatched", self.weight_scale, detail))
        if self.input_scale is not None and self.input_scale.shape not in ((), (1,), (1, 1)):
            detail = f"shape {list(self.input_scale.shape)}, but a static input has one scale"
            found.append(_problem("mismatched", self.input_scale, detail))
        return found

    def value_problems(self) -> list[Problem]:
        """What is wrong with the values: NaN codes, scales that are NaN, infinite, negative, or zero for the input."""
        found = []
        if nan := count_nan(self.read_codes(), self.scheme.weight_dtype):
            found.append(_problem("invalid", self.weight, f"{nan} of its codes are NaN"))
        for ref, scale in ((self.weight_scale, self.read_weight_scale()), (self.input_scale, self.read_input_scale())):
            if ref is None or scale is None:
                continue
            if not bool(scale.isfinite().all()):
                found.append(_problem("invalid", ref, "holds NaN or infinite scales"))
            elif bool((scale < 0).any()):
                found.append(_problem("invalid", ref, "holds negative scales"))
            elif ref is self.input_scale and bool((scale == 0).any()):
                found.append(_problem("invalid", ref, "is 0, and inputs are divided by it"))
        return found


def _problem(kind: str, ref: TensorRef, detail: str) -> Problem:
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


class ManifestBuilder:
    """Collects a dialect's findings and gives every tensor its owner.

    `lenient` is the rule for other producers' files: a scale beside a float weight is a named exception there (the
    tensors decide). In our own manifest it is unclaimed, hence an error.
    """

    def __init__(self, checkpoint: Checkpoint, dialect: str, evidence: str, *, lenient: bool = True) -> None:
        self.checkpoint = checkpoint
        self.dialect, self.evidence, self.lenient = dialect, evidence, lenient
        self.layers: dict[str, LayerSpec] = {}
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self._owned: set[str] = set()

    def fp8_weights(self) -> dict[str, TensorRef]:
        """Module path → FP8 tensor, for every `<module>.weight` (or root `weight`) stored in FP8."""
        found = {}
        for name, ref in self.checkpoint.tensors.items():
            module, _, leaf = name.rpartition(".")
            if ref.is_fp8 and leaf == "weight":
                found[module] = ref
        return found

    def problem(self, kind: str, name: str | TensorRef, detail: str) -> None:
        """Record something that makes the checkpoint unusable."""
        self.problems.append(Problem(kind, name, detail) if isinstance(name, str) else _problem(kind, name, detail))

    def refuse(self, module: str, kind: str, detail: str) -> None:
        """Record why a layer can't be read, and claim its tensors: they need no problem of their own."""
        self.problem(kind, module, detail)
        for name in self.checkpoint.tensors:
            path, _, leaf = name.rpartition(".")
            if path == module and (leaf == "weight" or _SCALE_LEAF.fullmatch(leaf)):
                self._owned.add(name)

    def layer(self, module: str, scheme: QuantizationScheme, *, why_static: str) -> None:
        """Claim `<module>.weight`, `.weight_scale` and (static schemes) `.input_scale` as one quantized layer.

        What is missing is recorded as a problem; `why_static` says where the file claims that the input is static.
        """
        tensors, prefix = self.checkpoint.tensors, f"{module}." if module else ""
        names = {leaf: prefix + leaf for leaf in ("weight", "weight_scale", "input_scale")}
        self._owned |= {names["weight"], names["weight_scale"]}
        weight, scale = tensors.get(names["weight"]), tensors.get(names["weight_scale"])
        input_scale = tensors.get(names["input_scale"]) if scheme.static else None
        if scheme.static:
            self._owned.add(names["input_scale"])
        if weight is None:
            self.problem("contradiction", names["weight"], "the manifest lists its layer, but it is not in the files")
        if scale is None and (weight is None or weight.is_fp8):
            stored = f"is {weight.dtype} in {weight.file}, but has no scale" if weight else "is missing"
            self.problem("missing", names["weight_scale"], f"{names['weight']} {stored}")
        if scheme.static and input_scale is None:
            self.problem("missing", names["input_scale"], f"{why_static}, so the input's scale must be in the file")
        if weight is None or scale is None or (scheme.static and input_scale is None):
            return
        spec = LayerSpec(module, scheme.for_rank(len(weight.shape)), weight, scale, input_scale)
        spec = (
            replace(spec, scheme=replace(spec.scheme, scale_dtype=dtype_name(scale.torch_dtype)))
            if (self.lenient and scale.dtype in _FLOATS)
            else spec
        )
        problems = spec.header_problems()
        self.problems += problems
        if not problems:
            self.layers[module] = spec

    def build(self) -> Manifest:
        """The manifest, with every tensor that no layer claimed sorted into plain, exceptions or unclaimed."""
        plain: dict[str, TensorRef] = {}
        exceptions: dict[str, str] = {}
        unclaimed: dict[str, str] = {}
        for name, ref in self.checkpoint.tensors.items():
            if name in self._owned:
                continue
            module, _, leaf = name.rpartition(".")
            if ref.is_fp8:
                looked = f"{name}_scale"
                unclaimed[name] = f"stored in {ref.dtype}, but no scale explains it (looked for {looked})"
            elif not _SCALE_LEAF.fullmatch(leaf):
                plain[name] = ref
            elif reason := self._exception(module, leaf):
                exceptions[name] = reason
            else:
                unclaimed[name] = "a scale that no layer uses"
        return Manifest(
            *(self.dialect, self.evidence, self.checkpoint, self.layers, plain, exceptions, unclaimed),
            *(tuple(self.problems), tuple(self.notes)),
        )

    def _exception(self, module: str, leaf: str) -> str | None:
        if _KV_LEAF.fullmatch(leaf):
            return "a KV-cache or attention scale: reported, not applied"
        if leaf == "input_scale_ub":
            return "an upper bound for input scales, used only while quantizing"
        if not self.lenient:
            return None
        weight = self.checkpoint.tensors.get(f"{module}.weight" if module else "weight")
        if weight is not None and weight.dtype in _FLOATS:
            return "a scale beside a weight that is stored in float: the weight is taken as it is"
        if weight is None and leaf in ("input_scale", "output_scale"):
            return "an activation scale without a quantized weight"
        return None


def list_notes(kind: str, names: Iterable[str], what: str) -> str:
    """One folded sentence for a list of modules, e.g. where lists and tensors disagree."""
    return f"{kind}: {', '.join(fold(names))} ({what})"
