"""Casts and moves of whole loaded models: the compute dtype changes, the FP8 bytes don't."""

import pytest
import torch
from safetensors.torch import load_file

import anyfp8
from tests.helpers import assert_close, assert_same_bytes, sqnr
from tests.life.models import CASES, MODELS, assert_same_codes, build, fp8_layers, inputs, name_of, output, stored

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KEYS = [*CASES, "encoder"]
CASTS = {
    "half": (lambda m: m.half(), F16),
    "double": (lambda m: m.double(), F64),
    "to dtype": (lambda m: m.to(BF16), BF16),
    "to device": (lambda m: m.to("cpu"), F32),
}
#: dB; with inputs quantized, one that is rounded to another dtype first may tip over to the next code
NOISE, NOISE_DEQUANTIZED = {F16: 18.0, BF16: 10.0, F64: 60.0}, {F16: 40.0, BF16: 25.0, F64: 100.0}


@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("key", MODELS)
def test_casts(key, cast, dtype, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    cast(model)
    assert_same_codes(model, before)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(m.compute_dtype == m.weight.dtype == dtype for m in fp8_layers(model).values())
    got = output(model, name, dtype)
    assert got.dtype == dtype
    if dtype == F32:
        assert torch.equal(got, want)
        return
    assert sqnr(got, want) > NOISE[dtype]
    exact = loaded(key)
    for m in (exact, model):
        anyfp8.set_backend(m, "dequantized")
    assert sqnr(output(model, name, dtype), output(exact, name)) > NOISE_DEQUANTIZED[dtype]


@pytest.mark.parametrize("key", KEYS)
def test_there_and_back_through_a_wider_dtype_is_exact(key, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    model.double().float()
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", MODELS)
def test_there_and_back_through_a_narrower_dtype_rounds_only_what_is_not_fp8(key, loaded):
    model, name = loaded(key), name_of(key)
    before = stored(model)
    want = build(name) if key == "encoder" else None
    model.half().bfloat16().float()
    assert_same_codes(model, before)
    other = loaded(key)
    for parameter in other.parameters():
        parameter.data = parameter.data.half().bfloat16().float()
    for module in other.modules():  # BatchNorm's statistics, rotary frequencies
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and "scale" not in leaf:
                module._buffers[leaf] = buffer.half().bfloat16().float()
    assert want is None or type(model) is type(want)
    assert torch.equal(output(model, name), output(other, name))


@pytest.mark.parametrize("key", MODELS)
def test_autocast(key, loaded):
    model, name, dtype = loaded(key), name_of(key), BF16
    before, want = stored(model), output(model, name)
    with torch.autocast("cpu", dtype=dtype):
        got = output(model, name)
    assert got.dtype == (F32 if key == "encoder" else dtype)  # torch's encoder ends with a layer norm
    assert not torch.equal(got.float(), want)
    assert sqnr(got, want) > NOISE[dtype]
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", MODELS)
def test_channels_last(key, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    model.to(memory_format=torch.channels_last)
    assert_same_codes(model, before)
    assert_close(output(model, name), want, 1e-5)


def test_a_model_in_channels_last_is_saved_as_it_is(loaded, folder, tmp_path):
    model = loaded("efficientnet").to(memory_format=torch.channels_last)
    assert any(not m.weight_codes.is_contiguous() for m in fp8_layers(model).values())
    anyfp8.save(model, tmp_path / "again")
    was, now = (load_file(path / "model.safetensors") for path in (folder("efficientnet"), tmp_path / "again"))
    for name, want in was.items():
        assert_same_bytes(now[name], want)


# --- without values ---
def non_persistent(model):
    """Buffers that no state dict holds, such as rotary frequencies: `to_empty` loses them in any module."""
    state = model.state_dict()
    return {name: b.clone() for name, b in model.named_buffers() if name not in state}


def restore(model, buffers):
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value


@pytest.mark.parametrize("start", ["cpu", "meta"])
@pytest.mark.parametrize("key", MODELS)
def test_to_empty_and_load_state_dict(key, start, loaded):
    model, name = loaded(key), name_of(key)
    before, want, extra = stored(model), output(model, name), non_persistent(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    layers = fp8_layers(model)
    model.to(start).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()  # whatever was in that memory
    assert fp8_layers(model) == layers
    assert all(m.compute_dtype == F32 for m in layers.values())
    assert not torch.equal(output(model, name).nan_to_num(), want)
    model.load_state_dict(state)
    restore(model, extra)
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("start", ["cpu", "meta"])
@pytest.mark.parametrize("key", CASES)
def test_to_empty_and_load(key, start, loaded, folder):
    if (key, start) == ("t5", "meta"):
        pytest.skip("torch itself loses the ties of a model that goes to meta")
    model, name = loaded(key), name_of(key)
    before, want, extra = stored(model), output(model, name), non_persistent(model)
    model.bfloat16().to(start).to_empty(device="cpu").float()
    anyfp8.load(model, folder(key))
    restore(model, extra)
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", ["vit", "efficientnet", "unet"])
def test_to_meta_and_load(key, loaded, folder):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    model.to("meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with pytest.raises(anyfp8.AnyFP8Error, match="on the meta device: there is nothing to save"):
        anyfp8.save(model, folder(key).parent / "nowhere")
    anyfp8.load(model, folder(key))
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


def test_a_model_on_meta_still_tells_shapes(loaded):
    model = loaded("vit")
    want = output(model, "vit").shape
    model.to("meta")
    with torch.no_grad():
        out = model(inputs("vit")["x"].to("meta"))
    assert (out.shape, out.device.type) == (want, "meta")
