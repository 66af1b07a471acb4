"""Wrong files of every dialect, made by code: each gives a clear error or the stated result, never a wrong weight."""

import json
import os

import numpy as np
import pytest
import torch

import anyfp8
from tests.checkpoints import F8, Snapshot, on_meta
from tests.helpers import safetensors_bytes
from tests.hostile.samples import (
    E8M0,
    SAMPLES,
    Block,
    K,
    N,
    X,
    assert_right,
    change_json,
    expected,
    label,
    quantization,
    record,
)

NAN, INF = float("nan"), float("inf")
CASES = {}


def case(match, *names):
    """Register a spoil for these samples. match: what the error must say; None: it must load, and right.

    "{m}" in the pattern is the first quantized module, "{n}" the second. A spoil that returns a dict (module → float32
    weight) says what is right instead of the unspoiled values. BFL's files are known by the scales of all their layers,
    so one that lacks some is nobody's, and the message says which dialects were tried.
    """
    assert set(names) <= set(SAMPLES)

    def register(spoil):
        for name in (name for name in SAMPLES if name in names):
            any_of = match and f"{match}|no dialect recognised it" if name.startswith("bfl") else match
            CASES[f"{name}-{spoil.__name__}"] = (name, spoil, any_of)
        return spoil

    return register


def has(field):
    return [name for name, build in SAMPLES.items() if all(getattr(r, field) for r in build().readings.values())]


SCALED = has("scale")
FLOAT = [name for name in SCALED if SAMPLES[name]().readings[next(iter(SAMPLES[name]().readings))].kind == "float"]
POWERS = [name for name in SCALED if SAMPLES[name]().readings[next(iter(SAMPLES[name]().readings))].kind == "e8m0"]
TWO_LEVELS = has("factor")
#: without an input_scale these are weight-only, and may be so
COMFY = [name for name in SAMPLES if name.startswith("comfy")]
STATIC = has("input")
PACKED = [name for name in SAMPLES if "fp4" in name]
FP8 = [name for name in SAMPLES if name not in PACKED]


def first(s):
    """The module that cases spoil, and how it is read."""
    return next(iter(s.readings.items()))


def second(s):
    return list(s.readings.items())[1]


def config(s):
    return s.configs["config.json"]["quantization_config"]


def values_of(s, name, at, value):
    """Put a value into a tensor, in place."""
    flat = s.tensors[name].reshape(-1)
    if flat.dtype in (F8, E8M0):
        flat.view(torch.uint8)[at] = value
    else:
        flat[at] = value


# --- scales: missing, extra, of another shape ---
@case(r"{m}", *(set(SCALED) - set(COMFY)))
def weight_scale_missing(s):
    """bfl is recognised by its scales: without one nobody claims the file, and its FP8 tensors are named."""
    del s.tensors[first(s)[1].scale]


@case(r"\ba\.(weight|comfy_quant)", *COMFY)
def weight_scale_missing_in_comfy(s):
    del s.tensors[first(s)[1].scale]


@case(r"{m}", *TWO_LEVELS)
def outer_scale_missing(s):
    del s.tensors[first(s)[1].factor]


@case(r"{m}\.(weight|input_|quant_input|activation)", *(set(STATIC) - set(COMFY)))
def input_scale_missing(s):
    del s.tensors[first(s)[1].input[0]]


@case(None, *(set(STATIC) & set(COMFY)))
def input_scale_absent_where_that_is_legal(s):
    """The layer is weight-only then; it is never 1.0."""
    del s.tensors[first(s)[1].input[0]]


@case(r"{m}\.k_?weight_scale_(inv|2)|{m}\.weight_scale_(inv|2)", *(set(SAMPLES) - {"bare"} - set(TWO_LEVELS)))
def another_scale_beside_the_first(s):
    m, reading = first(s)
    leaf = "weight_scale_2" if reading.scale.endswith("_inv") else "weight_scale_inv"
    s.tensors[f"{m}.{leaf}"] = torch.ones(1)


@case(r"not bare.*a\.weight_scale", "bare")
def a_scale_in_a_bare_file(s):
    s.tensors["a.weight_scale"] = torch.ones(1)


@case(r"{m}", *SCALED)
def weight_scale_of_a_size_that_fits_nothing(s):
    name = first(s)[1].scale
    s.tensors[name] = torch.zeros(7, 3).to(s.tensors[name].dtype)


@case(r"{m}", *SCALED)
def weight_scale_empty(s):
    name = first(s)[1].scale
    s.tensors[name] = s.tensors[name].reshape(-1)[:0]


@case(r"{m}", *(name for name in FLOAT if SAMPLES[name]().readings.get("a") and "block" not in name and name != "fp8"))
def one_scale_for_each_column(s):
    """The right number for the other axis."""
    name = first(s)[1].scale
    s.tensors[name] = torch.ones(K).to(s.tensors[name].dtype)


@case(
    r"{m}",
    "ct",
    "auto-round",
    "anyfp8 block",
    "ct block",
    "ct mxfp4",
    "auto-round mxfp8",
    "modelopt mxfp8",
    "modelopt nvfp4",
)
@case(r"{m}", "fp8", "comfy header", "bfl nvfp4", "torchao", "torchao mx", "quanto", "quanto weight-only", "ct nvfp4")
def weight_scale_transposed(s):
    name = first(s)[1].scale
    s.tensors[name] = s.tensors[name].t().contiguous()


@case(r"{m}", *STATIC)
def input_scale_of_two_values(s):
    name = first(s)[1].input[0]
    s.tensors[name] = torch.stack([s.tensors[name].reshape(())] * 2)


@case(r"{m}", *TWO_LEVELS)
def outer_scale_of_two_values(s):
    name = first(s)[1].factor
    s.tensors[name] = torch.stack([s.tensors[name].reshape(())] * 2)


# --- scales: values ---
def _bad_value(value, word):
    @case(rf"{{m}}.*({word})", *FLOAT)
    def weight_scale(s):
        values_of(s, first(s)[1].scale, -1, value)

    @case(rf"{{m}}.*({word})", *TWO_LEVELS)
    def outer_scale(s):
        values_of(s, first(s)[1].factor, -1, value)

    @case(rf"{{m}}.*({word})", *STATIC)
    def input_scale(s):
        values_of(s, first(s)[1].input[0], -1, value)

    for spoil in (weight_scale, outer_scale, input_scale):
        for key in [key for key in CASES if CASES[key][1] is spoil]:
            CASES[f"{key}_{value}"] = CASES.pop(key)


_bad_value(NAN, "NaN")
_bad_value(INF, "infinite|is 0")  # a stored 1 / scale that is infinite is a scale of 0
_bad_value(-INF, "infinite|negative|is 0")
_bad_value(-0.5, r"negative|is not 1 /|1 / ")


@case(r"{m}.*(is 0|infinite)", *STATIC)
def input_scale_zero(s):
    s.tensors[first(s)[1].input[0]].zero_()


@case(None, *FLOAT)
def weight_scale_zero(s):
    """real = code × scale: producers write 0 for a patch of zeros."""
    m, reading = first(s)
    s.tensors[reading.scale].zero_()
    return {m: np.zeros(tuple(s.model().get_submodule(m).weight.shape), np.float32)}


@case(None, "modelopt nvfp4", "comfy nvfp4", "bfl nvfp4")
def outer_scale_zero_that_multiplies(s):
    m, reading = first(s)
    s.tensors[reading.factor].zero_()
    return {m: np.zeros((N, K), np.float32)}


@case(r"{m}.*(NaN|infinite)", "ct nvfp4")
def outer_scale_zero_that_divides(s):
    s.tensors[first(s)[1].factor].zero_()


@case(r"{m}.*NaN", *POWERS)
def nan_exponent(s):
    values_of(s, first(s)[1].scale, 0, 255)


@case(r"{m}.*NaN", *(set(TWO_LEVELS)))
def nan_block_scale(s):
    values_of(s, first(s)[1].scale, 0, 0x7F)


@case(r"{m}.*negative", *(set(TWO_LEVELS)))
def negative_block_scale(s):
    values_of(s, first(s)[1].scale, 0, 0xC0)


@case(r"{m}.*1 of its codes", *FP8)
def nan_code(s):
    values_of(s, first(s)[1].codes, 5, 0x7F)


@case(r"{m}.*(I64|can't be)", *SCALED)
def weight_scale_of_integers(s):
    name = first(s)[1].scale
    s.tensors[name] = torch.ones(s.tensors[name].shape, dtype=torch.int64)


@case(r"{m}", *POWERS, "comfy nvfp4", "bfl nvfp4")
def block_scale_of_floats(s):
    """1.0 is no exponent byte."""
    name = first(s)[1].scale
    s.tensors[name] = torch.ones(s.tensors[name].shape)


@case(r"{m}", *(set(FLOAT) - {"fp8", "fp8 static"}))
def weight_scale_of_bytes(s):
    """In transformers' files a byte is an exponent, elsewhere it is nothing."""
    name = first(s)[1].scale
    s.tensors[name] = torch.ones(s.tensors[name].shape, dtype=torch.uint8)


# --- weights ---
@case(r"{n}", *(set(SAMPLES) - {"inc"}))
def weight_transposed(s):
    name = second(s)[1].codes
    s.tensors[name] = s.tensors[name].t().contiguous()


@case(r"\[64, 32\].*\[32, 64\]", "inc")
def weight_not_transposed(s):
    """As a module has it, not as neural-compressor stores it."""
    s.tensors["a.weight"] = s.tensors["a.weight"].t().contiguous()


@case(r"{m}", *SAMPLES)
def weight_without_its_last_row(s):
    name = first(s)[1].codes
    s.tensors[name] = s.tensors[name].view(torch.uint8)[:-1].view(s.tensors[name].dtype)


@case(r"{m}", *SAMPLES)
def weight_of_no_dimension(s):
    name = first(s)[1].codes
    s.tensors[name] = s.tensors[name].reshape(-1)[0]


@case(r"{m}", *SAMPLES)
def weight_missing(s):
    del s.tensors[first(s)[1].codes]


@case(
    r"{m}",
    *(set(FP8) - {"comfy", "comfy marker", "comfy header", "inc", "torchao", "torchao mx", "bare", "comfy mxfp8"}),
)
def weight_of_another_fp8_format(s):
    """Where the config says which; these bytes mean other numbers as e5m2."""
    name = first(s)[1].codes
    s.tensors[name] = s.tensors[name].view(torch.float8_e5m2)


@case(r"{m}", *SAMPLES)
def weight_of_integers(s):
    name = first(s)[1].codes
    s.tensors[name] = torch.ones(s.tensors[name].shape, dtype=torch.int64)


@case(r"{m}", "anyfp8", "anyfp8 block", "torchao", "torchao mx", "quanto", "quanto weight-only", "ct nvfp4", "ct mxfp4")
def weight_in_float_under_the_name_of_codes(s):
    name = first(s)[1].codes
    s.tensors[name] = torch.ones(s.tensors[name].shape)


JUNK = ("ct", "ct static", "auto-round", "fp8", "fp8 static", "modelopt", "quark", "comfy", "comfy header")


@case(None, *JUNK, "ct block", "auto-round mxfp8", "modelopt mxfp8", "modelopt nvfp4", "inc", "bfl")
def junk_scale_beside_a_float_weight(s):
    m = first(s)[0].removesuffix("a") + "head"
    leaf = {"weight_scale_inv", "dequant_weights.scale"} & {first(s)[1].scale.split(".", 1)[1]}
    s.tensors[f"{m}.{leaf.pop() if leaf else 'weight_scale'}"] = torch.full((), 1e4)


@case(None, *JUNK)
def listed_as_quantized_but_complete_in_float(s):
    """The tensors decide: a targeted layer in float with a left-over scale is a float layer."""
    m, reading = first(s)
    weight = torch.linspace(-1, 1, N * K).reshape(N, K)
    s.tensors[reading.codes] = weight
    return {m: weight.numpy()}


@case(None, *JUNK)
def ignored_but_complete_in_fp8(s):
    """The tensors decide here as well."""
    if s.configs and "config.json" in s.configs:
        table, key = config(s), {"ct": "ignore", "ct static": "ignore", "quark": "exclude"}
        names = {"compressed-tensors": "ignore", "quark": "exclude", "auto-round": "modules_to_not_convert"}
        key = names.get(table["quant_method"], "modules_to_not_convert")
        table[key] = ["a"]
    elif s.configs:
        s.configs["hf_quant_config.json"]["quantization"]["exclude_modules"] = ["a"]


# --- owners ---
def _again(s, name, change=lambda t: t + 1):
    s.tensors[name] = change(torch.zeros(N, K))


@case(r"a\.weight", "ct mxfp4", "ct nvfp4", "auto-round mxfp4", "torchao", "torchao mx", "quanto", "quanto weight-only")
def float_weight_beside_the_codes(s):
    """Two tensors that own one parameter."""
    _again(s, "a.weight")


@case(r"a\.weight", "ct", "ct static", "auto-round", "auto-round mxfp8")
def packed_codes_beside_the_codes(s):
    s.tensors["a.weight_packed"] = torch.zeros(N, K // 2, dtype=torch.uint8)


@case(r"a\.(scale_weight|weight_scale)", "comfy", "comfy header", "comfy marker")
def two_spellings_of_a_scale_that_differ(s):
    name = first(s)[1].scale
    other = "a.weight_scale" if name == "a.scale_weight" else "a.scale_weight"
    s.tensors[other] = s.tensors[name] * 2


@case(None, "comfy", "comfy header", "comfy marker")
def two_spellings_of_a_scale_that_agree(s):
    name = first(s)[1].scale
    other = "a.weight_scale" if name == "a.scale_weight" else "a.scale_weight"
    s.tensors[other] = s.tensors[name].clone()


@case(r"a\.weight.*(more than one scale|weight_scale)", "fp8", "fp8 static")
def two_scales_of_transformers(s):
    name = first(s)[1].scale
    other = "a.weight_scale" if name.endswith("_inv") else "a.weight_scale_inv"
    s.tensors[other] = s.tensors[name].clone()


@case(r"a\.(weight_scale|weight_quantizer)", "modelopt quantizers", "quark")
def scales_of_two_modes(s):
    name = "a.weight_scale" if "weight_quantizer" in first(s)[1].scale else "a.weight_quantizer.scale"
    s.tensors[name] = torch.ones(())


@case(r"a\.quant_input\.scale_inv.*1 / ", "inc")
def reciprocal_that_is_none(s):
    s.tensors["a.quant_input.scale_inv"] *= 2


@case(r"a\.quant_input\.scale", "inc")
def reciprocal_of_another_shape(s):
    s.tensors["a.quant_input.scale"] = torch.ones(8).bfloat16()
    s.tensors["a.quant_input.scale_inv"] = torch.ones(7).bfloat16()


# --- lists and tensors that contradict each other ---
@case(r"a.*no layer_config entry", "anyfp8", "anyfp8 block")
def no_entry_for_fp8_tensors(s):
    del s.configs["anyfp8.json"]["layer_config"]["a"]


@case(r"ghost", "anyfp8", "anyfp8 block")
def entry_without_tensors(s):
    s.configs["anyfp8.json"]["layer_config"]["ghost"] = s.configs["anyfp8.json"]["layer_config"]["a"]


@case(r"a\.weight", "anyfp8", "anyfp8 block")
def codes_under_a_name_that_is_not_ours(s):
    s.tensors["a.weight_packed"] = s.tensors.pop("a.weight")


@case(r"\ba: .*ignore", "anyfp8", "anyfp8 block")
def entry_that_is_ignored(s):
    s.configs["anyfp8.json"]["ignore"] = ["a"]


@case(r"\ba\b.*no config group targets", "ct", "ct static", "ct block", "ct mxfp4", "ct nvfp4")
def no_group_for_fp8_tensors(s):
    config(s)["config_groups"]["group_0"]["targets"] = ["b"]


@case(r"a.*no entry for a", "quanto", "quanto weight-only")
def no_entry_in_the_map(s):
    del s.configs["quanto_qmap.json"]["a"]


@case(r"a\.weight.*weights are not", "quanto", "quanto weight-only")
def map_says_that_weights_are_not_quantized(s):
    s.configs["quanto_qmap.json"]["a"]["weights"] = "none"


@case(r"a\.weight.*qint8", "quanto", "quanto weight-only")
def map_says_integers(s):
    s.configs["quanto_qmap.json"]["a"]["weights"] = "qint8"


@case(r"a\._weight_qdata.*no record", "torchao", "torchao mx")
def no_record_for_codes(s):
    del s.metadata["a.weight"]


@case(r"ghost\.weight.*is missing", "torchao", "torchao mx")
def record_without_tensors(s):
    s.metadata["ghost.weight"] = s.metadata["a.weight"]


@case(r"a\.weight.*block_size", "torchao")
def record_of_another_rank(s):
    s.metadata["a.weight"] = record("Float8Tensor", [1, 1, K])


@case(r"a\.weight.*Int4Tensor", "torchao", "torchao mx")
def record_of_another_class(s):
    s.metadata["a.weight"] = (
        s.metadata["a.weight"].replace("Float8Tensor", "Int4Tensor").replace("MXTensor", "Int4Tensor")
    )


@case(r"a\.weight", "torchao mx")
def record_with_a_broken_size(s):
    s.metadata["a.weight"] = record("MXTensor", 32.9, is_swizzled_scales=False)


@case(r"a\.weight|block_size", "torchao mx")
def record_with_an_infinite_size(s):
    s.metadata["a.weight"] = record("MXTensor", INF, is_swizzled_scales=False)


@case(r"record of a\.weight is no usable JSON", "torchao", "torchao mx")
def record_that_is_no_json(s):
    s.metadata["a.weight"] = s.metadata["a.weight"][:-1]


@case(r"ghost\.weight.*its label says", "comfy", "comfy nvfp4", "comfy mxfp8")
def label_without_weight(s):
    s.tensors["ghost.comfy_quant"] = label()


@case(r"\ba\b.*'int8'", "comfy", "comfy nvfp4", "comfy mxfp8")
def label_of_an_unknown_format(s):
    s.tensors["a.comfy_quant"] = label("int8")


@case(r"\ba\b", "comfy")
def label_of_another_format(s):
    s.tensors["a.comfy_quant"] = label("nvfp4")


@case(r"a\.comfy_quant.*JSON", "comfy", "comfy nvfp4", "comfy mxfp8")
def label_that_is_no_json(s):
    s.tensors["a.comfy_quant"] = torch.tensor([123, 255, 0], dtype=torch.uint8)


@case(r"a\.comfy_quant.*F32", "comfy")
def label_of_floats(s):
    s.tensors["a.comfy_quant"] = torch.ones(4)


@case(r"\ba\b.*convrot", "comfy", "comfy nvfp4", "comfy mxfp8")
def label_with_a_rotation(s):
    s.tensors["a.comfy_quant"] = label(convrot=True)


@case(r"\ba\b.*\[30, 64\].*\[32, 64\]", "comfy nvfp4", "comfy mxfp8")
def label_of_another_shape(s):
    """30 rows are padded to 32 (of 16 or 32), so the codes fit; the model's 32 rows don't."""
    format = json.loads(bytes(s.tensors["a.comfy_quant"].tolist()))["format"]
    s.tensors["a.comfy_quant"] = label(format, orig_shape=[30, 64])


@case(r"\ba\b.*(orig_shape|shape)", "comfy nvfp4", "comfy mxfp8")
def label_of_an_infinite_shape(s):
    format = json.loads(bytes(s.tensors["a.comfy_quant"].tolist()))["format"]
    s.tensors["a.comfy_quant"] = label(format, orig_shape=[INF, 64])


@case(r"\ba\b.*comfy_quant tensor says", "comfy")
def labels_that_contradict_each_other(s):
    layers = {"a": {"format": "mxfp8"}}
    s.metadata = {"_quantization_metadata": json.dumps({"layers": layers})}


@case(r"_quantization_metadata.*layers", "comfy header")
def header_labels_that_are_a_list(s):
    s.metadata = {"_quantization_metadata": '{"layers": []}'}


# --- configs ---
@case(r"quant_method 'exl9', which no dialect reads", "ct", "auto-round", "fp8", "fp8 static", "quark", "ct mxfp4")
def unknown_quant_method(s):
    config(s)["quant_method"] = "exl9"


@case(r"FP8 tensors|quanto tensors|\ba\.weight", *(n for n in SAMPLES if SAMPLES[n]().configs and n != "inc"))
def config_lost(s):
    """Nothing says any more what the tensors mean; torchao's records do still."""
    s.configs.clear()
    s.metadata = None


@case(None, "inc", "torchao")
def config_lost_but_the_tensors_say_enough(s):
    s.configs.clear()


@case(r"claimed by 2 dialects.*anyfp8.*compressed-tensors", "ct")
def two_dialects_anyfp8_and_ct(s):
    s.configs |= SAMPLES["anyfp8"]().configs


@case(r"claimed by 2 dialects.*compressed-tensors.*quanto", "ct")
def two_dialects_ct_and_quanto(s):
    s.configs |= SAMPLES["quanto"]().configs


@case(r"claimed by 2 dialects.*modelopt.*quanto", "modelopt")
def two_dialects_modelopt_and_quanto(s):
    s.configs |= SAMPLES["quanto"]().configs


@case(r"claimed by 2 dialects.*comfy.*torchao", "torchao mx")
def two_dialects_comfy_and_torchao(s):
    s.tensors["a.comfy_quant"] = label()


@case(r"claimed by 2 dialects.*quark.*modelopt|claimed by 2 dialects.*modelopt.*quark", "quark")
def two_dialects_quark_and_modelopt(s):
    s.configs |= SAMPLES["modelopt"]().configs


@case(r"quant_algo FP8.*NVFP4|NVFP4.*FP8", "modelopt")
def two_algorithms(s):
    s.configs |= quantization(quant_method="modelopt", quant_algo="NVFP4")


@case(r"quant_algo 'INT4_AWQ'", "modelopt", "modelopt nvfp4", "modelopt mxfp8")
def unknown_algorithm(s):
    s.configs["hf_quant_config.json"]["quantization"]["quant_algo"] = "INT4_AWQ"


@case(r"\ba\b.*no quant_algo", "modelopt", "modelopt nvfp4")
def layer_missing_from_a_mixed_list(s):
    inner = s.configs["hf_quant_config.json"]["quantization"]
    inner |= {"quantized_layers": {"b": {"quant_algo": inner["quant_algo"]}}, "quant_algo": "MIXED_PRECISION"}


@case(r"\ba\b.*pre_quant_scale", "modelopt", "modelopt nvfp4", "comfy")
def smoothing_that_must_be_executed(s):
    s.tensors["a.pre_quant_scale"] = torch.full((K,), 2.0)


@case(r"block_structure|weights.*16", "ct block")
def block_of_text(s):
    config(s)["config_groups"]["group_0"]["weights"]["block_structure"] = "axb"


@case(r"\ba\b.*\[2, 4\]", "ct block", "fp8", "anyfp8 block")
def block_of_another_size(s):
    """Blocks of 32 need a quarter of the scales that are there."""
    if "anyfp8.json" in s.configs:
        s.configs["anyfp8.json"]["layer_config"]["a"]["tile"] = [32, 32]
    elif "weight_block_size" in config(s):
        config(s)["weight_block_size"] = [32, 32]
    else:
        config(s)["config_groups"]["group_0"]["weights"]["block_structure"] = [32, 32]


@case(r"weight_block_size", "fp8")
def block_size_of_zero(s):
    config(s)["weight_block_size"] = [0, 16]


@case(r"repetition|regex|malformed", "ct", "ct block")
def target_that_is_no_regex(s):
    config(s)["config_groups"]["group_0"]["targets"] = ["re:("]


@case(r"malformed", "ct")
def target_with_a_huge_repetition(s):
    config(s)["config_groups"]["group_0"]["targets"] = ["re:x{99999999999999}"]


@case(r"malformed", "ct")
def target_nested_too_deep(s):
    config(s)["config_groups"]["group_0"]["targets"] = ["re:" + "(" * 20_000]


@case(None, "fp8")
def kept_entry_with_a_huge_repetition(s):
    """Lists only explain."""
    config(s)["modules_to_not_convert"] = ["x{99999999999999}"]


@case(r"group_0.*(int|type)", "ct", "ct block", "ct mxfp4", "ct nvfp4")
def group_of_integers(s):
    config(s)["config_groups"]["group_0"]["weights"]["type"] = "int"


@case(r"\ba\b.*(dtype|int8)", "quark")
def spec_of_integers(s):
    config(s)["global_quant_config"]["weight"] = {"dtype": "int8", "qscheme": "per_tensor"}


@case(r"e5m2", "auto-round", "fp8")
def codes_that_auto_round_clipped(s):
    config(s)["data_type"] = "fp8_e5m2"


@case(r"bits|'16'|malformed", "auto-round", "auto-round mxfp8", "auto-round mxfp4")
def bits_of_text_for_a_float_layer(s):
    config(s)["extra_config"] = {"head": {"bits": "16"}}


@case(r"rotation_config", "auto-round", "auto-round mxfp4")
def rotation(s):
    config(s)["rotation_config"] = {"mode": "hadamard"}


@case(r"transform_config", "ct", "ct nvfp4")
def transform(s):
    config(s)["transform_config"] = {"config_groups": {"R1": {}}}


@case(r"use_qdq|Gaudi", "inc")
def gaudi_scales(s):
    for m in ("a", "b"):
        s.tensors[f"{m}.scale_weight"] = s.tensors.pop(f"{m}.dequant_weights.scale")


@case(r"\ba\.weight_scale\b.*missing|fp8|FP8 tensors", "bfl", "bfl nvfp4")
def flux_blocks_under_another_name(s):
    """BFL's files are known by the names of Flux's blocks alone."""
    s.tensors = {name.replace("double_blocks", "stages"): t for name, t in s.tensors.items()}


@case(r"quanto tensors, but no quantization map", "quanto", "quanto weight-only")
def map_lost(s):
    s.configs.clear()


# --- shards and index ---
@case(None, *(n for n in SAMPLES if SAMPLES[n]().metadata is None))
def scale_in_another_shard(s):
    """Every other tensor by name lies in the second file: codes and scales are apart."""
    s.shards = 2
    names = sorted(s.tensors)
    _, reading = first(s)
    if reading.scale and names.index(reading.codes) % 2 == names.index(reading.scale) % 2:
        s.shards = 3 if (names.index(reading.codes) - names.index(reading.scale)) % 3 else 5


@case(r"{m}", *(n for n in SCALED if SAMPLES[n]().metadata is None and n not in COMFY))
def scale_that_the_index_forgets(s):
    s.shards = 2
    s.change_index(lambda index: index["weight_map"].pop(first(s)[1].scale) and None)


def _index_entry(name, match, entry):
    @case(match, "ct", "auto-round mxfp4", "fp8")
    def spoil(s):
        s.shards = 2
        s.change_index(lambda index: index["weight_map"].update({"head.weight": entry}))

    for key in [key for key in CASES if CASES[key][1] is spoil]:
        CASES[key.replace("spoil", f"index_entry_{name}")] = CASES.pop(key)


_index_entry("traversal", r"head\.weight.*outside", "../secret.safetensors")
_index_entry("windows_traversal", r"head\.weight.*outside", "..\\secret.safetensors")
_index_entry("inner_traversal", r"head\.weight.*outside", "x/../../secret.safetensors")
_index_entry("absolute", r"head\.weight.*outside", "/etc/passwd")
_index_entry("drive", r"head\.weight.*outside", "C:\\secret.safetensors")
_index_entry("with_a_zero_byte", r"head\.weight.*outside", "model\x00.safetensors")
_index_entry("empty", r"head\.weight.*outside", "")
_index_entry("folder", r"head\.weight", ".")
_index_entry("missing", r"head\.weight.*does not exist", "gone.safetensors")
_index_entry("too_long", r"head\.weight", "x" * 300)
_index_entry("surrogate", r"head\.weight", "\ud800")
_index_entry("that_is_no_weights_file", r"config\.json", "config.json")


@case(r"head\.weight.*outside", "ct")
def index_entry_through_a_link(s):
    s.shards = 2
    s.spoil_files.append(lambda folder: (folder / "link").symlink_to(folder.parent))
    s.spoil_files.append(lambda folder: (folder.parent / "secret.safetensors").write_bytes(safetensors_bytes({})))
    s.change_index(lambda index: index["weight_map"].update({"head.weight": "link/secret.safetensors"}))


@case(r"head\.weight", "ct")
def index_entry_through_a_loop(s):
    s.shards = 2
    s.spoil_files.append(lambda folder: os.symlink("loop", folder / "loop"))
    s.change_index(lambda index: index["weight_map"].update({"head.weight": "loop/x.safetensors"}))


@case(r"model\.safetensors", "ct")
def weights_that_are_a_folder(s):
    def spoil(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()

    s.spoil_files.append(spoil)


@case(r"model\.safetensors", "ct")
def weights_that_are_a_pipe(s):
    """Opening it would wait for ever."""

    def spoil(folder):
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")

    s.spoil_files.append(spoil)


# --- headers ---
def _header(name, match, change, *samples):
    @case(match, *(samples or ("ct", "modelopt nvfp4")))
    def spoil(s):
        s.change_header(change)

    for key in [key for key in CASES if CASES[key][1] is spoil]:
        CASES[key.replace("spoil", f"header_{name}")] = CASES.pop(key)


def _entry(**fields):
    return lambda header: header["a.weight_scale"].update(fields)


def _shifted(by):
    def change(header):
        begin, end = header["a.weight_scale"]["data_offsets"]
        header["a.weight_scale"]["data_offsets"] = [begin + by, end + by]

    return change


_header("dtype_unknown", r"a\.weight_scale.*unknown dtype 'F7'", _entry(dtype="F7"))
_header("dtype_a_list", r"a\.weight_scale.*unknown dtype", _entry(dtype=["F32"]))
_header("dtype_of_another_size", r"a\.weight_scale.*bytes", _entry(dtype="F64"))
_header("dtype_in_small_letters", r"a\.weight_scale.*unknown dtype", _entry(dtype="f32"))
_header("shape_negative", r"a\.weight_scale.*shape", _entry(shape=[-32, -1]))
_header("shape_huge", r"a\.weight_scale.*(bytes|larger)", _entry(shape=[2**62, 2**62]))
_header("shape_beyond_64_bits", r"a\.weight_scale.*shape", _entry(shape=[2**70]))
_header("shape_of_fractions", r"a\.weight_scale.*shape", _entry(shape=[32.0, 1.0]))
_header("shape_of_booleans", r"a\.weight_scale.*shape", _entry(shape=[True, 32]))
_header("shape_null", r"a\.weight_scale.*shape", _entry(shape=None))
_header("offsets_negative", r"a\.weight_scale.*data_offsets", _entry(data_offsets=[-128, 0]))
_header("offsets_reversed", r"a\.weight_scale.*span -", lambda h: h["a.weight_scale"]["data_offsets"].reverse())
_header("offsets_huge", r"a\.weight_scale|b\.bias leaves|unused", _entry(data_offsets=[2**62, 2**62 + 128]))
_header("offsets_of_one", r"a\.weight_scale.*data_offsets", _entry(data_offsets=[0]))
_header("overlap", r"overlaps|unused", _shifted(-1))
_header("hole", r"overlaps|unused", _shifted(1))
_header("further_key", r"a\.weight_scale.*exactly", _entry(stride=[1, 1]))
_header("entry_null", r"a\.weight_scale.*exactly", lambda h: h.update({"a.weight_scale": None}))
_header("metadata_of_numbers", r"__metadata__", lambda h: h.update(__metadata__={"format": 1}))
_header("list", r"not a JSON object", lambda h: [h])
_header("deep", r"not valid JSON", lambda h: b'{"a":' * 200_000)
_header("deep_metadata", r"not valid JSON", lambda h: b'{"__metadata__":' + b"[" * 200_000)
_header("not_utf8", r"not valid JSON", lambda h: b'{"\xff": 1}')
_header("long_number", r"not valid JSON", lambda h: b'{"x": ' + b"9" * 5000 + b"}")
_header("empty", r"not valid JSON", lambda h: b"")
_header("duplicate_name", r"'a' twice", lambda h: b'{"a": 1, "a": 2}')
_header("name_of_5000_digits", r"99999", lambda h: h.update({"x." + "9" * 5000: _nothing(h)}))
_header("expert_of_5000_digits", r"experts", lambda h: h.update({f"experts.{'9' * 5000}.up_proj.weight": _nothing(h)}))
_header("name_of_20000_dots", r"x\.x\.", lambda h: h.update({"x." * 20_000 + "y": _nothing(h)}))
_header("a_hundred_axes", r"a\.weight", lambda h: h["a.weight"].update(shape=[1] * 100 + h["a.weight"]["shape"]))
_header(
    "nothing_of_a_huge_shape",
    r"x\.weight",
    lambda h: h.update({"x.weight": _nothing(h, "F8_E4M3", [0, 2**62, 2**62]), "x.weight_scale": _nothing(h)}),
)
_header("surrogate_name", r"in the checkpoint, but not in the model", lambda h: h.update({"\ud800": _nothing(h)}))


def _nothing(header, dtype="F32", shape=(0,)):
    """A tensor without bytes, at the end."""
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end]}


def _file(name, match, change):
    @case(match, "ct", "auto-round mxfp4", "comfy", "bare")
    def spoil(s):
        def rewrite(folder):
            path = folder / "model.safetensors"
            path.write_bytes(change(path.read_bytes()))

        s.spoil_files.append(rewrite)

    for key in [key for key in CASES if CASES[key][1] is spoil]:
        CASES[key.replace("spoil", f"file_{name}")] = CASES.pop(key)


_file("with_a_length_of_2_64", r"says its header has 18446744073709551615", lambda raw: b"\xff" * 8 + raw[8:])
_file("with_a_length_of_0", r"not valid JSON", lambda raw: bytes(8) + raw[8:])
_file("cut_in_its_header", r"truncated", lambda raw: raw[:40])
_file("cut_in_its_data", r"truncated", lambda raw: raw[:-1])
_file("of_7_bytes", r"truncated: 7 bytes", lambda raw: raw[:7])
_file("with_a_byte_more", r"1 bytes of trailing garbage", lambda raw: raw + b"\0")
_file("that_is_a_pickle", r"not a safetensors file", lambda raw: b"\x80\x02}q\x00." * 10)


# --- the tests ---
@pytest.mark.parametrize("name", SAMPLES)
def test_unspoiled_it_loads_right(tmp_path, name):
    s = SAMPLES[name]()
    layers, plain = expected(s.write(tmp_path), s)
    model = anyfp8.load(s.model(), tmp_path, **s.options)
    assert_right(model, layers, plain)
    for module, reading in s.readings.items():
        layer = model.get_submodule(module)
        assert type(layer) is anyfp8.FP8Linear
        assert (layer.input_scale is not None) == (reading.input is not None)
    assert torch.isfinite(model(X)).all()


RIGHT = {}


def unspoiled(name, folder):
    """What the sample means as it is; written and read once."""
    if name not in RIGHT:
        s = SAMPLES[name]()
        RIGHT[name] = expected(s.write(folder), s)
    layers, plain = RIGHT[name]
    return dict(layers), dict(plain)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(30)
def test_hostile(tmp_path, name):
    sample, spoil, match = CASES[name]
    s = SAMPLES[sample]()
    layers, plain = unspoiled(sample, tmp_path / "right")
    changed = spoil(s)
    names = {"{m}": first(s)[0].replace(".", r"\."), "{n}": second(s)[0].replace(".", r"\.")}
    folder = s.write(tmp_path / "wrong")
    model = s.model()
    if match is None:
        model = anyfp8.load(model, folder, **s.options)
        layers |= {m: (weight, layers[m][1]) for m, weight in (changed or {}).items()}
        assert_right(model, layers, plain)
        return
    before = Snapshot(model, X)
    for key, value in names.items():
        match = match.replace(key, value)
    with pytest.raises(anyfp8.AnyFP8Error, match=f"(?s){match}") as caught:
        anyfp8.load(model, folder, **s.options)
    before.assert_unchanged()
    assert len(str(caught.value)) < 50_000


def test_every_dialect_is_there():
    from anyfp8 import dialects

    assert len(CASES) >= 40
    seen = {}
    for sample, spoil, _ in CASES.values():
        seen.setdefault(sample, set()).add(spoil)
    assert set(seen) == set(SAMPLES)
    words = {"ct": "compressed-tensors", "fp8": "transformers-fp8", "inc": "neural-compressor"}
    assert {words.get(name.split()[0], name.split()[0]) for name in SAMPLES} == set(dialects.names())


@pytest.mark.parametrize("place", ["real", "meta"])
def test_packed_codes_without_a_config_are_not_skipped(tmp_path, place):
    """Lenient loads may leave out what is not in the model, but not a weight whose codes are there."""
    s = SAMPLES["ct mxfp4"]()
    s.configs.clear()
    s.write(tmp_path)
    model = on_meta(Block) if place == "meta" else s.model()
    before = Snapshot(model)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"a\.weight"):
        anyfp8.load(model, tmp_path, strict=False)
    before.assert_unchanged()


@pytest.mark.parametrize("flip", ["codes", "scale", "input", "plain", "transposed"])
def test_the_comparison_sees_any_change(tmp_path, flip):
    s = SAMPLES["ct static"]()
    layers, plain = expected(s.write(tmp_path), s)
    model = anyfp8.load(s.model(), tmp_path)
    if flip == "codes":
        model.a.weight_codes[3, 3] ^= 1
    elif flip == "scale":
        model.a.weight_scale *= 1.001
    elif flip == "input":
        model.a.input_scale *= 2
    elif flip == "plain":
        model.head.bias.data[0] += 1
    else:
        layers["a"] = (layers["a"][0].T, layers["a"][1])
    with pytest.raises(AssertionError, match=r"^(a|head\.bias): "):
        assert_right(model, layers, plain)


def test_the_index_helper_really_changes_the_file(tmp_path):
    s = SAMPLES["ct"]()
    s.shards = 2
    s.change_index(lambda index: index["weight_map"].clear())
    index = json.loads((s.write(tmp_path) / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {}
    change_json(tmp_path / "model.safetensors.index.json", lambda index: [1])
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == [1]
