"""optimum-quanto: the map, its types, and which of its scales are used."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import DialectError, LoadError
from tests.checkpoints import encode, seeded, stale, write_json, write_tensors
from tests.helpers import assert_close, randn

TYPES = {
    "qfloat8_e4m3fn": torch.float8_e4m3fn,
    "qfloat8_e5m2": torch.float8_e5m2,
    "qfloat8_e4m3fnuz": torch.float8_e4m3fnuz,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc, self.one = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.one(self.fc(self.norm(self.conv(x).mean((2, 3)))))


LAYERS = ("conv", "fc", "one")


def written(kind="qfloat8_e4m3fn", act="none"):
    """A model, its tensors as quanto saves them, its map, and its real weights."""
    model = seeded(Net)
    tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}
    entries, weights = {}, {}
    for name in LAYERS:
        weight = tensors.pop(f"{name}.weight")
        codes, scale = encode(weight, channel=True, dtype=TYPES.get(kind, torch.float8_e4m3fn))
        scale = scale.reshape(-1, *[1] * (weight.dim() - 1)) if len(weight) > 1 else scale.reshape(())
        weights[name] = codes.float() * scale
        tensors |= {f"{name}.weight._data": codes, f"{name}.weight._scale": scale}
        entries[name] = {"weights": kind, "activations": act}
    if act != "none":
        entries["norm"] = {"weights": "none", "activations": act}
    for i, name in enumerate(entries):
        unused = act == "none"
        tensors[f"{name}.input_scale"] = torch.tensor(1.0 if unused else 0.01 + 0.01 * i)
        tensors[f"{name}.output_scale"] = torch.tensor(1.0 if unused else 0.5)
    return model, tensors, entries, weights


def save(folder, tensors, entries, name="quantization_map.json"):
    write_tensors(folder, tensors)
    write_json(folder / name, entries)
    return folder


def reference(model, weights, tensors, act):
    """The float model with these weights; act: the dtype that inputs of Linear layers are rounded to, or None."""
    want = stale(model)
    want.load_state_dict({name: tensors.get(name, t) for name, t in model.state_dict().items()})

    def rounding(scale):
        top = torch.finfo(act).max
        return lambda module, args: ((args[0] / scale).clamp(-top, top).to(act).float() * scale,)

    for name, weight in weights.items():
        layer = want.get_submodule(name)
        layer.weight.data = weight
        if act is not None and isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(rounding(tensors[f"{name}.input_scale"]))
    return want


X = randn(2, 3, 6, 6)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["quantization_map.json", "quanto_qmap.json"])
def test_weight_only(tmp_path, kind, name):
    model, tensors, entries, weights = written(kind)
    loaded = anyfp8.load(stale(model), save(tmp_path, tensors, entries, name))
    for layer in LAYERS:
        assert_close(loaded.get_submodule(layer).weight, weights[layer], 0)
    assert_close(loaded(X).detach(), reference(model, weights, tensors, None)(X).detach(), 1e-6)
    report = anyfp8.report(loaded)
    assert report.dialect == "quanto"
    assert set(report.skipped.values()) == {"a placeholder: activations are not quantized"}
    assert len(report.skipped) == 6


@pytest.mark.parametrize("kind", TYPES)
def test_calibrated_inputs_of_linear_layers_are_rounded(tmp_path, kind):
    model, tensors, entries, weights = written(kind, kind)
    loaded = anyfp8.load(stale(model), save(tmp_path, tensors, entries))
    assert_close(loaded(X).detach(), reference(model, weights, tensors, TYPES[kind])(X).detach(), 1e-6)
    skipped = anyfp8.report(loaded).skipped
    assert skipped.keys() == {f"{n}.output_scale" for n in entries} | {"conv.input_scale", "norm.input_scale"}
    assert skipped["fc.output_scale"] == "outputs are not rounded in the model as it was calibrated"
    assert skipped["conv.input_scale"] == "quanto rounds inputs of Linear layers with quantized weights only"


def test_weights_and_activations_of_different_types(tmp_path):
    model, tensors, entries, weights = written("qfloat8_e4m3fn", "qfloat8_e5m2")
    loaded = anyfp8.load(stale(model), save(tmp_path, tensors, entries))
    assert_close(loaded(X).detach(), reference(model, weights, tensors, torch.float8_e5m2)(X).detach(), 1e-6)


def test_diffusers_config_needs_no_map(tmp_path):
    model, tensors, _, weights = written()
    config = {"quant_method": "quanto", "weights_dtype": "float8", "modules_to_not_convert": None}
    write_json(tmp_path / "config.json", {"quantization_config": config})
    write_tensors(tmp_path, tensors)
    loaded = anyfp8.load(stale(model), tmp_path)
    assert_close(loaded(X).detach(), reference(model, weights, tensors, None)(X).detach(), 1e-6)


def test_tensors_without_a_map(tmp_path):
    _, tensors, _, _ = written()
    write_tensors(tmp_path, tensors)
    with pytest.raises(DialectError, match=r"no quantization map.*quanto_qmap.json or quantization_map.json"):
        anyfp8.load(seeded(Net), tmp_path)


@pytest.mark.parametrize(
    ("weights", "activations"), [("qint8", "none"), ("qint4", "none"), ("qfloat8_e4m3fn", "qint8")]
)
def test_integers_are_refused_by_name(tmp_path, weights, activations):
    _, tensors, entries, _ = written()
    entries["fc"] = {"weights": weights, "activations": activations}
    if weights == "qint4":
        tensors |= {"fc.weight._data": torch.zeros(16, dtype=torch.uint8), "fc.weight._shift": torch.zeros(8, 1)}
    with pytest.raises(LoadError, match=r"fc.weight: quantization_map.json says qint\d; FP8 types") as error:
        anyfp8.load(seeded(Net), save(tmp_path, tensors, entries))
    assert {problem.name for problem in error.value.problems} == {"fc.weight"}


def test_integers_in_diffusers_config(tmp_path):
    _, tensors, _, _ = written()
    config = {"quant_method": "quanto", "weights_dtype": "int8"}
    write_json(tmp_path / "config.json", {"quantization_config": config})
    write_tensors(tmp_path, tensors)
    with pytest.raises(LoadError, match="says qint8; FP8 types are read"):
        anyfp8.load(seeded(Net), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "entry", "message"),
    [
        ({"fc.weight._scale": None}, {}, r"has no scale \(looked for fc.weight._scale\)"),
        ({"fc.input_scale": None}, {}, r"fc.input_scale: quantization_map.json says activations 'qfloat8_e4m3fn', so"),
        ({"fc.weight._scale": torch.ones(4, 1)}, {}, r"fc.weight._scale.*shape \[4, 1\]"),
        ({}, {"fc": None}, r"is quantized, but quantization_map.json has no entry for fc"),
        ({}, {"fc": {"weights": "none", "activations": "none"}}, "says that the weights are not"),
        ({}, {"fc": {"weights": "qfloat8_e5m2", "activations": "none"}}, "is float8_e4m3fn, the manifest says"),
    ],
)
def test_incomplete_files(tmp_path, spoil, entry, message):
    _, tensors, entries, _ = written(act="qfloat8_e4m3fn")
    tensors = {name: t for name, t in (tensors | spoil).items() if t is not None}
    entries = {name: e for name, e in (entries | entry).items() if e is not None}
    with pytest.raises(LoadError, match=message):
        anyfp8.load(seeded(Net), save(tmp_path, tensors, entries))


def test_a_listed_layer_in_float_is_taken_as_it_is(tmp_path):
    model, tensors, entries, weights = written(act="qfloat8_e4m3fn")
    del tensors["fc.weight._data"], tensors["fc.weight._scale"]
    tensors["fc.weight"] = weights["fc"]
    report = anyfp8.report(loaded := anyfp8.load(stale(model), save(tmp_path, tensors, entries)))
    assert torch.equal(loaded.fc.weight, weights["fc"])
    assert "fc.input_scale" in report.skipped
    assert any("stored in float: fc" in note for note in report.notes)


def test_another_json_of_that_name_is_no_map(tmp_path):
    write_tensors(tmp_path, seeded(Net).state_dict())
    write_json(tmp_path / "quantization_map.json", {"bits": 8})
    assert anyfp8.inspect(tmp_path).dialect == "plain"
