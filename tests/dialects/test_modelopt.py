"""ModelOpt: quant_algo wherever it is said, block formats, models saved with quantizers, and what is reported."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyfp8
from anyfp8 import DialectError, LoadError
from tests.checkpoints import (
    CHANNEL,
    DYNAMIC,
    F8,
    STATIC,
    X,
    draft,
    encode,
    mlp,
    oracle,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close, randn

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def config(algo, **more):
    """config.json's form."""
    inner = {"quant_method": "modelopt", "quant_algo": algo, "ignore": [], "producer": {"name": "modelopt"}} | more
    return {"quantization_config": inner}


def hf_quant(algo, **more):
    """hf_quant_config.json's form."""
    inner = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": []} | more
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": inner}


def write(folder, tensors, **files):
    write_tensors(folder, tensors)
    for name, value in files.items():
        write_json(folder / f"{name}.json", value)
    return folder


def linear(k, n, name="fc"):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n, bias=False)}))


# --- where the algorithm is said ---
@pytest.mark.parametrize("where", ["config", "hf_quant_config", "both", "header"])
def test_static_per_tensor(tmp_path, where):
    model = mlp()
    written = draft(model, ["0", "2"], STATIC)
    files = {"config": config("FP8")} if where in ("config", "both") else {}
    files |= {"hf_quant_config": hf_quant("FP8")} if where in ("hf_quant_config", "both") else {}
    write(tmp_path, written.tensors, **files)
    if where == "header":
        layers = {"format_version": "1.0", "layers": {"0": {"format": "fp8"}, "2": {"format": "fp8"}}}
        header = {"quantization_config": config("FP8")["quantization_config"], "_quantization_metadata": layers}
        header = {key: json.dumps(value) for key, value in header.items()}
        save_file(written.tensors, tmp_path / "model.safetensors", metadata=header)
    loaded = anyfp8.load(stale(model), tmp_path)
    assert_close(loaded(X).detach(), oracle(model, written)(X).detach(), 1e-5)
    assert anyfp8.report(loaded).dialect == "modelopt"


def test_a_header_that_repeats_config_json_is_claimed_once(tmp_path):
    written = draft(mlp(), ["0"], STATIC)
    write(tmp_path, written.tensors, config=config("FP8"))
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"0": {"format": "fp8"}}})}
    save_file(written.tensors, tmp_path / "model.safetensors", metadata=header)
    assert anyfp8.inspect(tmp_path).dialect == "modelopt"


def test_two_configs_that_disagree(tmp_path):
    written = draft(mlp(), ["0"], STATIC)
    write(tmp_path, written.tensors, config=config("FP8"), hf_quant_config=hf_quant("NVFP4"))
    with pytest.raises(DialectError, match=r"config.json.* says quant_algo FP8, hf_quant_config.json says NVFP4"):
        anyfp8.load(mlp(), tmp_path)


def test_an_unsupported_algorithm(tmp_path):
    write(tmp_path, {"fc.weight": torch.zeros(2, 2, dtype=torch.int8)}, config=config("W8A8_SQ_PER_CHANNEL"))
    with pytest.raises(DialectError, match=r"quant_algo 'W8A8_SQ_PER_CHANNEL', which is not supported; supported: FP8"):
        anyfp8.load(linear(2, 2), tmp_path)


# --- schemes ---
def test_per_channel_and_token(tmp_path):
    model = mlp()
    written = draft(model, ["0", "2"], DYNAMIC | CHANNEL, channel=True)
    loaded = anyfp8.load(stale(model), write(tmp_path, written.tensors, config=config("FP8_PER_CHANNEL_PER_TOKEN")))
    assert_close(loaded(X).detach(), oracle(model, written)(X).detach(), 1e-5)


def test_blocks_with_ragged_edges_are_weight_only(tmp_path):
    codes, scale = randn(200, 150).to(F8), randn(2, 2).abs() + 0.1
    tensors = {"fc.weight": codes, "fc.weight_scale": scale.reshape(2, 1, 2, 1)}
    loaded = anyfp8.load(linear(150, 200), write(tmp_path, tensors, config=config("fp8_pb_wo")))
    want = codes.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :150]
    assert_close(loaded["fc"].weight, want, 0)
    assert str(loaded["fc"].scheme) == "e4m3fn per 128×128, weight-only"


def test_mxfp8_rounds_scales_up(tmp_path):
    tensors = {"fc.weight": randn(4, 64).to(F8), "fc.weight_scale": torch.randint(115, 130, (4, 2)).to(torch.uint8)}
    loaded = anyfp8.load(linear(64, 4), write(tmp_path, tensors, config=config("MXFP8", group_size=32)))
    weight = tensors["fc.weight"].float() * (tensors["fc.weight_scale"].double() - 127).exp2().repeat_interleave(32, 1)
    x = randn(3, 64, seed=2)
    scale = torch.exp2(torch.ceil(torch.log2(x.double().reshape(3, 2, 32).abs().amax(-1) / 448))).repeat_interleave(
        32, 1
    )
    rounded = (x / scale).float().clamp(-448, 448).to(F8).double() * scale
    assert_close(loaded["fc"].weight, weight, 0)
    assert_close(loaded["fc"](x), rounded @ weight.T, 1e-6)


def nvfp4(n=4, k=64):
    """Tensors of an NVFP4 layer, and the weight that they mean."""
    packed = torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    scale, outer = (randn(n, k // 16).abs() + 0.5).to(F8), torch.tensor(0.01)
    values = torch.stack((FP4[(packed & 15).long()], FP4[(packed >> 4).long()]), -1).flatten(-2)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": outer, "input_scale": torch.tensor(0.002)}
    return {f"fc.{name}": t for name, t in tensors.items()}, values * scale.float().repeat_interleave(16, 1) * outer


def test_nvfp4(tmp_path):
    tensors, weight = nvfp4()
    loaded = anyfp8.load(linear(64, 4), write(tmp_path, tensors, config=config("NVFP4", group_size=16)))
    assert_close(loaded["fc"].weight, weight, 1e-7)
    x = randn(3, 64, seed=2)
    scale = ((x.reshape(3, 4, 16).abs().amax(-1) / 6 / 0.002).clamp(max=448).to(F8).float() * 0.002).repeat_interleave(
        16, 1
    )
    nearest = ((x / scale).unsqueeze(-1) - FP4).abs().argmin(-1)
    assert_close(loaded["fc"](x), (FP4[nearest] * scale) @ weight.T, 1e-5)


@pytest.mark.parametrize(("algo", "scheme"), [("W4A16_NVFP4", "weight-only"), ("W4A8_NVFP4_FP8", "input static")])
def test_relatives_of_nvfp4(tmp_path, algo, scheme):
    tensors, weight = nvfp4()
    if scheme == "weight-only":
        del tensors["fc.input_scale"]
    loaded = anyfp8.load(linear(64, 4), write(tmp_path, tensors, config=config(algo)))
    assert_close(loaded["fc"].weight, weight, 1e-7)
    assert scheme in str(loaded["fc"].scheme)


@pytest.mark.parametrize("lost", ["weight_scale", "weight_scale_2", "input_scale"])
def test_nvfp4_without_one_of_its_scales(tmp_path, lost):
    tensors, _ = nvfp4()
    del tensors[f"fc.{lost}"]
    with pytest.raises(LoadError, match=f"fc.{lost}"):
        anyfp8.load(linear(64, 4), write(tmp_path, tensors, config=config("NVFP4")))


def test_nvfp4_scales_in_cublas_layout_are_told_by_their_shape(tmp_path):
    tensors, weight = nvfp4(20, 64)
    rows, columns = torch.meshgrid(torch.arange(20), torch.arange(4), indexing="ij")
    swizzled = torch.zeros(512)
    swizzled[rows % 32 * 16 + rows // 32 * 4 + columns] = tensors["fc.weight_scale"].float()
    tensors["fc.weight_scale"] = swizzled.to(F8).reshape(128, 4)
    loaded = anyfp8.load(linear(64, 20), write(tmp_path, tensors, config=config("NVFP4")))
    assert_close(loaded["fc"].weight, weight, 1e-7)


def test_nvfp4_scales_whose_layout_nothing_tells(tmp_path):
    tensors, weight = nvfp4(128, 64)
    write(tmp_path, tensors, config=config("NVFP4"))
    assert_close(anyfp8.load(linear(64, 128), tmp_path)["fc"].weight, weight, 1e-7)
    header = {"quantization_config": json.dumps(config("NVFP4")["quantization_config"])}
    save_file(tensors, tmp_path / "model.safetensors", metadata=header)
    with pytest.raises(LoadError, match=r"fc.weight_scale.*layout may be"):
        anyfp8.load(linear(64, 128), tmp_path)


def test_awq_is_refused(tmp_path):
    tensors, _ = nvfp4()
    tensors["fc.pre_quant_scale"] = torch.ones(64)
    with pytest.raises(LoadError, match=r"fc: fc.pre_quant_scale changes what the layer computes"):
        anyfp8.load(linear(64, 4), write(tmp_path, tensors, config=config("NVFP4_AWQ")))


# --- lists ---
def test_mixed_precision_trusts_quant_algo_and_not_groups(tmp_path):
    model = mlp()
    first, second = draft(model, ["0"], STATIC), draft(model, ["2"], DYNAMIC | CHANNEL, channel=True)
    first.tensors |= {name: t for name, t in second.tensors.items() if name.startswith("2.")}
    first.layers |= second.layers
    algos = {"0": {"quant_algo": "FP8"}, "2": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    groups = {"group_0": {"targets": ["2"], "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"}}}
    mixed = config("MIXED_PRECISION", quantized_layers=algos, config_groups=groups)
    loaded = anyfp8.load(stale(model), write(tmp_path, first.tensors, config=mixed))
    assert_close(loaded(X).detach(), oracle(model, first)(X).detach(), 1e-5)


def test_mixed_precision_with_a_layer_that_is_not_listed(tmp_path):
    written = draft(mlp(), ["0", "2"], STATIC)
    algos = {"0": {"quant_algo": "FP8"}, "2": {"quant_algo": "W4A16_AWQ"}}
    write(tmp_path, written.tensors, config=config("MIXED_PRECISION", quantized_layers=algos))
    with pytest.raises(LoadError, match=r"2.weight .* is F8_E4M3, but config.json: .* says 'W4A16_AWQ'; supported"):
        anyfp8.load(mlp(), tmp_path)
    write(tmp_path, written.tensors, config=config("MIXED_PRECISION", quantized_layers={"0": algos["0"]}))
    with pytest.raises(LoadError, match=r"2.weight in model.safetensors is F8_E4M3, but .* has no quant_algo for it"):
        anyfp8.load(mlp(), tmp_path)


def test_lists_that_disagree_with_the_tensors_are_reported(tmp_path):
    model = mlp()
    written = draft(model, ["0"], STATIC)
    report = anyfp8.report(
        anyfp8.load(stale(model), write(tmp_path, written.tensors, config=config("FP8", ignore=["0*"])))
    )
    assert set(report.layers) == {"0"}
    assert any("excluded, but stored in FP8: 0" in note for note in report.notes)
    assert any("stored in float: 2" in note for note in report.notes)


def test_a_static_scheme_without_its_input_scale(tmp_path):
    written = draft(mlp(), ["0"], STATIC)
    del written.tensors["0.input_scale"]
    with pytest.raises(LoadError, match=r"0.input_scale: config.json: quantization_config says quant_algo FP8, so"):
        anyfp8.load(mlp(), write(tmp_path, written.tensors, config=config("FP8")))


def test_only_the_kv_cache_is_quantized(tmp_path):
    model = linear(8, 8, "k_proj")
    tensors = dict(model.state_dict()) | {"k_proj.k_scale": torch.tensor(0.1), "k_proj.k_bias": torch.zeros(8)}
    write(tmp_path, tensors, hf_quant_config=hf_quant(None, kv_cache_quant_algo="NVFP4_AFFINE"))
    report = anyfp8.report(anyfp8.load(stale(model), tmp_path))
    assert set(report.skipped) == {"k_proj.k_scale", "k_proj.k_bias"}
    assert any("KV-cache" in note for note in report.notes)


# --- models saved with their quantizers ---
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc, self.out = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.fc(self.norm(self.conv(x).mean((2, 3)))))


def quantized():
    """A net whose conv and fc are quantized, and its tensors as ModelOpt saves them."""
    model = seeded(Net)
    written = draft(model, ["conv", "fc"], STATIC)
    tensors = dict(written.tensors)
    for name in ("conv", "fc"):
        scale = tensors.pop(f"{name}.weight_scale").reshape(())
        tensors[f"{name}.weight_quantizer._scale"], tensors[f"{name}.weight_quantizer._amax"] = scale, scale * 448
        tensors[f"{name}.input_quantizer._amax"] = tensors.pop(f"{name}.input_scale").reshape(()) * 448
    tensors["norm.input_quantizer._amax"] = torch.tensor(3.0)
    tensors["attn.q_bmm_quantizer._amax"] = torch.tensor(3.0)
    return model, written, tensors


def test_a_model_saved_with_its_quantizers(tmp_path):
    model, written, tensors = quantized()
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors))
    x = randn(2, 3, 6, 6)
    assert_close(loaded(x).detach(), oracle(model, written)(x).detach(), 1e-5)
    reasons = anyfp8.report(loaded).skipped
    assert {name: reason.split(":")[0] for name, reason in reasons.items()} == {
        "conv.weight_quantizer._amax": "what the weight's scale was computed from",
        "fc.weight_quantizer._amax": "what the weight's scale was computed from",
        "norm.input_quantizer._amax": "a quantizer of a module without FP8 weight (a norm, a pooling, a float layer)",
        "attn.q_bmm_quantizer._amax": "an attention quantizer",
    }


def test_a_model_saved_with_quantizers_per_channel(tmp_path):
    model, _, tensors = quantized()
    codes, scale = encode(model.fc.weight, channel=True)
    tensors |= {"fc.weight": codes, "fc.weight_quantizer._scale": scale.reshape(-1, 1)}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors))
    assert_close(loaded.fc.weight, codes.float() * scale.reshape(-1, 1), 0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"fc.input_quantizer._amax": None}, r"no fc.input_quantizer._amax: only modelopt_state.pth, a pickle"),
        ({"fc.weight_quantizer._scale": None}, r"fc.weight .* has no scale \(looked for fc.weight_quantizer._scale\)"),
        ({"fc.weight_quantizer._scale": torch.ones(2, 1, 1, 1)}, r"fc.weight_quantizer._scale.*shape \[2, 1, 1, 1\]"),
        ({"fc.weight": torch.zeros(8, 2, dtype=torch.uint8)}, r"fc.weight .* is U8; of models saved with"),
        ({"fc.input_quantizer._amax": torch.zeros(())}, r"fc.input_quantizer._amax.* is 0, and values are divided"),
        ({"out.input_quantizer._pre_quant_scale": torch.ones(8)}, r"out.input_quantizer._pre_quant_scale changes what"),
    ],
)
def test_what_is_not_said_or_not_read(tmp_path, spoil, message):
    model, _, tensors = quantized()
    tensors = {name: t for name, t in (tensors | spoil).items() if t is not None}
    with pytest.raises(LoadError, match=message):
        anyfp8.load(model, write(tmp_path, tensors))


def test_fake_quantized_weights_are_taken_as_they_are(tmp_path):
    model, _, tensors = quantized()
    tensors |= {f"{name}.weight": model.get_parameter(f"{name}.weight").detach() for name in ("conv", "fc")}
    tensors = {name: t for name, t in tensors.items() if not name.endswith("_scale")}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors))
    assert torch.equal(loaded.fc.weight, model.fc.weight)
    assert "fc.weight_quantizer._amax" in anyfp8.report(loaded).skipped
