"""transformers' own FP8 files (`quant_method` fp8, mxfp8, fbgemm_fp8), and what others write under the name "fp8":
DeepSeek, Qwen and Mistral, vLLM and AutoFP8, Quark's "fp8" mode, auto-round's FP8_BLOCK.

Read from transformers 5.24.0 (5.17.0 for its older lists). Every scale multiplies: `weight_scale_inv` is only a name.
The block size comes from the config and edge blocks are clipped; transformers' own CPU reader divides the shape by the
scale grid instead, and so mis-scales weights that are no whole number of blocks.
"""

from __future__ import annotations

import re
from typing import Any

from anyfp8.checkpoint import Checkpoint
from anyfp8.claims import ManifestBuilder, list_notes
from anyfp8.dialects.config import quantization_config
from anyfp8.dialects.transformers_rules import E4M3, METHODS, Rules
from anyfp8.dialects.transformers_weights import STACKED, Weights, is_expert
from anyfp8.errors import DialectError
from anyfp8.manifest import Manifest
from anyfp8.sources import FLOATS


def match(checkpoint: Checkpoint) -> str | None:
    """quant_method 'fp8', 'mxfp8' or 'fbgemm_fp8', and no manifest of ModelOpt's (whose export may keep an old one)."""
    config, where = quantization_config(checkpoint)
    method = config.get("quant_method")
    if method not in METHODS or "hf_quant_config.json" in checkpoint.configs:
        return None
    return f"{where}: quant_method {method!r}"


def read(checkpoint: Checkpoint, evidence: str) -> Manifest:
    """The tensors say which layers are quantized; the config gives the block size and the inputs' handling."""
    config, where = quantization_config(checkpoint)
    try:
        rules = Rules.of(config, where or "transformers' default")
    except DialectError as error:
        raise DialectError(f"{checkpoint.name}: {error}") from None
    builder = ManifestBuilder(checkpoint, "transformers-fp8", evidence)
    weights = Weights(builder, rules)
    for name, ref in checkpoint.tensors.items():
        if ref.is_fp8 or (rules.fp4_experts and ref.dtype in ("I8", "U8") and is_expert(name)):
            weights.add(ref)
    _leftovers(builder, rules)
    _lists(builder, rules)
    _notes(builder, rules, config)
    return builder.build()


def _leftovers(builder: ManifestBuilder, rules: Rules) -> None:
    """Name what belongs to no layer: transformers leaves a weight that is no whole number of blocks in float, but may
    write a scale beside it that it never filled."""
    spellings = {spec.scale.ref.name.rpartition(".")[2] for spec in builder.layers.values()}
    for name in builder.checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf == "input_scale_ub" and rules.method == "fbgemm_fp8":
            builder.exceptions[name] = "a copy of the config's activation_scale_ub"
            continue
        fused = re.fullmatch(rf"({'|'.join(STACKED)})_(scale|scale_inv|activation_scale)", leaf)
        if fused:
            weight = builder.find(module, fused[1], *(f"0.{part}.weight" for part in STACKED[fused[1]]))
        elif leaf.startswith("qscale_") or (leaf == "scale" and leaf in spellings):
            weight = builder.find(module, "weight")
        else:  # an ordinary tensor, or a name that every dialect knows
            continue
        if weight is not None and weight.dtype in FLOATS:
            builder.exceptions[name] = "a scale beside a weight that is stored in float: the weight is taken as it is"


def _lists(builder: ManifestBuilder, rules: Rules) -> None:
    """Compare the list of modules to be left alone with the tensors, by the rules of both generations of readers."""
    now = [name for name in builder.layers if rules.keeps(name, bounded=True)]
    before = [name for name in builder.layers if rules.keeps(name, bounded=False) and name not in now]
    if now:
        builder.notes.append(list_notes("to be left alone by the config, but stored in FP8", now, "the tensors decide"))
    if before:
        what = "their names begin with an entry of the list; the tensors decide"
        builder.notes.append(list_notes("left alone by transformers before 5.24, but stored in FP8", before, what))
    builder.expects = rules.expects(spec.name.rpartition(".")[2] for spec in builder.layers.values())


def _notes(builder: ManifestBuilder, rules: Rules, config: dict[str, Any]) -> None:
    if config.get("kv_cache_scheme"):
        builder.notes.append("the KV-cache scheme is reported, not applied")
    if config.get("dequantize"):
        what = 'inputs are quantized all the same; backend="dequantized" leaves them alone'
        builder.notes.append(f"the config says dequantize, an option of transformers' loader: {what}")
    if rules.block is not None and not rules.implied:
        layers = {name: spec for name, spec in builder.layers.items() if spec.codes.format == E4M3}
        if other := [name for name, spec in layers.items() if spec.scheme.tile[-2:] != rules.block]:
            builder.notes.append(list_notes("not in the config's blocks", other, "one scale a weight or a row"))
    if rules.method == "fbgemm_fp8":
        bound = config.get("activation_scale_ub", 1200.0)
        builder.notes.append(
            f"FBGEMM clips those rows of an input whose largest magnitude is above activation_scale_ub ({bound}); here "
            "they are scaled by their own largest magnitude, as all other rows are there and here"
        )
