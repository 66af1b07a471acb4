"""Black Forest Labs' files: told by the names of Flux's blocks and by the shapes of the scales."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyfp8
from anyfp8.checkpoint import Checkpoint
from anyfp8.dialects import bfl
from tests.checkpoints import F8, Snapshot, Within, encode, mlp, stale
from tests.dialects.test_comfy import FP4, label
from tests.helpers import assert_close, assert_same_bytes, randn

E4M3 = "float8_e4m3fn"


def flux():
    """Two layers inside a block, one outside."""
    body = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 32))
    return nn.ModuleDict({"double_blocks": nn.ModuleList([body]), "img_in": nn.Linear(4, 4)})


def write(folder, tensors, metadata=None):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "flux.safetensors"
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    return path


def fp8r(model):
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.startswith("double_blocks") and name.endswith("weight")]:
        tensors[name], tensors[f"{name}_scale"] = encode(tensors[name], channel=True)
    return tensors


def nvfp4(model):
    """Tensors, and the weights they mean; the even column is in the low nibble."""
    tensors, weights = dict(model.state_dict()), {}
    for name in [name for name in tensors if name.startswith("double_blocks") and name.endswith("weight")]:
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(rows))
        inner, outer = (randn(rows, columns // 16).abs() + 1).to(F8), torch.tensor(0.013)
        module = name.removesuffix(".weight")
        tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        tensors |= {f"{name}_scale": inner, f"{name}_scale_2": outer, f"{module}.input_scale": torch.tensor(0.001)}
        values = torch.tensor(FP4 + [-v for v in FP4])[codes]
        weights[module] = values.double() * (inner.double() * outer.double()).repeat_interleave(16, 1)
    return tensors, weights


def test_fp8r_is_per_row_with_dynamic_inputs(tmp_path):
    tensors = fp8r(flux())
    path = write(tmp_path, tensors)
    manifest = anyfp8.inspect(path)
    assert (manifest.dialect, manifest.problems, manifest.unclaimed) == ("bfl", (), {})
    assert manifest.evidence == "fp8r weights in Flux's blocks, e.g. double_blocks.0.0"
    loaded = anyfp8.load(stale(flux()), path)
    layer = loaded["double_blocks"][0][0]
    assert layer.scheme == anyfp8.QuantizationScheme.from_preset("FP8_DYNAMIC")
    weight = tensors["double_blocks.0.0.weight"].float() * tensors["double_blocks.0.0.weight_scale"][:, None]
    assert_close(layer.weight, weight)
    assert_same_bytes(loaded["img_in"].weight, tensors["img_in.weight"])
    x = randn(3, 32)
    scale = x.abs().amax(-1, keepdim=True) / 448
    assert_close(layer(x), (x / scale).to(F8).float() * scale @ weight.T + layer.bias, 1e-5)
    plain = anyfp8.load(stale(flux()), path, backend="dequantized")["double_blocks"][0][0]
    assert_close(plain(x), x @ weight.T + layer.bias, 1e-5)


def test_an_input_scale_of_fp8r_is_not_used(tmp_path):
    tensors = fp8r(flux()) | {"double_blocks.0.0.input_scale": torch.tensor(0.1)}
    loaded = anyfp8.load(stale(flux()), write(tmp_path, tensors))
    assert "per row at each call" in anyfp8.report(loaded).skipped["double_blocks.0.0.input_scale"]


def test_nvfp4(tmp_path):
    tensors, weights = nvfp4(flux())
    path = write(tmp_path, tensors)
    assert anyfp8.inspect(path).unclaimed == {}
    loaded = anyfp8.load(stale(flux()), path)
    layers = dict(loaded.named_modules())
    for name, weight in weights.items():
        assert_close(layers[name].weight, weight.float())
        scheme = layers[name].scheme
        assert (scheme.act_dtype, scheme.act_dynamic, scheme.act_tile) == ("float4_e2m1fn", True, (1, 16))
        assert_same_bytes(layers[name].input_scale, torch.tensor([0.001]))


def test_nvfp4_needs_its_input_scale(tmp_path):
    tensors, _ = nvfp4(flux())
    del tensors["double_blocks.0.1.input_scale"]
    model = stale(flux())
    before = Snapshot(model)
    with pytest.raises(anyfp8.LoadError, match=r"double_blocks\.0\.1\.input_scale.*NVFP4"):
        anyfp8.load(model, write(tmp_path, tensors))
    before.assert_unchanged()


@pytest.mark.parametrize("name", ["transformer_blocks", "single_transformer_blocks", "double_blocks", "single_blocks"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_blocks_names(tmp_path, name, prefix):
    tensors = {f"{prefix}{key.replace('double_blocks', name)}": t for key, t in fp8r(flux()).items()}
    assert anyfp8.inspect(write(tmp_path, tensors)).dialect == "bfl"


def with_scales(shape, dtype=torch.float32):
    tensors = fp8r(flux())
    return tensors | {"double_blocks.0.0.weight_scale": torch.ones(shape).to(dtype)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: (with_scales(()), None),
        lambda: (with_scales((16, 1)), None),
        lambda: (with_scales((32,)), None),
        lambda: (with_scales((16,), F8), None),
        lambda: (fp8r(flux()) | {"double_blocks.0.0.comfy_quant": label()}, None),
        lambda: (fp8r(flux()) | {"scaled_fp8": torch.empty(0, dtype=F8)}, None),
        lambda: (fp8r(flux()), {"_quantization_metadata": '{"layers": {}}'}),
        lambda: (fp8r(flux()) | {"other.weight": torch.ones(4, 4).to(F8)}, None),
        lambda: (fp8r(flux()) | {"other.weight": torch.ones(4, 4).to(torch.float8_e5m2)}, None),
        lambda: (
            {key.replace("double_blocks", "layers"): t for key, t in fp8r(flux()).items()},
            None,
        ),
        lambda: (dict(mlp().state_dict()), None),
    ],
)
def test_what_is_not_claimed(tmp_path, make):
    assert bfl.match(Checkpoint.open(write(tmp_path, *make()))) is None


@pytest.mark.parametrize("file", ["config.json", "anyfp8.json", "hf_quant_config.json", "quanto_qmap.json"])
def test_a_config_says_otherwise(tmp_path, file):
    path = write(tmp_path, fp8r(flux()))
    assert bfl.match(Checkpoint.open(path)) is not None
    (tmp_path / file).write_text(json.dumps({"quantization_config": {"quant_method": "auto-round"}}))
    assert bfl.match(Checkpoint.open(path)) is None


def test_a_file_under_other_names_loads_on_request(tmp_path):
    model = Within("net", nn.Linear(32, 16))
    weight, scale = encode(model.net.weight, channel=True)
    tensors = {"net.weight": weight, "net.weight_scale": scale, "net.bias": model.net.bias}
    path = write(tmp_path, tensors)
    with pytest.raises(anyfp8.DialectError, match="no dialect recognised it"):
        anyfp8.load(stale(model), path)
    assert_close(anyfp8.load(stale(model), path, dialect="bfl").net.weight, weight.float() * scale[:, None])
