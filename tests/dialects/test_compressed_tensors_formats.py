"""compressed-tensors: the formats besides plain symmetric FP8, and what each needs in the file."""

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import anyfp8
from anyfp8 import FP8Embedding, FP8Linear
from anyfp8.dialects.compressed_tensors import _PRESETS
from anyfp8.scheme import QuantizationScheme
from tests.checkpoints import (
    CT_CHANNEL,
    CT_TENSOR,
    CT_TOKEN,
    F8,
    FP8_ARGS,
    Doubling,
    Draft,
    compressed,
    draft,
    encode,
    group,
    seeded,
    stale,
)
from tests.helpers import assert_close, oracle_round, randn
from tests.narrow import E4M3, FP4, FP6, draw, exponents, linear, mx_input, nv_input, spread

N, K = 8, 64
X = randn(3, 5, K, seed=4) * 3
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MX8, MX6, MX4 = (MX | {"num_bits": bits} for bits in (8, 6, 4))
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NV_IN = NV | {"dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}
ASYMMETRIC = FP8_ARGS | {"symmetric": False}


def single(kind=nn.Linear, *args):
    return seeded(lambda: nn.ModuleDict({"a": kind(*(args or (K, N)))}))


def named(*names):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(K, N) for name in names}))


def mx_tensors(format, seed=0):
    """Tensors of one MX layer, and its weight in float64."""
    codes, values = draw(format, N, K, seed)
    stored, scale = exponents(N, K // 32, seed + 1)
    tensors = {"a.weight" if format == E4M3 else "a.weight_packed": codes, "a.weight_scale": stored}
    return tensors | {"a.bias": randn(N, seed=9)}, values * spread(scale, 32, K)


def nv_tensors(outer=1234.5):
    """Tensors of one NVFP4 layer, and its weight in float64."""
    codes, values = draw(FP4, N, K)
    inner, scale = draw(E4M3, N, K // 16, seed=2)
    inner, scale = (inner.view(torch.uint8) & 0x7F).view(F8), scale.abs()
    tensors = {"a.weight_packed": codes, "a.weight_scale": inner, "a.weight_global_scale": torch.tensor([outer])}
    return tensors | {"a.bias": randn(N, seed=9)}, values * spread(scale, 16, K) / outer


def load(folder, tensors, groups, model=None, **config):
    written = Draft(tensors, {})
    return anyfp8.load(stale(model or single()), compressed(folder, written, groups, **config))


def refused(folder, tensors, groups, match, model=None):
    with pytest.raises(anyfp8.LoadError, match=f"(?s){match}"):
        load(folder, tensors, groups, model)


# --- MX ---
@pytest.mark.parametrize(("format", "args"), [(E4M3, MX8), (FP6, MX6), (FP4, MX4)])
def test_mx_weights(tmp_path, format, args):
    tensors, weight = mx_tensors(format)
    layer = load(tmp_path, tensors, [group(["Linear"], args)])["a"]
    assert type(layer) is FP8Linear
    assert (layer.scheme.weight_dtype, layer.scheme.scale_dtype) == (format, "float8_e8m0fnu")
    assert layer.scheme.weight_only
    assert_close(layer.weight, weight, 0)
    assert_close(layer(X).detach(), linear(X, weight, tensors["a.bias"]), 1e-6)


@pytest.mark.parametrize(("format", "args"), [(E4M3, MX8), (FP6, MX6), (FP4, MX4)])
def test_mx_inputs_count_the_end_of_a_binade_as_the_next(tmp_path, format, args):
    tensors, weight = mx_tensors(E4M3)
    layer = load(tmp_path, tensors, [group(["Linear"], MX8, args | {"dynamic": True})])["a"]
    assert (layer.scheme.act_dtype, layer.scheme.act_scale) == (format, "e8m0_even")
    x = X.clone()
    x[0, 0, 0], x[0, 1, 0] = 14.5, 15.75  # in units of 8: 1.8125 and 1.96875; beyond 1.75 (FP6: 1.9375) or not
    assert not torch.equal(mx_input(x, format, "even"), mx_input(x, format, "floor"))
    assert_close(layer(x).detach(), linear(mx_input(x, format, "even"), weight, tensors["a.bias"]), 1e-6)


def test_mx_weights_with_float_inputs(tmp_path):
    """MXFP4XFP8: the input's scales are floats over 128 columns."""
    tensors, weight = mx_tensors(FP4)
    inputs = FP8_ARGS | {"strategy": "group", "group_size": 128, "dynamic": True}
    layer = load(tmp_path, tensors, [group(["Linear"], MX4, inputs)])["a"]
    scale = X.abs().amax(-1, keepdim=True) / 448  # K is less than a group
    x = oracle_round(X / scale, E4M3) * scale.double()
    assert_close(layer(X).detach(), linear(x, weight, tensors["a.bias"]), 1e-6)


@pytest.mark.parametrize("change", [{"scale_dtype": None}, {"scale_dtype": "torch.float8_e8m0fnu"}, {"strategy": None}])
def test_mxfp4_as_others_spell_it(tmp_path, change):
    """Early files leave scale_dtype out: 4 bits over 32 columns have no other reading."""
    tensors, weight = mx_tensors(FP4)
    layer = load(tmp_path, tensors, [group(["Linear"], MX4 | change)])["a"]
    assert_close(layer.weight, weight, 0)


def test_scales_stored_in_their_own_dtype(tmp_path):
    tensors, weight = mx_tensors(FP4)
    tensors["a.weight_scale"] = tensors["a.weight_scale"].view(torch.float8_e8m0fnu)
    assert_close(load(tmp_path, tensors, [group(["Linear"], MX4)])["a"].weight, weight, 0)


def test_eight_bits_over_32_columns_with_float_scales_are_no_mx(tmp_path):
    codes, values = draw(E4M3, N, K)
    scale = torch.rand(N, 2) + 0.5
    args = FP8_ARGS | {"strategy": "group", "group_size": 32}
    layer = load(tmp_path, {"a.weight": codes, "a.weight_scale": scale, "a.bias": randn(N)}, [group(["Linear"], args)])
    assert_close(layer["a"].weight, values * spread(scale.double(), 32, K), 1e-7)


def test_an_exponent_of_255_is_refused(tmp_path):
    tensors, _ = mx_tensors(FP4)
    tensors["a.weight_scale"][0, 0] = 255
    refused(tmp_path, tensors, [group(["Linear"], MX4)], r"a\.weight_scale.*NaN")


# --- NVFP4 ---
@pytest.mark.parametrize("change", [{}, {"strategy": "group"}, {"scale_dtype": "torch.float8_e4m3fn"}], ids=str)
def test_nvfp4_weights_are_divided_by_the_global_scale(tmp_path, change):
    tensors, weight = nv_tensors()
    layer = load(tmp_path, tensors, [group(["Linear"], NV | change)])["a"]
    assert layer.scheme == QuantizationScheme(FP4, (1, 16), E4M3)
    assert_close(layer.weight, weight, 1e-6)
    assert_close(layer(X).detach(), linear(X, weight, tensors["a.bias"]), 1e-6)


def test_nvfp4_inputs(tmp_path):
    tensors, weight = nv_tensors()
    tensors["a.input_global_scale"] = torch.tensor([2.0**7])
    layer = load(tmp_path, tensors, [group(["Linear"], NV, NV_IN)])["a"]
    assert layer.scheme.act_scale == "e4m3"
    assert_close(layer.input_scale, torch.tensor([2.0**-7]), 0)
    x = X.clone()
    x[0, 0, :16] = 1e-9  # its scale underflows to 0
    x[0, 0, 16:32] *= 1e4  # ... and this one saturates
    assert_close(layer(x).detach(), linear(nv_input(x, 2.0**7), weight, tensors["a.bias"]), 1e-6)


@pytest.mark.parametrize("name", ["weight_scale", "weight_global_scale", "input_global_scale"])
def test_each_of_nvfp4s_scales_is_needed(tmp_path, name):
    tensors, _ = nv_tensors()
    tensors["a.input_global_scale"] = torch.ones(1)
    del tensors[f"a.{name}"]
    refused(tmp_path, tensors, [group(["Linear"], NV, NV_IN)], rf"1 problem.*missing from the checkpoint:\s+a\.{name}")


def test_an_input_scale_is_no_input_global_scale(tmp_path):
    """It would multiply where the other divides."""
    tensors, _ = nv_tensors()
    tensors["a.input_scale"] = torch.ones(1)
    refused(tmp_path, tensors, [group(["Linear"], NV)], r"a\.input_scale")


@pytest.mark.parametrize("name", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_unusable_global_scales(tmp_path, name, value):
    tensors, _ = nv_tensors()
    tensors |= {"a.input_global_scale": torch.ones(1), f"a.{name}": torch.tensor([value])}
    refused(tmp_path, tensors, [group(["Linear"], NV, NV_IN)], "unusable values")


def test_scales_of_another_layers_float_weight(tmp_path):
    """Junk beside a float weight, FP8 block scales and global ones too; the same beside nothing is an error."""
    model = named("a", "b")
    tensors, weight = nv_tensors()
    tensors |= {"b.weight": model["b"].weight.detach(), "b.bias": model["b"].bias.detach()}
    junk = {"weight_scale": tensors["a.weight_scale"], "weight_global_scale": torch.ones(1)}
    junk |= {"input_global_scale": torch.ones(1)}
    folder = compressed(
        tmp_path, Draft(tensors | {f"b.{k}": v.clone() for k, v in junk.items()}, {}), [group(["a"], NV)]
    )
    loaded = anyfp8.load(stale(model), folder)
    assert_close(loaded["a"].weight, weight, 1e-6)
    assert_close(loaded["b"].weight, model["b"].weight, 0)
    assert set(anyfp8.report(loaded).skipped) == {f"b.{name}" for name in junk}
    lost = tensors | {"c.weight_scale": junk["weight_scale"]}
    refused(tmp_path / "lost", lost, [group(["a"], NV)], r"c\.weight_scale", named("a", "b"))


# --- asymmetric ---
TILES = {
    "tensor": ({}, (1, 1), lambda g: g.expand(N, K)),
    "channel": ({"strategy": "channel"}, (N, 1), lambda g: g.expand(N, K)),
    "group": ({"strategy": "group", "group_size": 16}, (N, 4), lambda g: g.repeat_interleave(16, 1)),
    "block": (
        {"strategy": "block", "block_structure": [3, 40]},
        (3, 2),
        lambda g: g.repeat_interleave(3, 0)[:N].repeat_interleave(40, 1)[:, :K],
    ),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [F8, torch.bfloat16], ids=str)
def test_zero_points_are_subtracted_from_the_codes(tmp_path, tile, dtype):
    change, grid, expand = TILES[tile]
    codes, values = draw(E4M3, N, K)
    scale, zero = torch.rand(*grid) + 0.5, torch.randint(-20, 20, grid).to(dtype)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero, "a.bias": randn(N)}
    layer = load(tmp_path, tensors, [group(["Linear"], ASYMMETRIC | change)])["a"]
    weight = (values - expand(zero.double())) * expand(scale.double())
    assert_close(layer.weight, weight, 1e-6)
    assert_close(layer(X).detach(), linear(X, weight, tensors["a.bias"]), 1e-6)


@pytest.mark.parametrize("weights", [CT_CHANNEL, CT_CHANNEL | {"symmetric": False}], ids=["symmetric", "asymmetric"])
def test_zero_points_of_inputs(tmp_path, weights):
    """q = x / scale + zero point; the zero point is taken off again before the product."""
    model = single()
    codes, scale = encode(model["a"].weight, channel=True)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.bias": model["a"].bias.detach()}
    weight = codes.double() * scale[:, None]
    if not weights.get("symmetric", True):
        tensors["a.weight_zero_point"] = torch.randint(-9, 9, (N, 1)).to(F8)
        weight = weight - tensors["a.weight_zero_point"].double() * scale[:, None]
    tensors |= {"a.input_scale": torch.tensor([0.03]), "a.input_zero_point": torch.tensor([-13.0]).to(F8)}
    layer = load(tmp_path, tensors, [group(["Linear"], weights, ASYMMETRIC)])["a"]
    x = (oracle_round(X / tensors["a.input_scale"] - 13, E4M3) + 13) * tensors["a.input_scale"].double()
    assert_close(layer(X).detach(), linear(x, weight, tensors["a.bias"]), 1e-5)


def test_embeddings_with_zero_points(tmp_path):
    codes, values = draw(E4M3, 12, K)
    scale, zero = torch.rand(12, 1) + 0.5, torch.randint(-20, 20, (12, 1)).to(F8)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero}
    args = ASYMMETRIC | {"strategy": "channel"}
    layer = load(tmp_path, tensors, [group(["Embedding"], args)], single(nn.Embedding, 12, K))["a"]
    weight = (values - zero.double()) * scale.double()
    assert type(layer) is FP8Embedding
    index = torch.tensor([[3, 11]])
    assert_close(layer(index), weight[index], 1e-6)


@pytest.mark.parametrize("name", ["weight_zero_point", "input_zero_point"])
def test_zero_points_that_are_missing(tmp_path, name):
    written = draft(single(), ["a"])
    zeros = {f"a.{n}_zero_point": torch.ones(1).to(F8) for n in ("weight", "input")}
    tensors = written.tensors | zeros
    del tensors[f"a.{name}"]
    refused(tmp_path, tensors, [group(["Linear"], ASYMMETRIC, ASYMMETRIC)], rf"missing.*a\.{name}")


def test_an_asymmetric_dynamic_input_is_refused(tmp_path):
    written = draft(single(), ["a"])
    args = CT_TOKEN | {"symmetric": False}
    refused(tmp_path, written.tensors, [group(["Linear"], CT_TENSOR, args)], r"\ba\b.*only a static input.*zero point")


# --- outputs ---
def test_outputs_are_rounded(tmp_path):
    model = single()
    written = draft(model, ["a"])
    tensors = written.tensors | {"a.output_scale": torch.tensor([0.01])}
    groups = [group(["Linear"], CT_TENSOR, FP8_ARGS, output_activations=FP8_ARGS | {"dynamic": False})]
    layer = load(tmp_path / "a", tensors, groups)["a"]
    assert layer.scheme.out_dtype == E4M3
    plain = load(tmp_path / "b", written.tensors, [group(["Linear"], CT_TENSOR, FP8_ARGS)])["a"]
    want = oracle_round(plain(X).detach() / 0.01, E4M3) * 0.01
    assert_close(layer(X).detach(), want, 1e-6)
    refused(tmp_path / "c", written.tensors, groups, r"missing.*a\.output_scale")


def test_outputs_of_embeddings_are_rounded(tmp_path):
    written = draft(single(nn.Embedding, 12, K), ["a"])
    del written.tensors["a.input_scale"]
    tensors = written.tensors | {"a.output_scale": torch.tensor([0.3])}
    groups = [group(["Embedding"], CT_TENSOR, output_activations=FP8_ARGS)]
    layer = load(tmp_path, tensors, groups, single(nn.Embedding, 12, K))["a"]
    index = torch.tensor([3, 0, 11])
    assert_close(layer(index), oracle_round(written.weight("a")[index] / 0.3, E4M3) * 0.3, 1e-6)


def test_where_activations_can_not_be_quantized_the_report_says_so(tmp_path):
    model = seeded(lambda: nn.ModuleDict({"a": Doubling(K, N)}))
    tensors = draft(model, ["a"]).tensors | {"a.output_scale": torch.ones(1)}
    groups = [group(["Linear"], CT_TENSOR, FP8_ARGS, output_activations=FP8_ARGS)]
    notes = anyfp8.report(load(tmp_path, tensors, groups, model)).notes
    assert any("a: the input and the output are not quantized" in note for note in notes)


# --- groups ---
def test_groups_of_several_formats(tmp_path):
    """Linear layers in MXFP4, embeddings in FP8, one layer in MXFP8 by its exact name."""
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(K, N), "c": nn.Embedding(12, K)}))
    tensors, weight = mx_tensors(FP4)
    other, wide = mx_tensors(E4M3, seed=5)
    tensors |= {name.replace("a.", "b."): value for name, value in other.items()}
    table = draft(model, ["c"], {"act_dtype": None}, channel=True)
    tensors |= {name: value for name, value in table.tensors.items() if name.startswith("c.")}
    groups = [
        group(["Linear"], MX4, MX4 | {"dynamic": True}, format="mxfp4-pack-quantized"),
        group(["b"], MX8, MX8 | {"dynamic": True}, format="mxfp8-quantized"),
        group(["Embedding"], CT_CHANNEL, format="naive-quantized"),
    ]
    loaded = load(tmp_path, tensors, groups, model, format="mixed-precision")
    assert [layer.scheme.weight_dtype for layer in loaded.values()] == [FP4, E4M3, E4M3]
    assert_close(loaded["a"](X).detach(), linear(mx_input(X, FP4, "even"), weight, tensors["a.bias"]), 1e-6)
    assert_close(loaded["b"](X).detach(), linear(mx_input(X, E4M3, "even"), wide, tensors["b.bias"]), 1e-6)
    assert_close(loaded["c"].weight, table.weight("c"), 0)
    assert anyfp8.inspect(tmp_path).layer_config["a"].act_dtype == FP4


@pytest.mark.parametrize("swap", [False, True])
def test_class_names_count_by_the_alphabet_not_by_the_mro(tmp_path, swap):
    model = seeded(lambda: nn.ModuleDict({"a": NonDynamicallyQuantizableLinear(K, N), "b": nn.Linear(K, N)}))
    written = draft(model, ["a", "b"], {"act_dtype": None})
    groups = [group(["NonDynamicallyQuantizableLinear"], CT_TENSOR), group(["Linear"], CT_TENSOR, CT_TOKEN)]
    loaded = load(tmp_path, written.tensors, groups[::-1] if swap else groups, model)
    assert [layer.scheme.act_dynamic for layer in loaded.values()] == [True, True]


def test_before_a_model_is_known_a_layer_is_most_likely_linear(tmp_path):
    written = draft(single(), ["a"], {"act_dtype": None})
    groups = [group(["Embedding"], CT_TENSOR), group(["Linear"], CT_TENSOR, CT_TOKEN)]
    load(tmp_path, written.tensors, groups)
    assert anyfp8.inspect(tmp_path).layer_config["a"].act_dynamic


def test_a_group_that_can_not_be_read_does_not_matter_where_another_fits(tmp_path):
    """Embeddings in int8 beside linear layers in FP8: that these are no embeddings shows in their tensors."""
    written = draft(single(), ["a"], {"act_dtype": None})
    groups = [group(["Embedding"], {"num_bits": 8, "type": "int"}), group(["Linear"], CT_TENSOR)]
    assert_close(load(tmp_path, written.tensors, groups)["a"].weight, written.weight("a"), 0)


@pytest.mark.parametrize(("preset", "weight", "act"), [(n, w, a) for n, (w, a) in _PRESETS.items()], ids=list(_PRESETS))
def test_presets_as_group_names(tmp_path, preset, weight, act):
    scheme = QuantizationScheme.from_compressed_tensors({"weights": weight, "input_activations": act})
    if scheme.weight_dtype == E4M3 and scheme.scale_dtype == "float32":
        grid = {"tensor": (1,), "channel": (N, 1), "block": (1, 1)}[weight["strategy"]]
        tensors = {"a.weight": draw(E4M3, N, K)[0], "a.weight_scale": torch.rand(grid), "a.bias": randn(N)}
    else:
        tensors = nv_tensors()[0] if scheme.tile == (1, 16) else mx_tensors(scheme.weight_dtype)[0]
    if scheme.needs_input_scale:
        tensors["a.input_global_scale" if scheme.act_scale == "e4m3" else "a.input_scale"] = torch.ones(1)
    got = load(tmp_path, tensors, {preset.lower(): ["Linear"]})["a"].scheme
    assert got == scheme
    assert (got.act_dtype is None) == preset.endswith("A16")


# --- lists and tensors ---
def test_a_targeted_class_stored_in_float_is_reported(tmp_path):
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(K, N), "n": nn.LayerNorm(K)}))
    tensors = draft(model, ["a"], {"act_dtype": None}).tensors
    groups = [group(["Linear", "LayerNorm"], CT_TENSOR)]  # of norms compressed-tensors quantizes none
    assert anyfp8.report(load(tmp_path / "a", tensors, groups, model)).notes == (
        "targeted by the config, but stored in float: b (the tensors decide)",
    )
    for ignore in (["b"], ["re:b"], ["Linear"]):
        notes = anyfp8.report(load(tmp_path / ignore[0][:2], tensors, groups, model, ignore=ignore)).notes
        assert not any("stored in float" in note for note in notes)


@pytest.mark.parametrize("name", ["self_attn.k_zero_point", "self_attn.v_zero_point", "self_attn.k_global_scale"])
def test_more_tensors_of_a_kv_cache(tmp_path, name):
    written = draft(single(), ["a"], {"act_dtype": None})
    loaded = load(tmp_path, written.tensors | {name: torch.ones(1).to(F8)}, [group(["Linear"], CT_TENSOR)])
    assert "KV-cache" in anyfp8.report(loaded).skipped[name]


# --- refusals ---
@pytest.mark.parametrize(
    ("args", "match"),
    [
        (CT_TENSOR, r"a\.weight_packed.*float8_e4m3fn"),
        (MX8, r"a\.weight_packed.*float8_e4m3fn"),
        (MX6, r"a\.weight_scale.*needs \[8, 2\]|a\.weight_scale"),
        (NV, r"a\.weight_global_scale"),
        ({"num_bits": 4, "strategy": "group", "group_size": 32}, r"\ba: config group group_0: weights: type is 'int'"),
    ],
    ids=["FP8", "MXFP8", "MXFP6", "NVFP4", "INT4"],
)
def test_another_format_than_the_group_says(tmp_path, args, match):
    tensors, _ = mx_tensors(FP4)
    if args is MX6:  # 64 codes of 4 bits are 42 2/3 of 6 bits
        tensors["a.weight_packed"] = tensors["a.weight_packed"][:, :24].clone()
    refused(tmp_path, tensors, [group(["Linear"], args)], match)


def test_a_group_that_says_packed_where_the_codes_are_fp8(tmp_path):
    tensors, _ = mx_tensors(E4M3)
    refused(tmp_path, tensors, [group(["Linear"], MX4)], r"a\.weight .*packed float4_e2m1fn codes are U8")


@pytest.mark.parametrize("beside", [torch.zeros(N, K), torch.zeros(N, K).to(F8)], ids=["float", "fp8"])
def test_a_layer_that_is_stored_twice(tmp_path, beside):
    tensors, _ = mx_tensors(FP4)
    refused(tmp_path, tensors | {"a.weight": beside}, [group(["Linear"], MX4)], r"\ba: stored twice")


def test_integer_codes_are_refused_by_name(tmp_path):
    tensors = {"a.weight_packed": torch.zeros(N, K // 8, dtype=torch.int32), "a.weight_scale": torch.ones(N, 2)}
    tensors |= {"a.weight_shape": torch.tensor([N, K]), "a.bias": torch.zeros(N)}
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    refused(
        tmp_path, tensors, [group(["Linear"], args)], r"\ba: config group group_0: weights: type is 'int'; valid: float"
    )


def test_packed_codes_without_a_scale(tmp_path):
    tensors, _ = mx_tensors(FP4)
    del tensors["a.weight_scale"]
    refused(tmp_path, tensors, [group(["Linear"], MX4)], r"1 problem.*a\.weight_scale")


def test_packed_codes_that_nobody_targets(tmp_path):
    tensors, _ = mx_tensors(FP4)
    refused(tmp_path, tensors, [group(["re:b"], MX4)], r"\ba: a\.weight_packed.*no config group targets it")


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        (MX8, "dynamic is False; valid: True"),
        (MX8 | {"dynamic": True, "group_size": 64}, "scale_dtype is 'uint8'"),
        (CT_TOKEN | {"scale_dtype": "torch.uint8"}, "scale_dtype is 'uint8'"),
        (CT_TOKEN | {"scale_dtype": "torch.float8_e4m3fn"}, "scale_dtype is 'float8_e4m3fn'"),
        (NV | {"dynamic": True}, "dynamic is True; valid: local"),
        (NV, "dynamic is False; valid: local"),
        (NV_IN | {"num_bits": 8}, "strategy|scale_dtype"),
        (CT_TOKEN | {"num_bits": 4}, "num_bits is 4; valid: 8"),
        (MX4 | {"dynamic": True, "symmetric": False}, "symmetric is False; valid: True"),
    ],
    ids=str,
)
def test_inputs_that_are_refused(tmp_path, inputs, match):
    tensors, _ = mx_tensors(E4M3)
    refused(tmp_path, tensors, [group(["Linear"], MX8, inputs)], rf"\ba: config group.*input_activations: {match}")


@pytest.mark.parametrize("config", [{"ignore": [1]}, {"ignore": ["re:("]}, {"ignore": [["a"]]}], ids=str)
def test_lists_are_checked_even_where_nothing_is_quantized(tmp_path, config):
    tensors = draft(single(), []).tensors
    with pytest.raises(anyfp8.DialectError, match=r"ignore|malformed"):
        load(tmp_path, tensors, [group(["Linear"])], **config)
