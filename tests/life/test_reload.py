"""Loading over models that are loaded already, and going back to float."""

import copy

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8.errors import LoadError
from tests.helpers import assert_close, assert_same_bytes
from tests.life.models import CASES, assert_same_codes, build, fp8_layers, inputs, name_of, output, stored, types_of

KEYS = [*CASES]
PAIRS = [("vit", "vit-dynamic"), ("vit-dynamic", "vit"), ("llama-dynamic", "llama")]
keys = pytest.mark.parametrize("key", KEYS)


@keys
def test_the_same_checkpoint_twice(key, loaded, folder):
    model, name = loaded(key), name_of(key)
    before, want, types = stored(model), output(model, name), types_of(model)
    report = anyfp8.report(model).to_dict()
    assert anyfp8.load(model, folder(key)) is model
    assert types_of(model) == types
    assert_same_codes(model, before)
    assert anyfp8.report(model).to_dict() == report
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_another_scheme_over_it(first, second, loaded, folder, tmp_path):
    model, name = loaded(first), name_of(first)
    want = loaded(second)
    anyfp8.load(model, folder(second))
    assert_same_codes(model, stored(want))
    assert {n: m.scheme for n, m in fp8_layers(model).items()} == {n: m.scheme for n, m in fp8_layers(want).items()}
    assert torch.equal(output(model, name), output(want, name))
    anyfp8.save(model, tmp_path / "again")
    assert torch.equal(output(anyfp8.load(build(name), tmp_path / "again"), name), output(want, name))


@keys
def test_an_unquantized_checkpoint_over_it(key, loaded, tmp_path):
    model, name = loaded(key), name_of(key)
    plain = build(name)
    anyfp8.save(plain, tmp_path / "float")
    anyfp8.load(model, tmp_path / "float")
    assert not stored(model)
    assert types_of(model) == types_of(plain)
    assert torch.equal(output(model, name), output(plain, name))
    anyfp8.save(model, tmp_path / "again")
    assert torch.equal(output(anyfp8.load(build(name), tmp_path / "again"), name), output(plain, name))


@keys
def test_back_and_forth(key, loaded, folder):
    """FP8, float, FP8: nothing is left over."""
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    anyfp8.load(model, build(name).state_dict())
    anyfp8.load(model, folder(key))
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)
    anyfp8.load(anyfp8.dequantize(model), folder(key))
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@keys
def test_dequantize(key, loaded, tmp_path):
    model, name = loaded(key), name_of(key)
    reference = loaded(key)
    anyfp8.set_backend(reference, "dequantized")
    assert anyfp8.dequantize(model) is model
    plain = build(name)
    assert types_of(model) == types_of(plain)
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain.named_parameters()
    }
    assert set(model.state_dict()) == set(plain.state_dict())
    assert torch.equal(output(model, name), output(reference, name))
    with pytest.raises(anyfp8.AnyFP8Error, match=r"was not loaded by anyfp8\.load"):
        anyfp8.report(model)
    anyfp8.save(model, tmp_path / "float")
    assert torch.equal(output(anyfp8.load(build(name), tmp_path / "float"), name), output(reference, name))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(output(plain, name), output(reference, name))


def test_dequantize_of_torchs_encoder(loaded):
    model = loaded("encoder")
    want = output(model, "encoder")
    anyfp8.dequantize(model)
    assert types_of(model) == types_of(build("encoder"))
    assert set(model.state_dict()) == set(build("encoder").state_dict())
    assert_close(output(model, "encoder"), want, 1e-5)  # torch's fast path has another order of sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dequantize_to_another_dtype(dtype, loaded):
    model = loaded("vit")
    weights = {n: m.decoded(dtype) for n, m in fp8_layers(model).items()}
    anyfp8.dequantize(model, dtype)
    for name, want in weights.items():
        assert_same_bytes(model.get_submodule(name).weight.detach(), want)


@pytest.mark.parametrize("key", ["vit", "unet", "t5", "nfnet"])
def test_a_failed_load_leaves_the_loaded_model_as_it_was(key, loaded):
    model, name = loaded(key), name_of(key)
    before, want, types = stored(model), output(model, name), types_of(model)
    state = build(name).state_dict()
    last = next(n for n in reversed(state) if n.endswith("weight") and n != "lm_head.weight")  # that is tied
    del state[last]
    with pytest.raises(LoadError, match=f"(?s)missing.*{last.rpartition('.')[0][:12]}"):
        anyfp8.load(model, state)
    assert types_of(model) == types
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_a_second_load(dtype, loaded, folder):
    model = loaded("vit").to(dtype)
    before = stored(model)
    anyfp8.load(model, folder("vit"))
    assert {p.dtype for p in model.parameters()} == {m.compute_dtype for m in fp8_layers(model).values()} == {dtype}
    anyfp8.load(model, folder("vit"), dtype=torch.float32)
    assert_same_codes(model, before)
    assert torch.equal(output(model, "vit"), output(loaded("vit"), "vit"))


def test_parts_of_a_loaded_model_are_left_out_of_the_second_load(loaded, folder):
    model = loaded("vit")
    anyfp8.load(model, folder("vit"), exclude="blocks.0.*")
    assert type(model.blocks[0].attn.qkv) is nn.Linear
    assert not any(n.startswith("blocks.0.") for n in fp8_layers(model))
    fresh = anyfp8.load(build("vit"), folder("vit"), exclude="blocks.0.*")
    assert torch.equal(output(model, "vit"), output(fresh, "vit"))


@pytest.mark.parametrize("key", ["vit", "llama"])
def test_the_parameters_of_an_optimizer_are_still_the_models_after_a_second_load(key, loaded, folder):
    model = loaded(key)
    parameters = dict(model.named_parameters())
    anyfp8.load(model, folder(key))
    assert all(p is parameters[n] for n, p in model.named_parameters())


# --- functional calls ---
def test_functional_call_with_other_tensors(loaded):
    model, arguments = loaded("vit"), inputs("vit")
    before, want = stored(model), output(model, "vit")
    path = "blocks.0.mlp.fc1"
    layer = model.get_submodule(path)
    for leaf, other in (("bias", layer.bias + 1), ("weight_scale", layer.weight_scale * 2)):
        with torch.no_grad():
            got = torch.func.functional_call(model, {f"{path}.{leaf}": other.detach()}, (), arguments)
        twin = copy.deepcopy(model)
        twin.get_submodule(path).get_parameter(leaf).data.copy_(other) if leaf == "bias" else twin.get_submodule(
            path
        ).weight_scale.copy_(other)
        assert torch.equal(got, output(twin, "vit"))
        assert not torch.equal(got, want)
    codes = {n: b for n, b in loaded("vit-dynamic").named_buffers() if n.endswith("weight_codes")}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, codes, (), arguments), want)  # the same codes
    assert_same_codes(model, before)
    assert torch.equal(output(model, "vit"), want)


def test_functional_call_with_a_weight_is_refused(loaded):
    model = loaded("vit")
    before, want = stored(model), output(model, "vit")
    with pytest.raises(anyfp8.ReadOnlyWeightError, match=r"anyfp8\.dequantize\(model\) first"):
        torch.func.functional_call(model, {"blocks.0.mlp.fc1.weight": torch.zeros(256, 64)}, (), inputs("vit"))
    assert_same_codes(model, before)
    assert torch.equal(output(model, "vit"), want)


def test_gradients_of_a_functional_call(loaded):
    model, x = loaded("vit"), inputs("vit")["x"]
    biases = {n: p.detach() for n, p in model.named_parameters() if n.endswith("bias")}

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).square().mean()

    found = torch.func.grad(loss)(biases)
    loss({n: p for n, p in model.named_parameters() if n in biases}).backward()
    for name, grad in found.items():
        assert torch.allclose(grad, model.get_parameter(name).grad, atol=1e-7)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("key", ["vit", "vit-dynamic"])
def test_vmap_over_images(key, loaded):
    model, x = loaded(key), inputs("vit")["x"]
    with torch.no_grad():
        got = torch.func.vmap(lambda image: model(image[None])[0])(x)
        want = torch.cat([model(image[None]) for image in x])
    assert torch.allclose(got, want, atol=1e-5)
