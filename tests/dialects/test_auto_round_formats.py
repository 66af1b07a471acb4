"""auto-round: the formats besides static FP8, what the config says of each layer, and what each needs in the file."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Linear
from anyfp8.scheme import PRESETS
from tests.checkpoints import AR_STATIC, AR_WEIGHT_ONLY, F8, STATIC, Draft, auto_round, draft, seeded, stale
from tests.helpers import assert_close, oracle_round, randn
from tests.narrow import E4M3, FP4, draw, exponents, groups, linear, mx_input, nv_input, rounded, spread

N, K = 8, 64
X = randn(3, 5, K, seed=4) * 3
MX8 = {
    "bits": 8,
    "group_size": 32,
    "sym": True,
    "data_type": "mx_fp",
    "act_bits": 8,
    "act_group_size": 32,
    "act_sym": True,
    "act_data_type": "mx_fp",
    "act_dynamic": True,
    "packing_format": "auto_round:llm_compressor",
}
MX4 = MX8 | {"bits": 4, "act_bits": 4}
NV = MX4 | {"data_type": "nv_fp", "act_data_type": "nv_fp4_with_static_gs", "group_size": 16, "act_group_size": 16}
NV_E5M3 = NV | {"data_type": "nvfp4_v2", "act_data_type": "nvfp4_v2"}
BLOCK = AR_STATIC | {"group_size": [128, 128], "act_group_size": 128, "act_dynamic": True}


def named(*names, k=K, n=N):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n) for name in names}))


def mx_tensors(format, name="a", seed=0):
    """Tensors of one MX layer, and its weight in float64."""
    codes, values = draw(format, N, K, seed)
    stored, scale = exponents(N, K // 32, seed + 1)
    tensors = {f"{name}.weight" if format == E4M3 else f"{name}.weight_packed": codes, f"{name}.weight_scale": stored}
    return tensors | {f"{name}.bias": randn(N, seed=9).half()}, values * spread(scale, 32, K)


def nv_tensors():
    """Tensors of one NVFP4 layer, and its weight in float64."""
    codes, values = draw(FP4, N, K)
    inner, scale = draw(E4M3, N, K // 16, seed=2)
    tensors = {"a.weight_packed": codes, "a.weight_scale": (inner.view(torch.uint8) & 0x7F).view(F8)}
    tensors |= {"a.weight_global_scale": torch.tensor([99.5]), "a.input_global_scale": torch.tensor([2.0**7])}
    return tensors | {"a.bias": randn(N, seed=9)}, values * spread(scale.abs(), 16, K) / 99.5


def load(folder, tensors, config, model=None, **more):
    return anyfp8.load(stale(model or named("a")), auto_round(folder, Draft(tensors, {}), config, **more))


def refused(folder, tensors, config, match, **more):
    with pytest.raises(anyfp8.AnyFP8Error, match=f"(?s){match}"):
        load(folder, tensors, config, **more)


# --- MX ---
@pytest.mark.parametrize(("format", "config"), [(E4M3, MX8), (FP4, MX4)])
@pytest.mark.parametrize(("kind", "rounding"), [("mx_fp", "floor"), ("mx_fp_rceil", "ceil")])
def test_mx(tmp_path, format, config, kind, rounding):
    tensors, weight = mx_tensors(format)
    layer = load(tmp_path, tensors, config | {"act_data_type": kind})["a"]
    assert type(layer) is FP8Linear
    assert layer.scheme.act_scale == f"e8m0_{rounding}"
    assert_close(layer.weight, weight, 0)
    x = X.clone()
    x[0, 0, :32] /= x[0, 0, :32].abs().max()  # a power of two: both roundings agree, but for the element format's max
    want = linear(mx_input(x, format, rounding), weight, tensors["a.bias"])
    assert_close(layer(x).detach(), want, 1e-6)
    assert not torch.equal(mx_input(x, format, "floor"), mx_input(x, format, "ceil"))


@pytest.mark.parametrize("key", ["act_dynamic", "act_group_size", "act_data_type", "act_sym", "packing_format"])
def test_keys_that_mx_files_may_leave_out(tmp_path, key):
    """Unlike plain FP8's, inputs in MX can't be static: what is left out copies the weight's."""
    tensors, _ = mx_tensors(FP4)
    config = {k: v for k, v in MX4.items() if k != key}
    assert load(tmp_path, tensors, config)["a"].scheme == PRESETS["MXFP4"]


@pytest.mark.parametrize("act", [{"act_bits": 16}, {"act_bits": None}], ids=str)
def test_mx_weights_alone(tmp_path, act):
    tensors, weight = mx_tensors(FP4)
    layer = load(tmp_path, tensors, MX4 | act)["a"]
    assert layer.scheme == PRESETS["MXFP4A16"]
    assert_close(layer(X).detach(), linear(X, weight, tensors["a.bias"]), 1e-6)


def test_half_precision_biases_are_taken_as_they_are(tmp_path):
    tensors, _ = mx_tensors(E4M3)
    loaded = load(tmp_path, tensors, MX8)
    assert loaded["a"].bias.dtype == torch.float32
    assert_close(loaded["a"].bias, tensors["a.bias"].float(), 0)


# --- NVFP4 ---
def test_nvfp4(tmp_path):
    tensors, weight = nv_tensors()
    layer = load(tmp_path, tensors, NV)["a"]
    assert layer.scheme == PRESETS["NVFP4"]
    assert_close(layer.weight, weight, 1e-6)
    assert_close(layer(X).detach(), linear(nv_input(X, 2.0**7), weight, tensors["a.bias"]), 1e-6)


@pytest.mark.parametrize("name", ["weight_scale", "weight_global_scale", "input_global_scale"])
def test_each_of_nvfp4s_scales_is_needed(tmp_path, name):
    tensors, _ = nv_tensors()
    del tensors[f"a.{name}"]
    refused(tmp_path, tensors, NV, rf"1 problem.*missing from the checkpoint:\s+a\.{name}")


def e5m3(codes):
    """float64 values of bytes: 5 exponent bits (bias 15), 3 mantissa bits, no sign."""
    exponent, mantissa = codes.long() >> 3, (codes.long() & 7).double() / 8
    return torch.where(exponent > 0, (1 + mantissa) * torch.exp2(exponent.double() - 15), mantissa * 2.0**-14)


def test_nvfp4_with_e5m3_scales(tmp_path):
    codes, values = draw(FP4, N, K)
    stored = torch.randint(1, 255, (N, K // 16), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    tensors = {"a.weight_packed": codes, "a.weight_scale": stored, "a.bias": randn(N)}
    layer = load(tmp_path, tensors, NV_E5M3)["a"]
    weight = values * spread(e5m3(stored), 16, K)
    assert_close(layer.weight, weight, 0)
    every = e5m3(torch.arange(255))
    wanted = groups(X, 16).float() / 6
    index = torch.searchsorted(every, wanted.double()).clamp(1, 254)
    below, above = every[index - 1], every[index]
    scale = torch.where(wanted - below < above - wanted, below, above)  # no ties here
    x = rounded(X.double() / scale, FP4) * scale
    assert_close(layer(X).detach(), linear(x, weight, tensors["a.bias"]), 1e-6)
    tensors["a.weight_scale"][2, 1] = 255
    refused(tmp_path / "nan", tensors, NV_E5M3, r"a\.weight_scale.*NaN")
    tensors["a.weight_scale"][2, 1] = 0
    tensors["a.weight_global_scale"] = torch.ones(1)
    refused(tmp_path / "global", tensors, NV_E5M3, r"a\.weight_global_scale")


# --- blocks and groups ---
@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("packing", ["auto_round:fp8", None])
def test_blocks_with_ragged_edges(tmp_path, leaf, packing):
    """An "inv" that is only a name: it multiplies."""
    model = named("a", k=200, n=136)
    codes, values = draw(E4M3, 136, 200)
    scale = (torch.rand(2, 2) + 0.5).bfloat16()
    tensors = {"a.weight": codes, f"a.{leaf}": scale, "a.bias": model["a"].bias.detach()}
    layer = load(tmp_path, tensors, BLOCK, model, packing_format=packing, weight_block_size=[128, 128])["a"]
    assert (layer.scheme.tile, layer.scheme.act_tile) == ((128, 128), (1, 128))
    weight = values * scale.double().repeat_interleave(128, 0)[:136].repeat_interleave(128, 1)[:, :200]
    assert_close(layer.weight, weight, 0)
    x = randn(4, 200)
    amax = groups(x, 128).float() / 448
    want = linear(oracle_round(x / amax, E4M3) * amax.double(), weight, tensors["a.bias"])
    assert_close(layer(x).detach(), want, 1e-5)


def test_blocks_with_both_names_are_refused(tmp_path):
    tensors = {"a.weight": draw(E4M3, N, K)[0], "a.bias": randn(N)}
    tensors |= {f"a.{leaf}": torch.ones(1, 1) for leaf in ("weight_scale", "weight_scale_inv")}
    refused(tmp_path, tensors, BLOCK, r"a\.weight_scale_inv.*no layer uses")


def test_groups_that_do_not_divide_the_columns(tmp_path):
    """Stored flat, row by row; the last group of a row is narrower."""
    codes, values = draw(E4M3, N, K)
    scale = torch.rand(N * 3) + 0.5
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor([0.02]), "a.bias": randn(N)}
    layer = load(tmp_path, tensors, AR_STATIC | {"group_size": 24})["a"]
    assert_close(layer.weight, values * spread(scale.double().reshape(N, 3), 24, K), 1e-7)


# --- which layer is what ---
EXTRA = {
    ".*mlp\\.down.*": {"bits": 8, "act_bits": 8},
    "mlp.down": {"bits": 8, "act_bits": 8},
    "q": {"bits": 16, "act_bits": 16},
    "lm_head": {k: v for k, v in MX8.items() if k != "packing_format"} | {"super_bits": None, "rotation_config": None},
}


@pytest.mark.parametrize("key", ["extra_config", "layer_config"])
def test_mixed_mx(tmp_path, key):
    """MXFP4 by default, MXFP8 by regex, one layer float, lm_head by its full name."""
    model = seeded(
        lambda: nn.ModuleDict(
            {
                "mlp": nn.ModuleDict({"up": nn.Linear(K, N), "down": nn.Linear(K, N)}),
                "q": nn.Linear(K, N),
                "lm_head": nn.Linear(K, N),
            }
        )
    )
    up, weight = mx_tensors(FP4, "mlp.up")
    down, wide = mx_tensors(E4M3, "mlp.down", seed=3)
    head, _ = mx_tensors(E4M3, "lm_head", seed=5)
    q = {"q.weight": model["q"].weight.detach(), "q.bias": model["q"].bias.detach()}
    loaded = load(tmp_path, up | down | head | q, MX4, model, **{key: EXTRA})
    assert loaded["mlp"]["up"].scheme == PRESETS["MXFP4"]
    assert loaded["mlp"]["down"].scheme == loaded["lm_head"].scheme == PRESETS["MXFP8"]
    assert_close(loaded["mlp"]["up"](X).detach(), linear(mx_input(X, FP4, "floor"), weight, up["mlp.up.bias"]), 1e-6)
    assert_close(loaded["mlp"]["down"].weight, wide, 0)
    assert_close(loaded["q"].weight, model["q"].weight, 0)
    assert anyfp8.report(loaded).notes == ()


def test_the_name_of_a_packed_layer_is_no_regex(tmp_path):
    tensors, _ = mx_tensors(FP4, "fc")
    other, _ = mx_tensors(E4M3, "fc2")
    loaded = load(tmp_path, tensors | other, MX8, named("fc", "fc2"), extra_config={"fc": {"bits": 4, "act_bits": 4}})
    assert [layer.scheme.weight_dtype for layer in loaded.values()] == [FP4, E4M3]


def test_listed_as_16_bits_but_stored_packed(tmp_path):
    tensors, weight = mx_tensors(FP4)
    loaded = load(tmp_path, tensors, MX4, extra_config={"a": {"bits": 16, "act_bits": 16}})
    assert loaded["a"].scheme == PRESETS["MXFP4"]
    assert_close(loaded["a"].weight, weight, 0)
    assert any("a (the tensors decide)" in note for note in anyfp8.report(loaded).notes)


def test_static_layers_beside_mx(tmp_path):
    """act_dynamic left out means static for plain FP8, whatever the default of the file is."""
    tensors, _ = mx_tensors(FP4)
    written = draft(named("b"), ["b"], STATIC, channel=True)
    extra = {"b": {k: v for k, v in AR_STATIC.items() if k != "act_dynamic"}}
    config = {k: v for k, v in MX4.items() if k != "act_dynamic"}
    loaded = load(tmp_path, tensors | written.tensors, config, named("a", "b"), extra_config=extra)
    assert loaded["a"].scheme == PRESETS["MXFP4"]
    assert loaded["b"].scheme == PRESETS["FP8_STATIC"]


@pytest.mark.parametrize(
    ("config", "floats"),
    [
        ({"block_name_to_quantize": "h"}, ["h.b"]),
        ({"block_name_to_quantize": "g, h"}, ["h.b"]),
        ({"block_name_to_quantize": [["g"], ["h"]]}, ["h.b"]),
        ({"block_name_to_quantize": "h", "ignored_layers": ["h.b"]}, []),
        ({"block_name_to_quantize": "h", "extra_config": {"h.b": {"bits": 16, "act_bits": 16}}}, []),
        ({"block_name_to_quantize": "h", "extra_config": {".*b": {"bits": 16, "act_bits": 16}}}, []),
        ({"block_name_to_quantize": "hh"}, []),
        ({"extra_config": {"head": {"bits": 8}}}, ["head"]),
        ({}, []),
    ],
    ids=str,
)
def test_layers_that_the_lists_mean_but_that_are_stored_in_float(tmp_path, config, floats):
    model = seeded(
        lambda: nn.ModuleDict(
            {
                "h": nn.ModuleDict({"a": nn.Linear(K, N), "b": nn.Linear(K, N), "n": nn.LayerNorm(K)}),
                "head": nn.Linear(K, N),
            }
        )
    )
    written = draft(model, ["h.a"], STATIC, channel=True)
    notes = anyfp8.report(load(tmp_path, written.tensors, AR_STATIC, model, **config)).notes
    assert notes == tuple(f"targeted by the config, but stored in float: {n} (the tensors decide)" for n in floats)


def test_conv1d_is_stored_out_by_in(tmp_path):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = seeded(lambda: nn.ModuleDict({"a": conv1d(N, K)}))
    tensors, weight = mx_tensors(E4M3)
    layer = load(tmp_path, tensors, MX8, model)["a"]
    assert tuple(layer.weight.shape) == (K, N)
    assert_close(layer.weight, weight.T, 0)
    assert_close(layer(X).detach(), linear(mx_input(X, E4M3, "floor"), weight, tensors["a.bias"]), 1e-6)


# --- refusals ---
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"group_size": 64}, r"\ba: group_size is 64; valid: 32"),
        ({"group_size": -1}, r"\ba: group_size is -1; valid: 32"),
        ({"act_group_size": 0}, r"\ba: act_group_size is 0; valid: 32"),
        ({"act_dynamic": False}, r"\ba: act_dynamic is False; valid: True"),
        ({"act_data_type": "mx_int"}, r"\ba: act_data_type is 'mx_int'; valid: fp, fp8, fp8_e4m3, mx_fp"),
        ({"data_type": "mx_int"}, r"\ba: data_type is 'mx_int'; valid: fp, fp8, fp8_e4m3, mx_fp"),
        ({"bits": 3}, r"\ba: bits is 3; valid: 8, 6, 4"),
        ({"bits": 8}, r"a\.weight_packed.*uint8.*float8_e4m3fn"),
        ({"sym": False}, r"\ba: sym is False; valid: True"),
        ({"extra_config": {"a": {"rotation_config": {"kind": "hadamard"}}}}, r"\ba: rotation_config"),
        ({"extra_config": {"a": {"super_bits": 6}}}, r"\ba: rotation_config, super_bits"),
        ({"extra_config": {"a": "MXFP8"}}, r"extra_config for 'a' is 'MXFP8'; valid: a mapping"),
        ({"layer_config": {"a": 8}}, r"extra_config for 'a' is 8; valid: a mapping"),
    ],
    ids=str,
)
def test_refused_configs(tmp_path, config, match):
    tensors, _ = mx_tensors(FP4)
    refused(tmp_path, tensors, MX4 | config, match)


def test_packed_codes_under_a_config_for_fp8(tmp_path):
    tensors, _ = mx_tensors(FP4)
    tensors["a.weight_scale"] = torch.ones(1)
    refused(tmp_path, tensors, AR_WEIGHT_ONLY, r"a\.weight_packed.*uint8.*float8_e4m3fn")


def test_fp8_codes_under_a_config_for_mxfp4(tmp_path):
    tensors, _ = mx_tensors(E4M3)
    refused(tmp_path, tensors, MX4, r"a\.weight .*packed float4_e2m1fn codes are U8")


def test_a_layer_that_is_stored_twice(tmp_path):
    tensors, _ = mx_tensors(FP4)
    refused(tmp_path, tensors | {"a.weight": torch.zeros(N, K)}, MX4, r"\ba: stored twice")


def test_integer_files_are_refused_as_such(tmp_path):
    tensors = {"a.qweight": torch.zeros(8, N, dtype=torch.int32), "a.scales": torch.ones(2, N), "a.bias": randn(N)}
    config = {"bits": 4, "data_type": "int", "group_size": 32, "packing_format": "auto_round:auto_gptq"}
    refused(tmp_path, tensors, config, r"integer codes \(a\.qweight")
