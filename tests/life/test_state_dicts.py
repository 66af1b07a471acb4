"""State dicts of loaded models: into others, to files, refused."""

import pytest
import torch
from safetensors.torch import load_model, save_model

from tests.life.models import CASES, assert_same_codes, build, name_of, output, stored
from tests.life.test_copies import spoil, through_torch_save

KEYS = [*CASES, "encoder"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(key, assign, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    state = through_torch_save(model.state_dict(), weights_only=True)
    other = loaded(key)
    spoil(other)
    if "llama" in key:  # rotary frequencies are in no state dict
        other.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    assert str(other.load_state_dict(state, strict=True, assign=assign)) == "<All keys matched successfully>"
    assert_same_codes(other, before)
    assert torch.equal(output(other, name), want)
    other.half().float()
    assert_same_codes(other, before)


@pytest.mark.parametrize("key", ["vit", "unet", "llama", "t5"])
def test_a_float_state_dict_is_refused(key, loaded):
    model = loaded(key)
    before = stored(model)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*weight_codes.*Unexpected key"):
        model.load_state_dict(build(name_of(key)).state_dict())
    assert_same_codes(model, before)


@pytest.mark.parametrize("key", ["vit", "unet", "llama", "t5"])
def test_an_fp8_state_dict_is_refused_by_a_float_model(key, loaded):
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*weight.*Unexpected key.*weight_codes"):
        build(name_of(key)).load_state_dict(loaded(key).state_dict())


@pytest.mark.parametrize("leaf", ["weight_codes", "weight_scale", "input_scale", "bias"])
def test_a_missing_key_is_named(leaf, loaded):
    model = loaded("vit")
    state = model.state_dict()
    del state[f"blocks.1.attn.qkv.{leaf}"]
    with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "blocks\.1\.attn\.qkv\.{leaf}"'):
        loaded("vit").load_state_dict(state)


def test_a_state_dict_of_another_scheme_is_refused(loaded):
    with pytest.raises(RuntimeError, match=r"Missing key.*input_scale"):
        loaded("vit").load_state_dict(loaded("vit-dynamic").state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*input_scale"):
        loaded("vit-dynamic").load_state_dict(loaded("vit").state_dict())


@pytest.mark.parametrize("key", ["vit", "unet", "llama", "t5"])
def test_safetensors_save_model(key, loaded, tmp_path):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    save_model(model, str(tmp_path / "m.safetensors"))
    other = loaded(key)
    spoil(other)
    if key == "llama":
        other.model.rotary_emb.inv_freq.copy_(model.model.rotary_emb.inv_freq)
    assert load_model(other, str(tmp_path / "m.safetensors")) == (set(), [])
    assert_same_codes(other, before)
    assert torch.equal(output(other, name), want)


def test_the_state_dict_of_torch_distributed(loaded):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = loaded("llama")
    before, want = stored(model), output(model, "llama")
    state = {k: v.clone() for k, v in get_model_state_dict(model).items()}
    assert set(state) == set(model.state_dict())
    other = loaded("llama")
    for tensor in other.state_dict().values():
        tensor.zero_()
    set_model_state_dict(other, state)
    assert_same_codes(other, before)
    assert torch.equal(output(other, "llama"), want)
