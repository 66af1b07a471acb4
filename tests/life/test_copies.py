"""Copies of loaded models: deepcopy, pickle, torch.save, averaged models, files written again."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import anyfp8
from anyfp8 import FP8Linear
from tests.helpers import assert_same_bytes
from tests.life.models import CASES, assert_same_codes, build, inputs, name_of, output, quantized, stored

KEYS = [*CASES, "encoder"]


def through_torch_save(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, **options)


def spoil(model):
    """Write over every tensor, in place."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: through_torch_save(m, weights_only=False),
}


# --- of whole models ---
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("key", [k for k in CASES if k != "nfnet"])
def test_copies_are_equal_and_independent(key, how, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    twin = COPIES[how](model)
    assert_same_codes(twin, before)
    assert anyfp8.report(twin).to_dict() == anyfp8.report(model).to_dict()
    assert torch.equal(output(twin, name), want)
    spoil(twin)
    twin.half()
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


parametrized = pytest.mark.parametrize("key", ["nfnet", "encoder"])


@parametrized
def test_deepcopy_of_codes_behind_a_parameter(key, loaded):
    model = loaded(key)
    before, want = stored(model), output(model, key)
    twin = copy.deepcopy(model)
    assert_same_codes(twin, before)
    assert torch.equal(output(twin, key), want)
    spoil(twin)
    twin.half()
    assert_same_codes(model, before)
    assert torch.equal(output(model, key), want)


@parametrized
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_torch_refuses_to_pickle_codes_behind_a_parameter(key, how, loaded):
    """torch's own limit: its parametrized modules can't be pickled; the state dict can, see below."""
    with pytest.raises(RuntimeError, match="parametrized modules is only supported through state_dict"):
        COPIES[how](loaded(key))


# --- averages ---
def test_averaged_model(loaded):
    """Weight averaging copies the model and then averages what can be trained: biases and norms."""
    model = loaded("vit")
    before, want = stored(model), output(model, "vit")
    averaged = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    assert torch.equal(output(averaged.module, "vit"), want)
    with torch.no_grad():
        model.head.bias += 1
    averaged.update_parameters(model)
    assert_same_codes(averaged.module, before)
    assert torch.allclose(output(averaged.module, "vit"), want + 0.5, atol=1e-6)


def test_timm_ema(loaded):
    utils = pytest.importorskip("timm.utils", reason="timm is not installed: pip install anyfp8[timm]")
    model = loaded("efficientnet")
    before, want = stored(model), output(model, "efficientnet")
    ema = utils.ModelEmaV3(model, decay=0.5, use_warmup=False)
    with torch.no_grad():
        model.classifier.bias += 1
    ema.update(model)
    ema.update(model)
    assert_same_codes(ema.module, before)
    assert torch.allclose(output(ema.module, "efficientnet"), want + 0.75, atol=1e-5)


def test_shared_memory(loaded):
    model = loaded("vit")
    before, want = stored(model), output(model, "vit")
    model.share_memory()
    assert all(t.is_shared() for t in (*model.parameters(), *model.buffers()))
    assert_same_codes(model, before)
    assert torch.equal(output(model, "vit"), want)


# --- files ---
@pytest.mark.parametrize("key", CASES)
def test_saved_again_it_is_the_same_file(key, loaded, folder, tmp_path):
    anyfp8.save(copy.deepcopy(loaded(key)), tmp_path / "again")
    assert (tmp_path / "again" / "anyfp8.json").read_bytes() == (folder(key) / "anyfp8.json").read_bytes()
    was, now = (load_file(path / "model.safetensors") for path in (folder(key), tmp_path / "again"))
    assert list(now) == list(was)
    for name, want in was.items():
        assert_same_bytes(now[name], want)


@pytest.mark.parametrize("key", ["vit", "unet", "llama-dynamic", "t5"])
def test_half_then_save_then_load(key, loaded, tmp_path):
    model, name = loaded(key).half(), name_of(key)
    before, want = stored(model), output(model, name, torch.float16)
    anyfp8.save(model, tmp_path / "half")
    again = anyfp8.load(build(name).half(), tmp_path / "half")
    assert_same_codes(again, before)
    assert {p.dtype for p in again.parameters()} == {torch.float16}
    assert torch.equal(output(again, name, torch.float16), want)


@pytest.mark.parametrize("meta", [False, True])
def test_what_is_done_to_a_model_never_reaches_its_file(meta, loaded, folder, tmp_path):
    """On a CPU the mapped file is the buffer: writes to the buffers must stay in memory."""
    path = tmp_path / "mine"
    anyfp8.save(quantized(CASES["vit"]), path)
    content = (path / "model.safetensors").read_bytes()
    with torch.device("meta" if meta else "cpu"):
        model = (
            build("vit")
            if not meta
            else pytest.importorskip("timm").create_model("test_vit", img_size=64, depth=2).eval()
        )
    anyfp8.load(model, path)
    want = output(model, "vit")
    state = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    spoil(model)
    assert (path / "model.safetensors").read_bytes() == content
    assert torch.equal(output(loaded("vit"), "vit"), want)


@pytest.mark.parametrize("key", ["vit", "llama"])
def test_saved_over_the_file_that_it_was_loaded_from(key, folder, tmp_path):
    name = name_of(key)
    anyfp8.save(quantized(CASES[key]), tmp_path / "ckpt")
    model = anyfp8.load(build(name), tmp_path / "ckpt")
    before, want = stored(model), output(model, name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    anyfp8.save(model, tmp_path / "ckpt")
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)
    again = anyfp8.load(build(name), tmp_path / "ckpt")
    assert torch.equal(output(again, name), want)


def test_one_layer_taken_out_of_a_model(loaded):
    model = loaded("vit")
    x = torch.ones(1, 64)
    layer = copy.deepcopy(model.blocks[0].attn.qkv)
    assert isinstance(layer, FP8Linear)
    other = nn.Sequential(nn.Identity(), layer)
    assert torch.equal(other(x), model.blocks[0].attn.qkv(x))
    assert_same_bytes(other.state_dict()["1.weight_codes"], model.blocks[0].attn.qkv.weight_codes)


def test_generate_is_the_same_after_a_copy(loaded):
    model = loaded("llama")
    ids = inputs("llama")["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, **options)
    assert want.shape[1] > ids.shape[1]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.generate(ids, **options), want)
    assert torch.equal(anyfp8.dequantize(model, torch.float64).float().generate(ids, **options)[:, :9], ids)
