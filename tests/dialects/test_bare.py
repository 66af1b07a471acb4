"""Raw FP8 casts: only on request, everything at face value, and never a file with scales."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import DialectError, LoadError
from tests.checkpoints import F8, on_meta, seeded, stale, write_json, write_tensors
from tests.helpers import assert_close, assert_same_bytes, randn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.conv, self.norm = nn.Embedding(5, 8), nn.Conv1d(8, 8, 3), nn.LayerNorm(8)
        self.fc, self.pos = nn.Linear(8, 4), nn.Parameter(torch.randn(5, 8))

    def forward(self, index):
        x = self.norm(self.emb(index) + self.pos)
        return self.fc(self.conv(x.transpose(-1, -2)).transpose(-1, -2))


INDEX = torch.tensor([[0, 4, 2, 2, 1]])


def cast(model, dtype=F8, leave=()):
    return {k: t if k.startswith(leave) else t.to(dtype) for k, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2])
@pytest.mark.parametrize("leave", [(), ("norm", "pos")])
@pytest.mark.parametrize("meta", [False, True])
def test_everything_at_face_value(tmp_path, dtype, leave, meta):
    model = seeded(Net)
    tensors = cast(model, dtype, leave)
    write_tensors(tmp_path, tensors)
    loaded = anyfp8.load(on_meta(Net) if meta else stale(model), tmp_path, dialect="bare")
    want = stale(model)
    want.load_state_dict({k: t.float() for k, t in tensors.items()})
    for name in ("emb", "conv", "fc"):
        assert isinstance(loaded.get_submodule(name), type(model.get_submodule(name)))
        assert_close(loaded.get_submodule(name).weight, want.get_submodule(name).weight.detach(), 0)
        assert_same_bytes(loaded.get_submodule(name).weight_codes, tensors[f"{name}.weight"].view(torch.uint8))
    for name in ("fc.bias", "norm.weight", "pos"):
        assert_same_bytes(loaded.get_parameter(name), want.get_parameter(name))
    assert_close(loaded(INDEX).detach(), want(INDEX).detach(), 1e-6)
    assert str(loaded.fc.scheme).endswith("per tensor, weight-only")
    assert any("at face value" in note for note in anyfp8.report(loaded).notes)


def test_into_a_bfloat16_model(tmp_path):
    model = seeded(Net)
    write_tensors(tmp_path, tensors := cast(model))
    loaded = anyfp8.load(stale(model).bfloat16(), tmp_path, dialect="bare")
    assert torch.equal(loaded.fc.bias, tensors["fc.bias"].bfloat16())
    assert torch.equal(loaded.fc.weight, tensors["fc.weight"].bfloat16())


def test_it_is_never_detected(tmp_path):
    write_tensors(tmp_path, cast(seeded(Net)))
    with pytest.raises(DialectError, match="no manifest that says what they mean"):
        anyfp8.load(seeded(Net), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("fc.weight_scale", "fc.scale_weight", "fc.weight_scale_inv", "fc.weight._scale", "fc.input_scale"),
        *("fc.weight_quantizer._scale", "fc.bias_scale", "scaled_fp8", "fc.comfy_quant", "fc.dequant_weights.scale"),
    ],
)
def test_a_file_with_scales_is_not_bare(tmp_path, name):
    write_tensors(tmp_path, cast(seeded(Net)) | {name: torch.ones(1)})
    with pytest.raises(DialectError, match=rf"is not bare: it has scales \({name}\)"):
        anyfp8.load(seeded(Net), tmp_path, dialect="bare")


def test_a_norm_may_call_its_weight_scale(tmp_path):
    tensors = {"scale": randn(8).to(F8)}
    write_tensors(tmp_path, tensors)
    model = nn.Module()
    model.scale = nn.Parameter(torch.zeros(8))
    assert torch.equal(anyfp8.load(model, tmp_path, dialect="bare").scale, tensors["scale"].float())


@pytest.mark.parametrize("name", ["fc.weight", "fc.bias"])
def test_codes_that_are_no_numbers(tmp_path, name):
    tensors = cast(seeded(Net))
    tensors[name].view(torch.uint8).view(-1)[1] = 0x7F
    write_tensors(tmp_path, tensors)
    with pytest.raises(LoadError, match=rf"{name} in model.safetensors: 1 of its codes are NaN"):
        anyfp8.load(seeded(Net), tmp_path, dialect="bare")


def test_a_config_that_says_otherwise_is_reported(tmp_path):
    write_tensors(tmp_path, cast(model := seeded(Net)))
    write_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    report = anyfp8.report(anyfp8.load(model, tmp_path, dialect="bare"))
    assert any("says quant_method 'fp8', but the file has no scales" in note for note in report.notes)


def test_a_float_file_is_loaded_as_it_is(tmp_path):
    model = seeded(Net)
    write_tensors(tmp_path, dict(model.state_dict()) | {"fc.weight_scale": torch.ones(1)})
    loaded = anyfp8.load(stale(model), tmp_path, dialect="bare")
    assert torch.equal(loaded.fc.weight, model.fc.weight)
    assert not anyfp8.report(loaded).layers


def test_saved_again_it_says_that_the_scale_is_one(tmp_path):
    write_tensors(tmp_path / "bare", cast(model := seeded(Net)))
    anyfp8.save(loaded := anyfp8.load(stale(model), tmp_path / "bare", dialect="bare"), tmp_path / "saved")
    again = anyfp8.load(stale(model), tmp_path / "saved")
    assert_same_bytes(again(INDEX), loaded(INDEX))
