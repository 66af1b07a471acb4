"""accelerate's offloading of loaded models, with the CPU in both roles: hooks, meta tensors, files on disk."""

import itertools
import logging

import pytest
import torch
from torch import nn

import anyfp8
from tests.life.models import assert_same_codes, build, fp8_layers, inputs, name_of, output, stored, types_of

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install anyfp8[diffusers]")
hooks = pytest.importorskip("accelerate.hooks")

CPU = torch.device("cpu")
#: not torch's encoder: nn.MultiheadAttention reads its children's tensors without a call, which no hook can see
KEYS = ["vit", "llama", "nfnet"]
buffers = pytest.mark.parametrize("offload_buffers", [False, True])
#: what a device map sends to the disk
PART = {"vit": "blocks", "unet": "up_blocks", "llama": "model.layers.0", "t5": "decoder", "nfnet": "stages"}


def to_disk(model, tmp_path, offload_buffers):
    options = {"offload_dir": str(tmp_path / "offload"), "offload_buffers": offload_buffers}
    return accelerate.disk_offload(model, execution_device=CPU, **options)


def to_cpu(model, tmp_path, offload_buffers):
    return accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=offload_buffers)


def dispatched(model, tmp_path, offload_buffers):
    options = {"offload_dir": str(tmp_path / "offload"), "offload_buffers": offload_buffers}
    part = next(part for part in PART.values() if any(n == part for n, _ in model.named_modules()))
    return accelerate.dispatch_model(model, device_map={"": "cpu", part: "disk"}, main_device="cpu", **options)


WAYS = {"cpu_offload": to_cpu, "disk_offload": to_disk, "dispatch_model": dispatched}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch):
    """It collects garbage once for each tensor, and warns of meta tensors."""
    monkeypatch.setattr("accelerate.utils.modeling.clear_device_cache", lambda *args, **kwargs: None)
    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)


# --- offloading and back ---
@pytest.mark.parametrize(
    ("key", "way", "offload_buffers"),
    [*itertools.product(KEYS, WAYS, [False, True]), ("unet", "cpu_offload", True), ("t5", "disk_offload", True)],
)
def test_offloaded_models_compute_the_same_twice_and_come_back(key, way, offload_buffers, loaded, tmp_path):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    WAYS[way](model, tmp_path, offload_buffers)
    assert any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if way != "dispatch_model":
        assert all(m.weight_codes.is_meta == offload_buffers for m in fp8_layers(model).values())
    assert torch.equal(output(model, name), want)
    assert torch.equal(output(model, name), want)
    hooks.remove_hook_from_submodules(model)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", [*KEYS, "encoder"])
def test_a_device_map_of_one_device(key, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    assert torch.equal(output(model, name), want)
    hooks.remove_hook_from_module(model, recurse=True)
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", ["vit", "unet", "llama"])
def test_one_hook_for_the_whole_model(key, loaded):
    """What diffusers' `enable_model_cpu_offload` puts on each part of a pipeline."""
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    model, hook = accelerate.cpu_offload_with_hook(model, CPU)
    assert torch.equal(output(model, name), want)
    hook.offload()
    assert torch.equal(output(model, name), want)
    hook.remove()
    assert_same_codes(model, before)
    assert torch.equal(output(model, name), want)


def test_sizes_that_accelerate_computes(loaded):
    """Device maps are made from these: a code is one byte."""
    from accelerate.utils import compute_module_sizes

    model = loaded("llama")
    tensors = (*model.parameters(), *model.buffers())
    assert compute_module_sizes(model)[""] == sum(t.nbytes for t in tensors)
    layer = model.model.layers[0].mlp.up_proj
    assert compute_module_sizes(model)["model.layers.0.mlp.up_proj"] == 128 * 64 + 128 * 4 + 4
    assert layer.weight_codes.nbytes == 128 * 64


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_layerwise_casting(storage, loaded):
    model = loaded("llama")
    before, want = stored(model), output(model, "llama")
    accelerate.big_modeling.attach_layerwise_casting_hooks(model, storage, torch.float32)
    assert torch.equal(output(model, "llama"), want)  # there are no biases, and norms and embedding are skipped
    assert_same_codes(model, before)


# --- what else is done to models that have or had hooks ---
@pytest.mark.parametrize("key", ["vit", "llama"])
def test_dequantize_after_the_hooks_are_gone(key, loaded, tmp_path):
    """accelerate leaves the bound method `forward` on each module when it removes its hooks."""
    model, want = loaded(key), output(anyfp8.dequantize(loaded(key)), key)
    to_cpu(model, tmp_path, True)
    output(model, key)
    hooks.remove_hook_from_submodules(model)
    anyfp8.dequantize(model)
    assert types_of(model) == types_of(build(key))
    assert torch.equal(output(model, key), want)


@pytest.mark.parametrize("key", ["vit", "llama"])
def test_loading_over_after_the_hooks_are_gone(key, loaded, folder, tmp_path):
    model, want = loaded(key), output(loaded(key), key)
    to_cpu(model, tmp_path, True)
    hooks.remove_hook_from_submodules(model)
    anyfp8.load(model, folder(key))
    assert torch.equal(output(model, key), want)


@pytest.mark.parametrize("key", ["vit", "llama"])
def test_a_float_model_that_had_hooks_gets_real_fp8_layers(key, loaded, folder, tmp_path):
    model, want = build(key), output(loaded(key), key)
    to_cpu(model, tmp_path, True)
    hooks.remove_hook_from_submodules(model)
    anyfp8.load(model, folder(key))
    assert len(fp8_layers(model)) == len(fp8_layers(loaded(key)))
    assert torch.equal(output(model, key), want)


@pytest.mark.parametrize("key", ["vit", "llama"])
def test_set_backend_after_the_hooks_are_gone(key, loaded, tmp_path):
    model = loaded(key)
    to_cpu(model, tmp_path, True)
    hooks.remove_hook_from_submodules(model)
    other = loaded(key)
    for net in (model, other):
        anyfp8.set_backend(net, "dequantized")
    assert torch.equal(output(model, key), output(other, key))


@ways
@buffers
def test_dequantize_of_an_offloaded_model_is_refused(way, offload_buffers, loaded, tmp_path):
    """Its tensors are on meta and its forwards are hooks: what comes out must not be an empty model."""
    model, decoded = loaded("vit"), output(anyfp8.dequantize(loaded("vit")), "vit")
    want = output(model, "vit")
    WAYS[way](model, tmp_path, offload_buffers)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"(?s)forward was replaced on the instance.*accelerate"):
        anyfp8.dequantize(model)
    assert torch.equal(output(model, "vit"), want)
    hooks.remove_hook_from_submodules(model)
    assert torch.equal(output(anyfp8.dequantize(model), "vit"), decoded)


@ways
def test_save_of_an_offloaded_model_is_refused(way, loaded, tmp_path):
    model = loaded("vit")
    WAYS[way](model, tmp_path, True)
    with pytest.raises(anyfp8.AnyFP8Error, match="on the meta device: there is nothing to save"):
        anyfp8.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"exclude": "*"}], ids=["fp8", "decoded"])
def test_loading_over_an_offloaded_model_is_refused(options, loaded, folder, tmp_path):
    model = loaded("vit")
    want = output(model, "vit")
    to_cpu(model, tmp_path, True)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"(?s)forward was replaced on the instance.*accelerate"):
        anyfp8.load(model, folder("vit"), **options)
    assert torch.equal(output(model, "vit"), want)


def test_a_float_checkpoint_over_an_offloaded_model_is_refused(loaded, tmp_path):
    model = loaded("vit")
    want = output(model, "vit")
    to_cpu(model, tmp_path, True)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"(?s)forward was replaced on the instance.*accelerate"):
        anyfp8.load(model, build("vit").state_dict())
    assert torch.equal(output(model, "vit"), want)


def test_gradients_through_an_offloaded_model(loaded, tmp_path):
    model, x = loaded("vit").requires_grad_(False), inputs("vit")["x"]
    grads = []
    for _ in range(2):
        value = x.clone().requires_grad_()
        model(value).square().mean().backward()
        grads.append(value.grad)
        if not hasattr(model, "_hf_hook"):
            to_cpu(model, tmp_path, True)
    assert torch.equal(*grads)
    assert isinstance(model.head, nn.Linear)
