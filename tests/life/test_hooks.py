"""Hooks from before and after the load; modes, freezing and writes of whole models."""

import copy

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Conv2d, FP8Linear, ReadOnlyWeightError
from tests.life.models import MODELS, assert_same_codes, build, call, fp8_layers, inputs, name_of, output, stored
from tests.life.test_grads import embed, gradients

#: model → one of its FP8 layers
LAYER = {
    "vit": "blocks.0.mlp.fc1",
    "efficientnet": "conv_stem",
    "unet": "conv_in",
    "llama": "model.layers.0.mlp.up_proj",
}
layers = pytest.mark.parametrize(("key", "path"), LAYER.items(), ids=LAYER)


# --- hooks ---
@layers
def test_hooks_from_before_the_load(key, path, folder, loaded):
    model, want = build(key), output(loaded(key), key)
    layer, seen = model.get_submodule(path), []
    handles = [
        layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", type(m).__name__))),
        layer.register_forward_hook(lambda m, args, out: seen.append(("post", type(m).__name__))),
        layer.register_forward_hook(lambda m, args, kwargs, out: out * 0, with_kwargs=True, always_call=True),
    ]
    anyfp8.load(model, folder(key))
    assert not torch.equal(output(model, key), want)
    kind = "FP8Conv2d" if "conv" in path else "FP8Linear"
    assert seen == [("pre", kind), ("post", kind)]
    for handle in handles:
        handle.remove()
    assert torch.equal(output(model, key), want)
    assert len(seen) == 2


@layers
def test_hooks_from_after_the_load_survive_casts_copies_and_dequantize(key, path, loaded):
    model, want = loaded(key), output(loaded(key), key)
    model.get_submodule(path).register_forward_hook(lambda m, args, out: out + 1)
    hooked = output(model, key)
    assert not torch.equal(hooked, want)
    assert torch.equal(output(copy.deepcopy(model).double().float(), key), hooked)
    plain = anyfp8.dequantize(copy.deepcopy(model))
    bare = anyfp8.dequantize(loaded(key))
    assert not torch.equal(output(plain, key), output(bare, key))


@layers
def test_backward_hooks(key, path, loaded):
    model, grads = loaded(key), []
    layer = model.get_submodule(path)
    handle = layer.register_full_backward_hook(lambda m, into, out: grads.append(out[0].shape))
    if key == "llama":
        embed(model).square().mean().backward()
    else:
        gradients(model, key)
    handle.remove()
    assert len(grads) == 1


def test_global_hooks_see_fp8_layers(loaded):
    seen = set()
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.add(type(m)))
    output(loaded("unet"), "unet")
    handle.remove()
    assert {FP8Linear, FP8Conv2d} <= seen


@pytest.mark.parametrize("when", ["before", "after"])
def test_state_dict_hooks(when, folder, loaded):
    model, seen = build("vit"), []

    def register():
        layer = model.get_submodule(LAYER["vit"])
        layer.register_state_dict_pre_hook(lambda m, prefix, keep: seen.append(("pre", type(m))))
        layer.register_state_dict_post_hook(lambda m, state, prefix, meta: seen.append(("post", type(m))))
        layer.register_load_state_dict_pre_hook(lambda m, *args: seen.append(("load", type(m))))
        layer.register_load_state_dict_post_hook(lambda m, keys: seen.append(("loaded", type(m))))

    if when == "before":
        register()
    anyfp8.load(model, folder("vit"))
    if when == "after":
        register()
    want = output(model, "vit")
    model.load_state_dict(model.state_dict())
    assert seen == [("pre", FP8Linear), ("post", FP8Linear), ("load", FP8Linear), ("loaded", FP8Linear)]
    assert torch.equal(output(model, "vit"), want)


def test_load_state_dict_hooks_of_a_layer_that_is_dequantized(loaded):
    model, seen = loaded("vit"), []
    layer = model.get_submodule(LAYER["vit"])
    layer.register_load_state_dict_pre_hook(lambda m, *args: seen.append(type(m)))
    del layer
    anyfp8.dequantize(model)
    model.load_state_dict(model.state_dict())
    assert seen == [nn.Linear]


# --- modes and freezing ---
@pytest.mark.parametrize("key", MODELS)
def test_train_and_eval(key, loaded):
    model = loaded(key)
    name, before = name_of(key), stored(model)
    want = output(model, name)
    model.train()
    assert all(m.training for m in model.modules())
    output(model, name)
    model.eval()
    assert not any(m.training for m in model.modules())
    assert_same_codes(model, before)
    if key != "efficientnet":  # its BatchNorm has counted the batch
        assert torch.equal(output(model, name), want)


@pytest.mark.parametrize("key", MODELS)
def test_requires_grad_reaches_parameters_only(key, loaded):
    model = loaded(key)
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    assert not any(b.requires_grad for b in model.buffers())
    for layer in fp8_layers(model).values():
        layer.weight.requires_grad = False
        assert not layer.weight.requires_grad
    if key not in ("llama", "t5"):
        call(model, inputs(key)).square().mean().backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if n.endswith("bias"))


# --- writes ---
@pytest.mark.parametrize("key", ["vit", "unet", "llama"])
def test_initialisers_and_copies_into_weights_are_refused(key, loaded):
    model = loaded(key)
    before = stored(model)
    path = LAYER[key]

    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=0.02)

    zeros = torch.zeros(model.get_submodule(path).weight.numel())
    for write in (
        lambda: model.apply(initialise),
        lambda: model.get_submodule(path).reset_parameters(),
        lambda: nn.utils.vector_to_parameters(zeros, [model.get_submodule(path).weight]),
        lambda: setattr(model.get_submodule(path), "weight", nn.Parameter(torch.ones(1))),
    ):
        with pytest.raises(ReadOnlyWeightError, match=r"anyfp8\.dequantize\(model\) first"):
            write()
    assert_same_codes(model, before)
