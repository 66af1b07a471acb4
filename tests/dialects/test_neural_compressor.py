"""Intel neural-compressor's QDQ files: transposed weights, quantizers' tensors, and how they are recognised."""

import pytest
import torch
from torch import nn

import anyfp8
from tests.checkpoints import F8, encode, seeded, stale, write_json, write_tensors
from tests.helpers import assert_close, oracle_forward, randn

CONFIG = {
    "fp8_config": "E4M3",
    "scale_method": "maxabs_arbitrary",
    "use_qdq": "True",
    "mode": "LOAD",
    "allowlist": {"names": [], "types": ["Linear", "Conv2d"]},
    "blocklist": {"names": ["lm_head"]},
}


def linears(*names, k=8, n=8):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name in names}))


def write(folder, tensors, **config):
    write_tensors(folder, tensors)
    write_json(folder / "config.json", {"quantization_config": CONFIG | config})
    return folder


def layer(name, k=8, n=8, channel=False, dtype=F8, act=0.03125):
    """A layer's tensors, and its weight's real values [out, in]."""
    weight, scale = encode(randn(n, k), channel, dtype)
    scale = scale.bfloat16() if channel else scale.bfloat16().reshape(())
    tensors = {
        f"{name}.weight": weight.t(),
        f"{name}.dequant_weights.scale": scale,
        f"{name}.quant_input.scale": torch.tensor(act).bfloat16(),
        f"{name}.quant_input.scale_inv": torch.tensor(1 / act).bfloat16(),
    }
    return tensors, weight.double() * (scale.double().reshape(-1, 1) if channel else scale.double())


def check(loaded, weight, kind="tensor"):
    assert str(loaded.scheme).startswith(f"e4m3fn per {kind}, input static e4m3fn per tensor")
    assert_close(loaded.weight, weight, 1e-6)
    x = randn(3, loaded.in_features, seed=9)
    assert_close(loaded(x).detach(), oracle_forward(loaded, x), 1e-5)


@pytest.mark.parametrize("k", [8, 12], ids=["square", "not square"])
@pytest.mark.parametrize("channel", [False, True], ids=["tensor", "channel"])
def test_a_linear_is_stored_transposed(tmp_path, k, channel):
    tensors, weight = layer("a", k, channel=channel)
    loaded = anyfp8.load(stale(linears("a", k=k)), write(tmp_path, tensors))
    check(loaded["a"], weight, "channel" if channel else "tensor")


@pytest.mark.parametrize("channel", [False, True], ids=["tensor", "channel"])
def test_a_convolution_is_not(tmp_path, channel):
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 4, 4, bias=False)})
    weight, scale = encode(randn(4, 4, 4, 4), channel)
    tensors = layer("conv", channel=channel)[0] | {"conv.weight": weight, "conv.dequant_weights.scale": scale}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors))
    assert isinstance(loaded["conv"], anyfp8.FP8Conv2d)
    assert_close(loaded["conv"].weight, weight.double() * scale.reshape(-1, 1, 1, 1), 1e-6)


def test_e5m2(tmp_path):
    tensors, weight = layer("a", dtype=torch.float8_e5m2)
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, fp8_config="E5M2"))
    assert_close(loaded["a"].weight, weight, 1e-6)
    assert (loaded["a"].scheme.weight_dtype, loaded["a"].scheme.act_dtype) == ("float8_e5m2", "float8_e5m2")


def test_what_is_not_used_is_named(tmp_path):
    tensors, _ = layer("a", channel=True)
    more = {
        "a.dequant_weights.zero_point": torch.zeros(8),
        "attn.k_cache.quant_input.scale": torch.tensor(0.1),
        "attn.matmul.quant_output.scale_inv": torch.tensor(0.1),
        "b.quant_input.scale": torch.tensor(0.1),
    }
    folder = write(tmp_path, tensors | more | {"b.weight": randn(8, 8)})
    anyfp8.load(stale(linears("a", "b")), folder)
    kinds = {name: reason.split("(")[0].split(":")[0] for name, reason in anyfp8.inspect(folder).exceptions.items()}
    assert kinds == {
        "a.quant_input.scale_inv": "the reciprocal of the input's scale, which is used",
        "a.dequant_weights.zero_point": "a zero point of 0 changes nothing",
        "attn.k_cache.quant_input.scale": "a quantizer without a weight ",
        "attn.matmul.quant_output.scale_inv": "a quantizer without a weight ",
        "b.quant_input.scale": "a scale beside a weight that is stored in float",
    }


def test_a_reciprocal_that_is_none(tmp_path):
    tensors, _ = layer("a")
    tensors["a.quant_input.scale_inv"] = tensors["a.quant_input.scale"]
    with pytest.raises(anyfp8.LoadError, match=r"a\.quant_input\.scale_inv.*is not 1 / a\.quant_input\.scale"):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("dequant_weights.scale", r"has no scale \(looked for dequant_weights\.scale\)"),
        ("quant_input.scale", r"its input has no scale \(looked for quant_input\.scale\)"),
    ],
)
def test_a_missing_scale(tmp_path, leaf, message):
    tensors, _ = layer("a")
    del tensors[f"a.{leaf}"]
    with pytest.raises(anyfp8.LoadError, match=rf"a\.weight in model\.safetensors: .*F8_E4M3, but {message}"):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


@pytest.mark.parametrize(
    "more",
    [
        {"a.quant_output.scale": torch.tensor(1.0)},
        {"a.dequant_weights.zero_point": torch.ones(8)},
        {"a.dequant_weights.scale": torch.ones(1, 8)},
        {"a.dequant_weights.scale": torch.ones(4)},
    ],
    ids=str,
)
def test_what_is_not_understood_is_an_error(tmp_path, more):
    (name,) = more
    with pytest.raises(anyfp8.LoadError, match=name.replace(".", r"\.")):
        anyfp8.load(linears("a"), write(tmp_path, layer("a")[0] | more))


def test_gaudis_own_files(tmp_path):
    tensors = {"a.weight": randn(8, 8).to(F8), "a.scale_weight": torch.tensor(1.0), "a.scale_input": torch.tensor(1.0)}
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight .*only files with use_qdq"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, use_qdq="False"))


def test_lists_are_compared_with_the_tensors(tmp_path):
    tensors = layer("lm_head")[0] | {"b.weight": randn(8, 8)}
    loaded = anyfp8.load(stale(linears("lm_head", "b")), write(tmp_path, tensors))
    notes = anyfp8.report(loaded).notes
    assert "blocked by the config, but stored in FP8: lm_head (the tensors decide)" in notes
    assert "targeted by the config, but stored in float: b (the tensors decide)" in notes


# --- recognised without a quant_method ---
@pytest.mark.parametrize("file", ["config.json", "quantization_config.json", None])
def test_recognised_by_its_keys_or_its_tensors(tmp_path, file):
    tensors, weight = layer("a")
    write_tensors(tmp_path, tensors)
    if file is not None:
        write_json(tmp_path / file, {"quantization_config": CONFIG} if file == "config.json" else CONFIG)
    loaded = anyfp8.load(stale(linears("a")), tmp_path)
    report = anyfp8.report(loaded)
    assert report.dialect == "neural-compressor"
    assert ("fp8_config" if file else "a.dequant_weights.scale") in report.evidence
    check(loaded["a"], weight)


@pytest.mark.parametrize("method", ["fp8", "quark"])
def test_another_quant_method_is_another_dialect(tmp_path, method):
    manifest = anyfp8.inspect(write(tmp_path, {"b.weight": randn(8, 8)}, quant_method=method))
    assert manifest.dialect != "neural-compressor"
