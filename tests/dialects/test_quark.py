"""AMD Quark's own mode: which config a layer gets, names of scales, inputs and outputs, leftovers of quantizers."""

import pytest
import torch
from torch import nn

import anyfp8
from tests.checkpoints import F8, encode, seeded, stale, write_json, write_tensors
from tests.helpers import assert_close, oracle_forward, randn

TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True, "ch_axis": None}
CHANNEL = TENSOR | {"qscheme": "per_channel", "ch_axis": 0}
TOKEN = TENSOR | {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
WEIGHT_ONLY = {"weight": TENSOR, "input_tensors": None, "output_tensors": None, "bias": None}
STATIC = WEIGHT_ONLY | {"input_tensors": TENSOR}
PTPC = WEIGHT_ONLY | {"weight": CHANNEL, "input_tensors": TOKEN}


def linears(*names, k=8, n=8):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name in names}))


def write(folder, tensors, scheme=STATIC, **config):
    """A checkpoint whose global config is `scheme`."""
    config = {"quant_method": "quark", "global_quant_config": scheme, "exclude": [], "layer_quant_config": {}} | config
    write_tensors(folder, tensors)
    write_json(folder / "config.json", {"quantization_config": config})
    return folder


def layer(name, channel=False, static=True, dtype=F8, seed=0):
    """A layer's tensors, and its weight's real values."""
    weight, scale = encode(randn(8, 8, seed=seed), channel, dtype)
    scale = scale if channel else scale.reshape(())
    tensors = {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    if static:
        tensors[f"{name}.input_scale"] = torch.tensor(0.02)
    return tensors, weight.double() * (scale.reshape(-1, 1) if channel else scale)


def check(loaded, weight, scheme):
    assert str(loaded.scheme) == scheme
    assert_close(loaded.weight, weight, 1e-6)
    x = randn(3, 8, seed=9)
    assert_close(loaded(x).detach(), oracle_forward(loaded, x), 1e-5)


# --- schemes ---
@pytest.mark.parametrize(
    ("scheme", "channel", "text"),
    [
        (STATIC, False, "e4m3fn per tensor, input static e4m3fn per tensor"),
        (STATIC | {"weight": CHANNEL}, True, "e4m3fn per channel, input static e4m3fn per tensor"),
        (WEIGHT_ONLY, False, "e4m3fn per tensor, weight-only"),
        (PTPC, True, "e4m3fn per channel, input dynamic e4m3fn per token"),
        (WEIGHT_ONLY | {"input_tensors": TENSOR | {"is_dynamic": True}}, False, None),
        (STATIC | {"weight": [TENSOR]}, False, "e4m3fn per tensor, input static e4m3fn per tensor"),
    ],
)
def test_schemes(tmp_path, scheme, channel, text):
    static = bool(scheme["input_tensors"]) and not scheme["input_tensors"]["is_dynamic"]
    tensors, weight = layer("a", channel, static)
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, scheme))
    check(loaded["a"], weight, text or "e4m3fn per tensor, input dynamic e4m3fn per tensor")


def test_e5m2_weights_and_inputs(tmp_path):
    e5m2 = TENSOR | {"dtype": "fp8_e5m2"}
    tensors, weight = layer("a", dtype=torch.float8_e5m2)
    folder = write(tmp_path, tensors, STATIC | {"weight": e5m2, "input_tensors": e5m2})
    check(anyfp8.load(stale(linears("a")), folder)["a"], weight, "e5m2 per tensor, input static e5m2 per tensor")


def test_groups_and_blocks(tmp_path):
    weight = randn(8, 8).to(F8)
    for name, spec, shape, tile in (
        ("group", {"qscheme": "per_group", "group_size": 4, "ch_axis": -1}, (8, 2), (1, 4)),
        ("block", {"qscheme": "per_block", "block_size": [4, 2]}, (2, 4), (4, 2)),
    ):
        scale = torch.rand(shape) + 0.1
        tensors = {"a.weight": weight, "a.weight_scale": scale}
        folder = write(tmp_path / name, tensors, WEIGHT_ONLY | {"weight": TENSOR | spec})
        want = weight.double() * scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
        assert_close(anyfp8.load(stale(linears("a")), folder)["a"].weight, want, 1e-6)


def test_per_token_is_reported_since_quarks_kernels_share_scales(tmp_path):
    tensors, _ = layer("a", channel=True, static=False)
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, PTPC))
    (note,) = anyfp8.report(loaded).notes
    assert note.startswith("dynamic inputs per token: a (each row has a scale of its own here")


def test_a_convolution_per_channel(tmp_path):
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 4, 3, bias=False)})
    weight, scale = encode(randn(4, 3, 3, 3), channel=True)
    tensors = {"conv.weight": weight, "conv.weight_scale": scale, "conv.input_scale": torch.tensor(0.02)}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, STATIC | {"weight": CHANNEL}))
    assert isinstance(loaded["conv"], anyfp8.FP8Conv2d)
    assert_close(loaded["conv"].weight, weight.double() * scale.reshape(-1, 1, 1, 1), 1e-6)


def test_rounded_outputs(tmp_path):
    tensors, weight = layer("a")
    tensors["a.output_scale"] = torch.tensor(0.05)
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, STATIC | {"output_tensors": TENSOR}))
    assert loaded["a"].scheme.out_dtype == "float8_e4m3fn"
    assert_close(loaded["a"].weight, weight, 1e-6)
    x = randn(3, 8, seed=2)
    want = (oracle_forward(loaded["a"], x).float() / 0.05).clamp(-448, 448).to(F8).float() * 0.05
    assert_close(loaded["a"](x).detach(), want, 1e-5)


# --- names ---
def test_diffusers_components_keep_quarks_own_names(tmp_path):
    plain, weight = layer("a")
    names = {"weight_scale": "weight_quantizer.scale", "input_scale": "input_quantizer.scale"}
    tensors = {name.replace(*pair): t for name, t in plain.items() for pair in names.items() if pair[0] in name}
    tensors |= {"a.weight": plain["a.weight"], "a.input_quantizer.zero_point": torch.zeros((), dtype=torch.int32)}
    folder = write(tmp_path, tensors)
    check(anyfp8.load(stale(linears("a")), folder)["a"], weight, "e4m3fn per tensor, input static e4m3fn per tensor")
    assert anyfp8.inspect(folder).exceptions == {"a.input_quantizer.zero_point": "a zero point of 0 changes nothing"}


def test_layers_that_were_only_fake_quantized(tmp_path):
    model = linears("a", "b")
    tensors, weight = layer("a")
    kept = randn(8, 8, seed=3)
    leftovers = {f"b._{kind}_quantizer.scale": torch.tensor(0.3) for kind in ("weight", "input")}
    leftovers["b._weight_quantizer.zero_point"] = torch.zeros((), dtype=torch.int32)
    folder = write(tmp_path, tensors | {"b.weight": kept} | leftovers)
    loaded = anyfp8.load(stale(model), folder)
    assert type(loaded["b"]) is nn.Linear
    assert_close(loaded["b"].weight, kept, 0)
    check(loaded["a"], weight, "e4m3fn per tensor, input static e4m3fn per tensor")
    manifest = anyfp8.inspect(folder)
    assert set(manifest.exceptions) == set(leftovers)
    assert all("its input is not quantized" in reason for reason in manifest.exceptions.values())
    assert "targeted by the config, but stored in float: b (the tensors decide)" in anyfp8.report(loaded).notes


def test_attention_and_kv_cache_scales_are_named_exceptions(tmp_path):
    """Although the config says that the projections' outputs are rounded."""
    tensors, weight = layer("k_proj")
    names = ("k_proj.output_scale", "q_proj.output_scale", "prob_output_scale", "k_scale")
    tensors |= dict.fromkeys(names, torch.tensor(0.1))
    scheme = STATIC | {"output_tensors": TENSOR}
    folder = write(tmp_path, tensors, layer_quant_config={"*k_proj": scheme}, kv_cache_quant_config={"*k_proj": scheme})
    loaded = anyfp8.load(stale(linears("k_proj")), folder)
    check(loaded["k_proj"], weight, "e4m3fn per tensor, input static e4m3fn per tensor")
    assert set(anyfp8.inspect(folder).exceptions) == set(names)
    assert "KV-cache and attention quantization are reported, not applied" in anyfp8.report(loaded).notes


# --- which config a layer gets ---
def test_the_first_pattern_that_matches(tmp_path):
    model = linears("up_proj", "down_proj", "gate_proj")
    tensors = layer("up_proj", channel=True, static=False)[0]
    tensors |= layer("down_proj", static=False)[0] | layer("gate_proj")[0]
    patterns = {"*up_*": PTPC, "*_proj": WEIGHT_ONLY, "*gate*": PTPC}
    del tensors["gate_proj.input_scale"]
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, STATIC, layer_quant_config=patterns))
    assert {name: module.scheme.act_dynamic for name, module in loaded.items()} == {
        "up_proj": True,
        "down_proj": False,
        "gate_proj": False,
    }
    assert loaded["gate_proj"].scheme.weight_only


@pytest.mark.parametrize("kind", ["Linear", "<class 'torch.nn.modules.linear.Linear'>", "torch.nn.Linear"])
def test_configs_by_class(tmp_path, kind):
    tensors, weight = layer("a", static=False)
    folder = write(tmp_path, tensors, STATIC, layer_type_quant_config={kind: WEIGHT_ONLY})
    check(anyfp8.load(stale(linears("a")), folder)["a"], weight, "e4m3fn per tensor, weight-only")
    folder = write(tmp_path / "b", layer("a")[0], STATIC, layer_type_quant_config={"Conv2d": WEIGHT_ONLY})
    assert anyfp8.load(stale(linears("a")), folder)["a"].scheme.static


def test_an_excluded_layer_stored_in_fp8(tmp_path):
    tensors, weight = layer("lm_head")
    loaded = anyfp8.load(stale(linears("lm_head")), write(tmp_path, tensors, exclude=["*head"]))
    check(loaded["lm_head"], weight, "e4m3fn per tensor, input static e4m3fn per tensor")
    assert "excluded by the config, but stored in FP8: lm_head (the tensors decide)" in anyfp8.report(loaded).notes


def test_a_layer_that_no_config_names(tmp_path):
    folder = write(tmp_path, layer("a")[0], None, layer_quant_config={"*b": STATIC})
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight .*so its granularity is unknown"):
        anyfp8.load(linears("a"), folder)


# --- refusals ---
@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale"])
def test_a_missing_scale(tmp_path, leaf):
    tensors, _ = layer("a")
    del tensors[f"a.{leaf}"]
    with pytest.raises(anyfp8.LoadError, match=r"a\.(weight|input_scale)\b.*(has no scale|not dynamic)"):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


def test_a_scale_that_nothing_uses(tmp_path):
    tensors, _ = layer("a")
    with pytest.raises(anyfp8.LoadError, match=r"a\.input_scale.*a scale that no layer uses"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, WEIGHT_ONLY))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (STATIC | {"weight": TENSOR | {"dtype": "int8"}}, "dtype is 'int8'; valid: fp8_e4m3, fp8_e5m2"),
        (STATIC | {"weight": TENSOR | {"dtype": "fp8_e5m2"}}, "weight is fp8_e5m2, but the tensor is F8_E4M3"),
        (STATIC | {"weight": [TENSOR, TENSOR]}, "quantized in 2 stages"),
        (STATIC | {"weight": CHANNEL | {"ch_axis": 1}}, "qscheme 'per_channel' over axis 1"),
        (STATIC | {"input_tensors": CHANNEL}, "static qscheme 'per_channel'"),
        (STATIC | {"input_tensors": TENSOR | {"symmetric": False}}, "symmetric is False"),
        (STATIC | {"output_tensors": TOKEN}, "only static per_tensor outputs"),
    ],
)
def test_configs_that_are_refused_by_name(tmp_path, scheme, message):
    with pytest.raises(anyfp8.LoadError, match=rf"a\.weight in model\.safetensors: its layer's config: .*{message}"):
        anyfp8.load(linears("a"), write(tmp_path, layer("a")[0], scheme))


def test_a_zero_point_that_is_not_zero(tmp_path):
    tensors, _ = layer("a")
    tensors["a.weight_zero_point"] = torch.ones((), dtype=torch.int32)
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight_zero_point"):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


def test_quarks_fp8_mode_is_transformers_layout(tmp_path):
    tensors, weight = layer("a")
    write_tensors(tmp_path, tensors)
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"], "export": {}}
    write_json(tmp_path / "config.json", {"quantization_config": config})
    loaded = anyfp8.load(stale(linears("a")), tmp_path)
    assert anyfp8.report(loaded).dialect == "transformers-fp8"
    check(loaded["a"], weight, "e4m3fn per tensor, input static e4m3fn per tensor")
