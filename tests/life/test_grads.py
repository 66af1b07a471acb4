"""Gradients through loaded models, and training of what stays trainable on top of FP8 weights."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import anyfp8
from tests.helpers import assert_close
from tests.life.models import assert_same_codes, call, fp8_layers, inputs, stored

#: model → its input that can have a gradient
IMAGES = {"vit": "x", "efficientnet": "x", "unet": "sample", "encoder": "src"}


def embed(model):
    """Llama, from embeddings that can have a gradient."""
    x = model.get_input_embeddings()(inputs("llama")["input_ids"]).detach().requires_grad_()
    return model(inputs_embeds=x, use_cache=False).logits


def gradients(model, key):
    """Of a loss, for the input and every parameter that has one."""
    arguments = inputs(key)
    x = arguments[IMAGES[key]].requires_grad_()
    model.zero_grad()
    call(model, arguments).square().mean().backward()
    return {"input": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("key", IMAGES)
def test_gradients_reach_inputs_and_biases(key, loaded):
    model = loaded(key)
    found = gradients(model, key)
    assert found["input"].abs().sum() > 0
    biases = [n for n, p in model.named_parameters() if n.endswith("bias") and p.numel()]
    assert set(biases) <= set(found)
    assert sum(bool(found[n].abs().sum() > 0) for n in biases) > 0.8 * len(biases)


@pytest.mark.parametrize("key", IMAGES)
def test_weight_only_gradients_are_those_of_the_dequantized_model(key, loaded):
    model = loaded(key)
    anyfp8.set_backend(model, "dequantized")
    found = gradients(model, key)
    want = gradients(anyfp8.dequantize(loaded(key)), key)
    assert set(found) <= set(want)
    for name, grad in found.items():
        if want[name].abs().max() > 1e-7:  # a bias before a norm has none but rounding errors
            assert_close(grad, want[name], 1e-3)


@pytest.mark.parametrize("key", ["vit", "unet"])
def test_native_gradients_are_the_emulated_ones(key, loaded):
    """A CPU runs scaled_mm, too, slowly; convolutions stay emulated."""
    model = loaded(key)
    want = gradients(model, key)
    for layer in fp8_layers(model).values():
        if isinstance(layer, nn.Linear):
            layer.select_backend("native")
    found = gradients(model, key)
    assert set(found) == set(want)
    assert_close(found["input"], want["input"], 0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, loaded):
    model, x = loaded("vit"), inputs("vit")["x"]
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        value = x.clone().requires_grad_()
        model.zero_grad()
        run(value).square().mean().backward()
        found.append([value.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_gradient_checkpointing_of_transformers(loaded):
    model = loaded("llama").train()
    want = embed(model)
    want.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable()
    got = embed(model)
    got.square().mean().backward()
    assert torch.equal(got, want)
    assert grads
    for name, grad in grads.items():
        assert torch.equal(model.get_parameter(name).grad, grad)


# --- training on top ---
@pytest.mark.parametrize("key", ["vit", "efficientnet", "unet", "encoder"])
def test_training_biases_and_norms(key, loaded):
    model = loaded(key)
    before, arguments = stored(model), inputs(key)
    goal = call(model, arguments).detach().roll(1, 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=1e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (call(model, arguments) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]
    assert_same_codes(model, before)


def test_training_under_autocast(loaded):
    model, arguments = loaded("vit"), inputs("vit")
    before = stored(model)
    labels = torch.tensor([3, 7])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(call(model, arguments), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_same_codes(model, before)


def test_a_new_float_head(loaded):
    """timm's way to fine-tune: another classifier on a frozen FP8 trunk."""
    model = loaded("vit").requires_grad_(False)
    before = stored(model)
    model.reset_classifier(5)
    assert type(model.head) is nn.Linear
    labels = torch.tensor([3, 1])
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(model, inputs("vit")), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert_same_codes(model, {k: v for k, v in before.items() if not k.startswith("head.")})
