"""`ManifestBuilder`: collects what a dialect finds, and gives every tensor of the checkpoint its owner."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyfp8.checkpoint import Checkpoint, TensorRef
from anyfp8.errors import Problem
from anyfp8.folding import fold, join, layer_path
from anyfp8.manifest import LayerSpec, Manifest
from anyfp8.numerics import dtype_name
from anyfp8.scheme import QuantizationScheme
from anyfp8.sources import FLOATS, Codes, Scale, plain_values, problem_of

#: leaf names that only quantizers write; anything else is an ordinary tensor
_SCALE_LEAF = re.compile(
    r"(weight|input|output|act|activation|k|v|q|kv|prob)_scale(_inv|_2|_ub)?|scale_(weight|input)|_amax"
    r"|(weight|input|output|k|v|q|kv)_(zero_point|global_scale)"
)
_KV_LEAF = re.compile(r"(k|v|q|kv|prob)_(scale|zero_point|global_scale)")
_ACT_LEAF = re.compile(r"(input|output|act|activation)_scale|(input|output)_global_scale")
#: leaf names of a weight's codes, and of what integer formats keep beside them
_WEIGHT_LEAF = re.compile(r"weight(_packed|_shape|_g_idx)?")

#: reasons of exceptions that dialects name as well
NO_SHIFT = "a zero point of 0 changes nothing"
KV_SCALE = "a KV-cache or attention scale: reported, not applied"


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
        #: what the dialect itself knows: plain tensors although they are FP8, and exceptions with their reasons
        self.plain: dict[str, TensorRef] = {}
        self.exceptions: dict[str, str] = {}
        #: see `Manifest.expects`
        self.expects: Callable[[str, tuple[str, ...]], bool] | None = None
        self._owned: set[str] = set()

    def fp8_weights(self) -> dict[str, TensorRef]:
        """Module path → FP8 tensor, for every `<module>.weight` (or root `weight`) stored in FP8."""
        found = {}
        for name, ref in self.checkpoint.tensors.items():
            module, _, leaf = name.rpartition(".")
            if ref.is_fp8 and leaf == "weight":
                found[module] = ref
        return found

    def packed_weights(self) -> dict[str, TensorRef]:
        """Module path → tensor, for every `<module>.weight_packed`: llm-compressor's name for codes of under 8 bits."""
        split = ((name.rpartition("."), ref) for name, ref in self.checkpoint.tensors.items())
        return {module: ref for (module, _, leaf), ref in split if leaf == "weight_packed"}

    def problem(self, kind: str, name: str | TensorRef, detail: str) -> None:
        """Record something that makes the checkpoint unusable."""
        self.problems.append(Problem(kind, name, detail) if isinstance(name, str) else problem_of(kind, name, detail))

    def refuse(self, module: str, kind: str, detail: str) -> None:
        """Record why a layer can't be read, and claim its tensors: they need no problem of their own."""
        self.problem(kind, module, detail)
        for name in self.checkpoint.tensors:
            path, _, leaf = name.rpartition(".")
            if path == module and (_WEIGHT_LEAF.fullmatch(leaf) or _SCALE_LEAF.fullmatch(leaf)):
                self._owned.add(name)

    def find(self, module: str, *leaves: str) -> TensorRef | None:
        """The first of `<module>.<leaf>` that the checkpoint has."""
        tensors = self.checkpoint.tensors
        return next((tensors[name] for leaf in leaves if (name := join(module, leaf)) in tensors), None)

    def claim(self, *refs: TensorRef | None) -> None:
        """Say that these tensors have an owner."""
        self._owned |= {ref.name for ref in refs if ref is not None}

    def layer(
        self,
        module: str,
        scheme: QuantizationScheme,
        *,
        codes: Codes | None = None,
        scale: Scale | None = None,
        input_scale: Scale | None = None,
        extras: Mapping[str, Scale] | None = None,
        why_static: str = "the manifest says that the input is static",
        by_class: Mapping[str, QuantizationScheme] | None = None,
        param: str = "weight",
    ) -> None:
        """Claim the tensors of one quantized layer, and check them as far as headers tell.

        codes, scale, input_scale, extras: where they are; by default `<module>.weight`, `.weight_scale`,
        `.input_scale` and the names in `scheme.extras`. Only what the scheme needs is claimed; what is missing becomes
        a problem. Other producers' packed codes may also be `.weight_packed`, and NVFP4's scales may be divided by
        `.weight_global_scale` and `.input_global_scale` (llm-compressor's names).
        why_static: who claims that the input is static. by_class: schemes that go with the module's class, if the file
        leaves the choice to it; those that don't fit the tensors drop out. param: which parameter of the module.
        """
        given = (param, codes, scale, input_scale, extras or {})
        tried = {name: self._spec(module, s, given, why_static) for name, s in (by_class or {}).items()}
        fitting = {name: found for name, found in tried.items() if isinstance(found, LayerSpec)}
        result = self._spec(module, scheme, given, why_static)
        if fitting and not isinstance(result, LayerSpec):
            result = next(iter(fitting.values()))
        for source in (scale, input_scale, *(extras or {}).values()):
            self.claim(*(source.refs if source else ()))
        if not isinstance(result, LayerSpec):  # what it would have used needs no further problem
            self.problems += result
            self.claim(self._codes(module, param) if codes is None else codes.ref)
            self.claim(*(self.find(module, leaf) for leaf in (f"{param}_scale", *scheme.extras)))
            needed = ["weight_global_scale"] * (scheme.scale_dtype == "float8_e4m3fn")
            needed += ["input_scale", "input_global_scale"] * scheme.needs_input_scale
            self.claim(*(self.find(module, leaf) for leaf in needed))
            return
        if any(found != result for found in fitting.values()):
            result = replace(result, by_class=tuple(fitting.items()))
        for spec in (result, *(found for _, found in result.by_class)):
            self.claim(*spec.refs)
        self.layers[layer_path(module, param)] = result

    def _spec(self, module: str, scheme: QuantizationScheme, given: Any, why_static: str) -> LayerSpec | list[Problem]:
        """The layer read in this scheme, or what keeps it from being read so."""
        param, codes, scale, input_scale, extras = given
        weight = self._codes(module, param) if codes is None else codes.ref
        problems = []
        if weight is None:
            detail = "the manifest lists its layer, but it is not in the files"
            problems.append(Problem("contradiction", join(module, param), detail))
        elif weight.dtype in FLOATS:
            return [problem_of("contradiction", weight, f"is {weight.dtype}, the manifest says {scheme.weight_dtype}")]
        if scale is None:
            scale = self._scale(module, f"{param}_scale", scheme.scale_dtype)
            two_level = scheme.weight_dtype == "float4_e2m1fn" and scheme.scale_dtype == "float8_e4m3fn"
            if self.lenient and two_level and self.find(module, "weight_global_scale") is None:
                detail = "NVFP4's scales have two levels, and this one divides them all"
                problems.append(Problem("missing", join(module, "weight_global_scale"), detail))
        if scale is None:
            stored = f"is {weight.dtype} in {weight.file}, but has no scale" if weight else "is missing"
            whose = weight.name if weight else join(module, param)
            problems.append(Problem("missing", join(module, f"{param}_scale"), f"{whose} {stored}"))
        if not scheme.needs_input_scale:
            input_scale = None
        elif input_scale is None and (input_scale := self._input_scale(module, scheme)) is None:
            detail = f"{why_static}, so the input's scale must be in the file"
            divides = scheme.act_scale == "e4m3" and self.find(module, "weight_global_scale") is not None
            leaf = "input_global_scale" if divides else "input_scale"
            problems.append(Problem("missing", join(module, leaf), detail))
        found: list[tuple[str, Scale]] = []
        for name in scheme.extras:
            if source := extras.get(name) or self._scale(module, name):
                found.append((name, source))
            else:
                problems.append(Problem("missing", join(module, name), f"its scheme ({scheme}) needs it"))
        if weight is None or scale is None or problems:
            return problems
        codes = codes or Codes(weight, scheme.weight_dtype)
        scheme = scheme.for_rank(len(codes.shape))
        stored_float = scale.encoding == "float" and scale.ref.dtype in FLOATS
        if self.lenient and stored_float:  # other producers store scales in the model's dtype
            scheme = replace(scheme, scale_dtype=dtype_name(scale.ref.torch_dtype))
        spec = LayerSpec(module, scheme, codes, scale, input_scale, tuple(found), param)
        return spec.header_problems() or spec

    def _codes(self, module: str, param: str) -> TensorRef | None:
        return self.find(module, param, *([f"{param}_packed"] if self.lenient else []))

    def _scale(self, module: str, leaf: str, dtype: str = "float32") -> Scale | None:
        encoding = {"float8_e8m0fnu": "e8m0", "float8_e5m3": "e5m3"}.get(dtype, "float")
        ref = self.find(module, leaf)
        outer = self.find(module, "weight_global_scale") if self.lenient and dtype == "float8_e4m3fn" else None
        return None if ref is None else Scale(ref, encoding, factor=outer, divide=outer is not None)

    def _input_scale(self, module: str, scheme: QuantizationScheme) -> Scale | None:
        if self.lenient and scheme.act_scale == "e4m3" and (outer := self.find(module, "input_global_scale")):
            return Scale(outer, inverse=True)
        return self._scale(module, "input_scale")

    def build(self) -> Manifest:
        """The manifest, with every tensor that no layer claimed sorted into plain, exceptions or unclaimed."""
        plain, exceptions = dict(self.plain), dict(self.exceptions)
        unclaimed: dict[str, str] = {}
        for name, ref in self.checkpoint.tensors.items():
            if name in self._owned or name in plain or name in exceptions:
                continue
            module, _, leaf = name.rpartition(".")
            if ref.is_fp8 and not _SCALE_LEAF.fullmatch(leaf):
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
            *(tuple(self.problems), tuple(self.notes), self.expects),
        )

    def _exception(self, module: str, leaf: str) -> str | None:
        if _KV_LEAF.fullmatch(leaf):
            return KV_SCALE
        if leaf.endswith("zero_point") and self.lenient and is_zero(self.checkpoint.tensors[join(module, leaf)]):
            return NO_SHIFT
        if leaf == "output_scale" and module.rpartition(".")[2] in ("k_proj", "v_proj"):
            return "a KV-cache scale in its old place: reported, not applied"
        if leaf == "input_scale_ub":
            return "an upper bound for input scales, used only while quantizing"
        if not self.lenient:
            return None
        weight = self.find(module, "weight", "weight_packed")
        if weight is not None and weight.dtype in FLOATS:
            return "a scale beside a weight that is stored in float: the weight is taken as it is"
        if weight is None and _ACT_LEAF.fullmatch(leaf):
            return "an activation scale without a quantized weight"
        return None


def is_zero(ref: TensorRef) -> bool:
    """Are all of a tensor's values 0? Of a zero point: it changes nothing."""
    return not bool(plain_values(ref).count_nonzero())


def list_notes(kind: str, names: Iterable[str], what: str) -> str:
    """One folded sentence for a list of modules, e.g. where lists and tensors disagree."""
    return f"{kind}: {', '.join(fold(names))} ({what})"
