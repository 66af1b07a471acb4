"""The small real models that these tests load FP8 checkpoints into, and how to call and compare them."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import QuantizationScheme
from anyfp8.layers import FP8Layer, parametrize_codes
from anyfp8.layers.storage import STORED, FP8Storage
from anyfp8.numerics import quantize_tiled
from tests.helpers import assert_same_bytes, randn

E4M3 = torch.float8_e4m3fn


# --- building ---
def vit():
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install anyfp8[timm]")
    return timm.create_model("test_vit", img_size=64, depth=2)


def efficientnet():
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install anyfp8[timm]")
    return timm.create_model("test_efficientnet", num_classes=10)


def nfnet():
    """Its convolutions are subclasses with a forward of their own: their codes stay behind a parametrization."""
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install anyfp8[timm]")
    return timm.create_model("test_nfnet", num_classes=10)


def unet():
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install anyfp8[diffusers]")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(16, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def llama():
    transformers = pytest.importorskip("transformers", reason="pip install anyfp8[transformers]")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def t5():
    transformers = pytest.importorskip("transformers", reason="pip install anyfp8[transformers]")
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu"
    )
    return transformers.T5ForConditionalGeneration(config)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def build(name):
    """A float model with weights that depend on nothing but the name, and that aren't all zeros or ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = globals()[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


# --- calling ---
def inputs(name, n=2, seed=0):
    """Keyword arguments for one call with a batch of n."""
    tokens = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"x": randn(n, 3, 64, 64, seed=seed)}
    if name in ("efficientnet", "nfnet"):
        return {"x": randn(n, 3, 32, 32, seed=seed)}
    if name == "unet":
        text = randn(n, 5, 32, seed=seed + 1)
        sample, step = randn(n, 4, 8, 8, seed=seed), torch.arange(n) * 9 + 1
        return {"sample": sample, "timestep": step, "encoder_hidden_states": text, "return_dict": False}
    if name == "llama":
        return {"input_ids": torch.randint(3, 128, (n, 9), generator=tokens), "use_cache": False, "return_dict": False}
    if name == "t5":
        ids, start = torch.randint(3, 128, (n, 9), generator=tokens), torch.randint(3, 128, (n, 5), generator=tokens)
        return {"input_ids": ids, "decoder_input_ids": start, "use_cache": False, "return_dict": False}
    return {"src": randn(n, 6, 32, seed=seed)}


def as_dtype(arguments, dtype):
    """The arguments with their floating tensors in another dtype."""
    floats = {k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {k: v.to(dtype) if k in floats else v for k, v in arguments.items()}


def call(model, arguments):
    out = model(**arguments)
    return out if isinstance(out, torch.Tensor) else out[0]


def output(model, name, dtype=torch.float32, n=2, seed=0):
    """The model's output for fixed inputs, without gradients."""
    with torch.no_grad():
        return call(model, as_dtype(inputs(name, n, seed), dtype))


# --- checkpoints ---
@dataclass(frozen=True)
class Case:
    """One checkpoint: a model and how it is quantized."""

    name: str
    scheme: str = "FP8_STATIC"
    options: dict = field(default_factory=dict)


CASES = {
    "vit": Case("vit"),
    "vit-dynamic": Case("vit", "FP8_DYNAMIC"),
    "efficientnet": Case("efficientnet"),
    "unet": Case("unet"),
    "llama": Case("llama"),
    "llama-dynamic": Case("llama", "FP8_DYNAMIC"),
    "t5": Case("t5", options={"include": "*"}),  # with the embedding that is tied to encoder, decoder and head
    "nfnet": Case("nfnet", "bare"),
}
#: one of each model, for what doesn't depend on the scheme
MODELS = ["vit", "efficientnet", "unet", "llama", "t5", "nfnet", "encoder"]


def name_of(key):
    """The model of a key of CASES or MODELS."""
    return CASES[key].name if key in CASES else key


def quantized(case):
    """The quantized model of one of the CASES, in memory."""
    if case.scheme == "bare":
        return bare(case.name)
    calibration = None if case.scheme == "FP8_DYNAMIC" else [inputs(case.name, 4)]
    return anyfp8.quantize(build(case.name), case.scheme, calibration=calibration, **case.options)


def bare(name):
    """A model that a file of FP8 casts without scales is loaded into."""
    state = build(name).state_dict()
    tensors = {k: v.to(E4M3) if k.endswith("weight") and v.dim() > 1 else v for k, v in state.items()}
    return anyfp8.load(build(name), tensors, dialect="bare")


def bare_encoder():
    """torch's own encoder, with codes also behind `in_proj_weight`: no layer's weight, so no file says it, yet."""
    model = bare("encoder")
    for layer in model.layers:
        codes, scale = quantize_tiled(layer.self_attn.in_proj_weight, "float8_e4m3fn", (1, -1))
        values = {"weight_codes": codes.view(torch.uint8), "weight_scale": scale}
        part = (QuantizationScheme("float8_e4m3fn", (1, -1)), values)
        parametrize_codes(layer.self_attn, "in_proj_weight", [part], torch.float32)
    return model


# --- comparing ---
def stored(model):
    """Every FP8 buffer of a model by name, copied."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, FP8Storage):
            found |= {f"{name}.{k}": b.clone() for k in STORED if (b := module._buffers[k]) is not None}
    return found


def assert_same_codes(model, before):
    """The FP8 buffers are what `stored` found before: same names, dtypes, shapes and bytes."""
    now = stored(model)
    assert before, "there is no FP8 layer"
    assert list(now) == list(before)
    for name, want in before.items():
        assert_same_bytes(now[name], want)


def fp8_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, FP8Layer)}


def types_of(model):
    return {name: type(m) for name, m in model.named_modules()}
