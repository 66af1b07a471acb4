"""What diffusers does to models that are loaded: casting for storage, offloading in groups, LoRA, fused attention."""

import copy

import pytest
import torch

import anyfp8
from anyfp8 import ReadOnlyWeightError
from tests.helpers import sqnr
from tests.life.models import assert_same_codes, build, fp8_layers, output, stored

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install anyfp8[diffusers]")
diffusers_hooks = pytest.importorskip("diffusers.hooks")

CPU = torch.device("cpu")


# --- storage dtypes ---
@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_enable_layerwise_casting(storage, loaded):
    """Biases are stored in the narrow dtype, as asked; codes and scales keep their bytes."""
    model = loaded("unet")
    before, want = stored(model), output(model, "unet")
    model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    first = output(model, "unet")
    assert torch.equal(output(model, "unet"), first)
    assert_same_codes(model, before)
    plain = build("unet")
    reference = output(plain, "unet")
    plain.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    assert sqnr(first, want) > min(sqnr(output(plain, "unet"), reference), 25) - 5


@pytest.mark.parametrize("key", ["vit", "efficientnet", "llama"])
def test_apply_layerwise_casting_to_other_models(key, loaded):
    model = loaded(key)
    before, want = stored(model), output(model, key)
    diffusers_hooks.apply_layerwise_casting(
        model, torch.bfloat16, torch.float32, skip_modules_pattern=("norm", "bn", "embed")
    )
    got = output(model, key)
    assert_same_codes(model, before)
    assert sqnr(got, want) > 20


# --- offloading ---
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
@pytest.mark.parametrize("key", ["unet", "vit", "llama"])
def test_group_offloading(kind, key, loaded):
    model = loaded(key)
    before, want = stored(model), output(model, key)
    options = {"offload_type": kind} | ({"num_blocks_per_group": 1} if kind == "block_level" else {})
    diffusers_hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, **options)
    assert torch.equal(output(model, key), want)
    assert torch.equal(output(model, key), want)
    assert_same_codes(model, before)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offloading_to_disk(kind, loaded, tmp_path):
    model = loaded("unet")
    want = output(model, "unet")
    options = {"offload_type": kind} | ({"num_blocks_per_group": 1} if kind == "block_level" else {})
    diffusers_hooks.apply_group_offloading(
        model, onload_device=CPU, offload_device=CPU, offload_to_disk_path=str(tmp_path / "disk"), **options
    )
    assert torch.equal(output(model, "unet"), want)
    assert torch.equal(output(model, "unet"), want)
    assert {t.dtype for t in model.buffers()} == {torch.uint8, torch.float32}


@pytest.mark.parametrize("what", ["load", "dequantize"])
def test_models_with_hooks_of_diffusers(what, loaded, folder):
    """Its hooks replace `forward` on the instance, too."""
    model, want = loaded("unet"), output(loaded("unet"), "unet")
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"(?s)forward was replaced on the instance"):
        anyfp8.load(model, folder("unet")) if what == "load" else anyfp8.dequantize(model)
    assert sqnr(output(model, "unet"), want) > 15
    assert fp8_layers(model)


# --- LoRA ---
def lora(model):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.3)
    return model


def test_lora_of_diffusers(loaded):
    model = loaded("unet")
    want = output(model, "unet")
    before = list(stored(model).values())
    lora(model)
    adapted = output(model, "unet")
    assert not torch.equal(adapted, want)
    with pytest.raises(ReadOnlyWeightError, match=r"Call anyfp8\.dequantize\(model\) first"):
        model.fuse_lora()
    assert all(map(torch.equal, stored(model).values(), before))
    assert torch.equal(output(model, "unet"), adapted)
    model.disable_adapters()
    assert torch.equal(output(model, "unet"), want)


def test_fuse_lora_after_dequantize(loaded):
    model = anyfp8.dequantize(lora(loaded("unet")))
    want = output(model, "unet")
    model.fuse_lora()
    assert sqnr(output(model, "unet"), want) > 80
    model.unfuse_lora()
    assert sqnr(output(model, "unet"), want) > 80


# --- the rest ---
def test_dtype_and_device_that_pipelines_ask_for(loaded):
    model = loaded("unet")
    assert (model.dtype, model.device) == (torch.float32, CPU)
    assert model.to(torch.bfloat16).dtype == torch.bfloat16
    assert model.half().dtype == torch.float16
    assert {m.compute_dtype for m in fp8_layers(model).values()} == {torch.float16}


def test_fused_projections_read_the_weights(loaded):
    """They become float layers, which leave their input alone: the weights are the same, the contract another."""
    model = loaded("unet")
    anyfp8.set_backend(model, "dequantized")
    want = output(model, "unet")
    model.fuse_qkv_projections()
    assert sqnr(output(model, "unet"), want) > 80
    model.unfuse_qkv_projections()
    assert torch.equal(output(model, "unet"), want)


def test_gradient_checkpointing(loaded):
    from tests.life.test_grads import gradients

    model = loaded("unet").train()
    want = gradients(model, "unet")
    model.enable_gradient_checkpointing()
    got = gradients(model, "unet")
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_ema_of_diffusers(loaded):
    from diffusers.training_utils import EMAModel

    model = loaded("unet")
    want = output(model, "unet")
    ema = EMAModel(model.parameters())
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.conv_out.bias += 1
    ema.step(moved.parameters())
    ema.copy_to(moved.parameters())
    got = output(moved, "unet")
    assert sqnr(got - got.mean() + want.mean(), want) > 30
