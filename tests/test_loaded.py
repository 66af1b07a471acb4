"""`dequantize` and `set_backend`: changes to a model that is already FP8."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Linear
from tests.checkpoints import (
    DYNAMIC,
    STATIC,
    WEIGHT_ONLY,
    Doubling,
    Nested,
    Shared,
    Snapshot,
    Tied,
    X,
    draft,
    mlp,
    on_meta,
    seeded,
    stale,
)
from tests.helpers import assert_close, assert_same_bytes


def run(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def loaded(tmp_path, make, names, scheme=DYNAMIC, place="real"):
    written = draft(seeded(make), names, scheme)
    target = stale(seeded(make)) if place == "real" else on_meta(make)
    return anyfp8.load(target, written.write(tmp_path)), written


# --- dequantize ---
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_dequantize_gives_ordinary_layers(tmp_path, dtype):
    model, written = loaded(tmp_path, Nested, ["parts.up", "layers.1.0"])
    kept = model.parts["up"].bias
    back = anyfp8.dequantize(model, dtype)
    assert back is model
    assert [type(m) for m in model.modules()] == [type(m) for m in seeded(Nested).modules()]
    for name in written.layers:
        layer = model.get_submodule(name)
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.requires_grad
        assert_close(layer.weight.detach().float(), written.weight(name), 0 if dtype is not torch.bfloat16 else 4e-3)
        assert layer.weight.dtype == (dtype or torch.float32)
    assert model.parts["up"].bias is kept
    assert model.state_dict().keys() == seeded(Nested).state_dict().keys()


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 4), lambda: nn.Conv1d(4, 4, 1), lambda: nn.Embedding(6, 4)])
def test_dequantize_a_root_layer(tmp_path, make):
    model, written = loaded(tmp_path, make, [""], WEIGHT_ONLY)
    back = anyfp8.dequantize(model)
    assert type(back) is type(make())
    assert_same_bytes(back.weight.detach(), written.weight(""))


def test_dequantize_parametrized_layers(tmp_path):
    model, written = loaded(tmp_path, lambda: nn.Sequential(Doubling(8, 8), nn.LayerNorm(8)), ["0", "1"], WEIGHT_ONLY)
    anyfp8.dequantize(model)
    assert [type(m) for m in model] == [Doubling, nn.LayerNorm]
    for name in ("0", "1"):
        assert isinstance(model.get_submodule(name).weight, nn.Parameter)
        assert_same_bytes(model.get_submodule(name).weight.detach(), written.weight(name))
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_dequantized_weights_can_be_trained(tmp_path):
    model, written = loaded(tmp_path, mlp, ["0", "2"])
    anyfp8.dequantize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, written.weight("0"))


@pytest.mark.parametrize("place", ["real", "meta"])
@pytest.mark.parametrize("stored", ["head", "emb"])
def test_dequantize_keeps_ties(tmp_path, stored, place):
    written = draft(seeded(Tied), [stored], WEIGHT_ONLY)
    written.tensors = {n: t for n, t in written.tensors.items() if n.startswith(stored)}
    model = anyfp8.load(stale(seeded(Tied)) if place == "real" else on_meta(Tied), written.write(tmp_path))
    anyfp8.dequantize(model)
    assert model.head.weight is model.emb.weight, "the tie is lost: twice the memory, and training drifts apart"
    assert_same_bytes(model.emb.weight.detach(), written.weight(stored))


def test_dequantize_keeps_sharing(tmp_path):
    written = draft(seeded(Shared), ["first"])
    written.tensors = {n: t for n, t in written.tensors.items() if n.startswith("first")}
    model = anyfp8.dequantize(anyfp8.load(stale(seeded(Shared)), written.write(tmp_path)))
    assert model.first is model.second
    assert type(model.first) is nn.Linear


def test_dequantize_a_compiled_model(tmp_path):
    written = draft(mlp(), ["0", "2"])
    model = torch.compile(stale(mlp()), backend="eager")
    anyfp8.load(model, written.write(tmp_path))
    run(model, X)
    anyfp8.dequantize(model)
    want = mlp()
    for name in ("0", "2"):
        want.get_submodule(name).weight.data = written.weight(name)
    assert_close(run(model, X), run(want, X), 1e-6)
    torch._dynamo.reset()


def test_dequantize_a_float_model_changes_nothing():
    model = mlp()
    before = Snapshot(model, X)
    assert anyfp8.dequantize(model) is model
    before.assert_unchanged()


# --- set_backend ---
def test_set_backend(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))  # noqa: E731
    model, written = loaded(tmp_path, make, ["0", "2"], STATIC)
    x = torch.cat([X, X], 1)
    outputs = {}
    for name in ("dequantized", "native", "emulated", "auto", "auto_round:torch_fp8_static"):
        anyfp8.set_backend(model, name)
        outputs[name] = run(model, x)
        assert {layer.backend for layer in anyfp8.report(model).layers.values()} == {
            "emulated" if name == "auto" else name
        }
    assert_close(outputs["native"], outputs["emulated"], 1e-5)
    assert torch.equal(outputs["auto"], outputs["emulated"])
    want = make()
    for name in ("0", "2"):
        want.get_submodule(name).weight.data = written.weight(name)
        want.get_submodule(name).bias.data = written.tensors[f"{name}.bias"]
    assert_close(outputs["dequantized"], run(want, x), 1e-5)
    assert not torch.equal(outputs["dequantized"], outputs["emulated"])


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("native", r"(?s)1 of the layers.*\bwo: weight-only"),
        ("auto_round:torch_fp8_static", r"2 of the layers"),
        ("triton9", "unknown backend 'triton9'"),
    ],
)
def test_a_refused_backend_changes_no_layer(tmp_path, name, match):
    make = lambda: nn.ModuleDict({n: nn.Linear(16, 16) for n in ("st", "dyn", "wo")})  # noqa: E731
    written = draft(seeded(make), ["st"], STATIC)
    for layer, scheme in (("dyn", DYNAMIC), ("wo", WEIGHT_ONLY)):
        other = draft(seeded(make), [layer], scheme)
        written.layers |= other.layers
        written.tensors |= {n: t for n, t in other.tensors.items() if n.startswith(layer)}
    model = anyfp8.load(stale(seeded(make)), written.write(tmp_path))
    before = Snapshot(model)
    with pytest.raises(anyfp8.BackendError, match=match):
        anyfp8.set_backend(model, name)
    before.assert_unchanged()


def test_embeddings_and_parametrized_layers_have_no_backend(tmp_path):
    make = lambda: nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 16), Doubling(16, 16))  # noqa: E731
    model, _ = loaded(tmp_path, make, ["0", "1", "2"])
    anyfp8.set_backend(model, "native")
    assert type(model[1]) is FP8Linear
    assert model[1].backend.name == "native"
    assert run(model, torch.arange(12)).shape == (12, 16)
