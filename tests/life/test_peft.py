"""PEFT adapters on loaded FP8 models: training, files of adapters, merging."""

import copy

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Linear, ReadOnlyWeightError
from tests.helpers import assert_close, sqnr
from tests.life.models import assert_same_codes, build, call, fp8_layers, inputs, name_of, output, stored

peft = pytest.importorskip("peft", reason="peft is not installed")

#: what PEFT asks transformers' models
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
#: model → what LoRA goes onto
TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "llama-dynamic": ["q_proj", "v_proj"],
    "vit": ["qkv"],
    "unet": ["to_q", "to_v"],
    "efficientnet": ["conv_stem", "conv_pw"],
}
keys = pytest.mark.parametrize("key", TARGETS)


def config(key, **options):
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS[key], "lora_dropout": 0.0} | options)


def adapted(model, key, seed=0, **options):
    """With adapters whose second matrix isn't zero, as after training."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = peft.get_peft_model(model, config(key, **options))
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return net.eval()


def train(net, key, steps=6, lr=5e-3):
    """Towards the outputs of the other half of the batch; returns the losses."""
    arguments = inputs(name_of(key))
    goal = call(net, arguments).detach().roll(1, 0)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (call(net, arguments) - goal).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- training ---
@keys
def test_a_new_adapter_changes_nothing_and_then_learns(key, loaded):
    model, name = loaded(key), name_of(key)
    before, want = stored(model), output(model, name)
    with torch.random.fork_rng():
        net = peft.get_peft_model(model, config(key))
    assert torch.equal(output(net, name), want)
    trained = {n for n, p in net.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n for n in trained)
    losses = train(net, key)
    assert losses[-1] < losses[0]
    assert not torch.equal(output(net, name), want)
    with net.disable_adapter():
        assert torch.equal(output(net, name), want)
    assert list(stored(net).values()) != []
    plain = net.unload()
    assert_same_codes(plain, before)
    assert torch.equal(output(plain, name), want)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "lora_only"}, {"use_rslora": True}], ids=str)
def test_variants_of_lora(options, loaded):
    model = loaded("vit")
    before = list(stored(model).values())
    net = adapted(model, "vit", **options)
    losses = train(net, "vit", 4)
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, stored(net).values(), before))


def test_all_linear_layers_of_a_language_model(loaded):
    model = loaded("llama")
    net = adapted(model, "llama", target_modules="all-linear")
    wrapped = {n for n, m in net.named_modules() if isinstance(m, peft.tuners.lora.Linear)}
    assert len(wrapped) == 14
    assert all(isinstance(net.get_submodule(n).base_layer, FP8Linear) for n in wrapped)
    losses = train(net, "llama", 4)
    assert losses[-1] < losses[0]


def test_embeddings(loaded):
    model = loaded("t5")
    net = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["decoder.embed_tokens"]))
    before = output(net, "t5")
    for name, parameter in net.named_parameters():
        if "lora_embedding_" in name:
            nn.init.normal_(parameter)
    assert not torch.equal(output(net, "t5"), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_in_mixed_precision(dtype, loaded):
    model = loaded("llama", dtype=dtype)
    before = list(stored(model).values())
    net = adapted(model, "llama")
    arguments = inputs("llama")
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = call(net, arguments)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), arguments["input_ids"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, stored(net).values(), before))


def test_gradient_checkpointing_with_inputs_that_need_gradients(loaded):
    net = adapted(loaded("llama"), "llama").train()
    found = []
    for activate in (False, True):
        if activate:
            net.get_base_model().activation_checkpointing_enable()
            net.enable_input_require_grads()
        net.zero_grad()
        call(net, inputs("llama")).square().mean().backward()
        found.append({n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


# --- files ---
@keys
def test_an_adapter_is_saved_and_loaded_onto_a_fresh_fp8_model(key, loaded, tmp_path):
    net, name = adapted(loaded(key), key), name_of(key)
    want = output(net, name)
    net.save_pretrained(tmp_path / "adapter")
    assert sum(f.stat().st_size for f in (tmp_path / "adapter").iterdir()) < 200_000
    again = peft.PeftModel.from_pretrained(loaded(key), tmp_path / "adapter").eval()
    assert torch.equal(output(again, name), want)


def test_a_head_that_is_trained_with_the_adapter(loaded, tmp_path):
    """`modules_to_save` copies the FP8 head; its bias can be trained and comes back."""
    net = adapted(loaded("vit"), "vit", modules_to_save=["head"])
    losses = train(net, "vit", 4)
    assert losses[-1] < losses[0]
    want = output(net, "vit")
    net.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded("vit"), tmp_path / "adapter").eval()
    assert torch.equal(output(again, "vit"), want)


@keys
def test_the_state_dict_of_an_adapted_model(key, loaded):
    net, name = adapted(loaded(key), key), name_of(key)
    other = adapted(loaded(key), key, seed=1)
    want = output(net, name)
    assert not torch.equal(output(other, name), want)
    other.load_state_dict(net.state_dict())
    assert torch.equal(output(other, name), want)


@pytest.mark.parametrize("key", ["llama", "vit"])
def test_an_adapted_model_is_saved_by_anyfp8_and_loaded(key, loaded, tmp_path):
    net, name = adapted(loaded(key), key), name_of(key)
    want = output(net, name)
    anyfp8.save(net, tmp_path / "whole")
    fresh = adapted(build(name), key, seed=1)
    anyfp8.load(fresh, tmp_path / "whole")
    assert {type(m) for m in fp8_layers(fresh).values()} == {type(m) for m in fp8_layers(net).values()}
    assert torch.equal(output(fresh, name), want)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: m.double().float()])
def test_copies_and_casts_of_an_adapted_model(how, loaded):
    net = adapted(loaded("llama"), "llama")
    want = output(net, "llama")
    assert torch.equal(output(how(net), "llama"), want)


# --- merging ---
@keys
@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_codes_is_refused(key, safe, loaded):
    model, name = loaded(key), name_of(key)
    before = list(stored(model).values())
    net = adapted(model, key)
    want = output(net, name)
    with pytest.raises(ReadOnlyWeightError, match=r"Call anyfp8\.dequantize\(model\) first"):
        net.merge_adapter(safe_merge=safe)
    assert all(map(torch.equal, stored(net).values(), before))
    assert torch.equal(output(net, name), want)
    with pytest.raises(ReadOnlyWeightError, match=r"Call anyfp8\.dequantize\(model\) first"):
        net.merge_and_unload(safe_merge=safe)
    assert all(map(torch.equal, stored(net).values(), before))


@keys
def test_merging_after_dequantize(key, loaded):
    net, name = adapted(loaded(key), key), name_of(key)
    anyfp8.dequantize(net)
    assert not fp8_layers(net)
    want = output(net, name)
    merged = net.merge_and_unload()
    assert not any("lora" in n for n, _ in merged.named_parameters())
    assert_close(output(merged, name), want, 1e-4)
    assert {n: type(m) for n, m in merged.named_modules()} == {n: type(m) for n, m in build(name).named_modules()}


def test_a_merged_model_can_be_quantized_again(loaded, tmp_path):
    net = adapted(loaded("vit"), "vit")
    want = output(net, "vit")
    merged = anyfp8.dequantize(net).merge_and_unload()
    anyfp8.quantize(merged, "FP8_DYNAMIC")
    anyfp8.save(merged, tmp_path / "merged")
    again = anyfp8.load(build("vit"), tmp_path / "merged")
    assert torch.equal(output(again, "vit"), output(merged, "vit"))
    assert sqnr(output(again, "vit"), want) > 12


def test_initialisations_that_write_the_weight_are_refused(loaded):
    with pytest.raises(ReadOnlyWeightError, match=r"Call anyfp8\.dequantize\(model\) first"):
        peft.get_peft_model(loaded("vit"), config("vit", init_lora_weights="pissa"))
